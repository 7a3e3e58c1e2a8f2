"""A run's folder: what is in it, and how it is continued. Every file in it is whole at every
moment.

recipe.yaml    the recipe, every key with its value
metrics.csv    one row per epoch; the first is the network before training
best/, last/   networks, as `normswap convert` writes them
state/run.pt   everything that continuing needs: read by torch.load with weights_only, so nothing in
it can run tensorboard/   and what other trackers write
"""

import io
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor, nn

from normswap import provenance
from normswap.errors import OptionError, OutputError, SourceError, first_line, spelled
from normswap.models import calling
from normswap.models.weight_files import hash_tensors
from normswap.storage import atomic_write, checkpoint
from normswap.training import recipe_files
from normswap.training.recipe import Recipe

COLUMNS = (
    "epoch",
    "update",
    "lr",
    "train_loss",
    "top1",
    "top5",
    "ema_top1",
    "images_per_s",
    "seconds",
    "val_loss",
)
Row = dict[str, float | None]


class State(TypedDict):
    """The tensors of a run that is to be continued."""

    model: dict[str, Tensor]
    ema: dict[str, Tensor] | None
    optimizer: dict[str, object]
    scaler: dict[str, object] | None


@dataclass
class TrainingState:
    """The position of a run.

    Args:
        update: updates done.
        rows: of metrics.csv.
        loss, seconds: sums over the epoch's updates so far.
        best, best_epoch: score and epoch of the network in best/.
    """

    update: int = 0
    rows: list[Row] = field(default_factory=list)
    loss: float = 0.0
    seconds: float = 0.0
    best: float | None = None
    best_epoch: float | None = None


class Folder:
    """The folder of one run; `identity` may not change when it is continued (`identify`)."""

    def __init__(self, place: Path, identity: Mapping[str, object]) -> None:
        self.place = place
        self.identity = dict(identity)
        self.best = place / "best"
        self.last = place / "last"
        self.state = place / "state" / "run.pt"

    def check_new(self) -> None:
        """Raise OutputError where no run can begin because the folder holds something."""
        if self.state.is_file():
            remedy = f"{spelled('resume', 'auto')} continues it; or give another folder"
            raise OutputError(f"{self.place} holds a run", remedy=remedy)
        names = {path.name for path in self.place.iterdir()} if self.place.is_dir() else set()
        if self.place.is_file() or names - {"recipe.yaml", "state"}:
            raise OutputError(
                f"{self.place} exists, and no run can be continued there",
                remedy="Give another folder",
            )

    def begin(self, recipe: Recipe) -> None:
        """Make the folder; raises OutputError: it cannot be made, or holds something else."""
        self.check_new()
        try:
            self.state.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"cannot write to {self.place}", error.strerror or str(error)
            ) from None
        atomic_write.text(self.place / "recipe.yaml", recipe_files.dump(recipe))

    def write_state(self, position: TrainingState, parts: State) -> None:
        """Replace the state atomically; raises OutputError, and the old state stays."""
        body = {"identity": self.identity, "position": vars(position), **parts}
        # On a full disk torch.save raises various errors, and may leave half a file.
        buffer = io.BytesIO()
        # Of a view, torch would save the whole storage, and the device.
        torch.save(calling.changed(body, Tensor.cpu), buffer)
        atomic_write.whole(self.state, lambda aside: aside.write_bytes(buffer.getbuffer()))

    def read_state(self) -> tuple[TrainingState, State]:
        """Return the state, if this run may be continued from it.

        Raises SourceError: it cannot be read; OptionError: it is that of another run; says what
        differs.
        """
        try:
            body = torch.load(self.state, map_location="cpu", weights_only=True)
            identity = body.pop("identity")
            position = TrainingState(**body.pop("position"))
        except Exception as error:
            raise SourceError(f"{self.state} cannot be read", first_line(error)) from None
        differ = recipe_files.differences(identity, self.identity)
        if differ:
            remedy = "Continue with the same recipe, network and images, or give another folder"
            raise OptionError(f"{self.place} holds another run", "; ".join(differ[:4]), remedy)
        return position, body

    def write_network(self, model: nn.Module, place: Path) -> None:
        for stale in self.place.glob(f".{place.name}.*"):
            shutil.rmtree(stale, ignore_errors=True)
        checkpoint.save(model, place, force=True)


def identify(model: nn.Module, recipe: Recipe, images: str) -> dict[str, object]:
    """Return what must not change when a run continues: the recipe, the network it starts from, the
    images.
    """
    keys = recipe_files.flat(recipe)
    for free in (
        "summary",
        "source",
        "data.root",
        "data.validation",
        "data.workers",
        "train.checkpoint",
    ):
        keys.pop(free, None)
    plan = provenance.of(model).plan.digest
    hashes = {
        "the network's hash": hash_tensors(model.state_dict()),
        "its plan's": plan,
        "the images'": images,
    }
    return keys | {name: digest[:12] for name, digest in hashes.items()}
