"""A run's folder: what is in it, and how it is continued.

Every file in it is whole at every moment.

state/run.pt   everything that is needed to continue. It is read by torch.load with weights_only, so
               no code in it can run. state/ is made before anything else; run.pt is written once
               best/ and last/ are there
recipe.yaml    the recipe, every key with its value
trackers/      what TensorBoard and other trackers write
best/, last/   networks, as `normswap convert` writes them
metrics.csv    one row per epoch; the first is the network before training. Without accuracies,
               val_loss is the loss on held-out inputs
"""

import csv
import hashlib
import io
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor, nn

from normswap import provenance
from normswap.copying import state_tensors
from normswap.errors import OptionError, OutputError, RecipeError, SourceError, first_line, spelled
from normswap.models import calling
from normswap.models.preprocessing import data_config
from normswap.models.weight_files import hash_tensors
from normswap.storage import atomic_write, checkpoint, left_behind, network_folder
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

TRACKERS = "trackers"
# The names that a run makes in its folder. True stands for a directory, False for a file.
_STATE = "state"
# In the folder of the state: the file that is locked while a run goes on.
_LOCK = ".normswap"
_RECIPE = "recipe.yaml"
_NAMES = {
    _STATE: True,
    _RECIPE: False,
    TRACKERS: True,
    # Older versions' trackers.
    "tensorboard": True,
    "best": True,
    "last": True,
    "metrics.csv": False,
}
# Entries that hold something that was trained. If no state is there, somebody has removed it.
_WITH_STATE = ("best", "last", "metrics.csv")
# Keys of the recipe that may change when a run is continued.
_FREE_KEYS = (
    "summary",
    "source",
    "data.root",
    "data.validation",
    "data.workers",
    "train.checkpoint",
)


class State(TypedDict):
    """The tensors from which a run is continued.

    Args:
        model: The network's tensors by name.
        ema: The averaged weights by name. None if the run keeps no average.
        optimizer: The optimizer's state dict.
        scaler: The state dict of the scaler of losses in half precision. None if there is no
            scaler.
    """

    model: dict[str, Tensor]
    ema: dict[str, Tensor] | None
    optimizer: dict[str, object]
    scaler: dict[str, object] | None


@dataclass
class TrainingState:
    """How far a run has come. It is saved beside the run's tensors.

    Args:
        update: The number of updates done.
        rows: The rows of metrics.csv.
        loss: The sum of the losses over the epoch's updates so far.
        seconds: The sum of the seconds over the epoch's updates so far.
        best: The score of the network in best/ (`engine.score`). A higher one is better.
        best_epoch: The epoch of the network in best/.
        per_epoch: The number of updates of an epoch. 0 in a state of an older version.
    """

    update: int = 0
    rows: list[Row] = field(default_factory=list)
    loss: float = 0.0
    seconds: float = 0.0
    best: float | None = None
    best_epoch: float | None = None
    per_epoch: int = 0


class Folder:
    """The folder of one run.

    Args:
        place: The folder's path.
        identity: The values by name that may not change when the run is continued (`identify`).
    """

    def __init__(self, place: Path, identity: Mapping[str, object]) -> None:
        self.place = place
        self.identity = dict(identity)
        self.best = place / "best"
        self.last = place / "last"
        self.metrics = place / "metrics.csv"
        self.recipe = place / _RECIPE
        self.state = place / _STATE / "run.pt"
        # The descriptor of the file that is locked while a run goes on here, and the folders that
        # were made for it.
        self._lock: int | None = None
        self._made: list[Path] = []

    def hold(self) -> None:
        """Keep other processes from training in the folder, until `release` is called.

        Raises:
            OutputError: Another process trains there, or the folder cannot be made.
        """
        folder = self.state.parent
        self._made = [path for path in (folder, self.place) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = left_behind.lock(folder / _LOCK)
        except OSError as error:
            raise OutputError(
                f"cannot write to {self.place}", error.strerror or str(error)
            ) from None
        if self._lock is None:
            raise OutputError(
                f"a run is going on in {self.place}",
                remedy="Wait for its end, or give another folder",
            )

    def release(self) -> None:
        """Let other processes train in the folder. It is removed if nothing was written into it."""
        if self._lock is None:
            return
        (self.state.parent / _LOCK).unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = None
        with suppress(OSError):
            for path in self._made:
                path.rmdir()

    def check_new(self) -> None:
        """Raise OutputError if the folder holds anything that a new run must not overwrite.

        A run that was killed before it wrote its first state may have left files. They are not
        worth keeping, so they are allowed. Any other file is a reason to refuse the folder.
        """
        if self.state.is_file():
            remedy = f"{spelled('resume', 'auto')} continues it; or give another folder"
            raise OutputError(f"{self.place} holds a run", remedy=remedy)
        foreign = self._foreign_entry()
        if foreign is not None:
            raise OutputError(
                f"{self.place} exists, and no run can be continued there",
                f"it holds {foreign}",
                "Give another folder",
            )

    def begin(self, recipe: Recipe) -> None:
        """Make the folder of a new run, and write the recipe into it.

        What a killed process has left unfinished in the folder is removed.

        Raises:
            OutputError: The folder cannot be made, or holds something else.
        """
        self.check_new()
        self.put_back()
        try:
            self.state.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"cannot write to {self.place}", error.strerror or str(error)
            ) from None
        atomic_write.text(self.recipe, recipe_files.dump(recipe))

    def _foreign_entry(self) -> str | None:
        """Return the first entry of the folder that no killed run can have left, or None.

        The killed run is one that has not written its first state. The result is the entry's name,
        or a few words about it.
        """
        if not self.place.exists() and not self.place.is_symlink():
            return None
        if not self.place.is_dir():
            return "no directory, but a file"

        names = {path.name for path in self.place.iterdir()}
        # The files and networks that `put_back` mends.
        written_whole = (self.best, self.last, self.recipe, self.metrics)
        for name in sorted(names):
            path = self.place / name
            # `_NAMES` says which names are directories.
            is_of_a_run = name in _NAMES and path.is_dir() is _NAMES[name]
            # A killed process leaves files and folders that were not finished.
            is_unfinished = any(left_behind.is_unfinished(path, file) for file in written_whole)
            if path.is_symlink() or not (is_of_a_run or is_unfinished):
                return name
        # Each entry may be a run's. What is inside, and which entries are missing, may show more.
        return self._out_of_order(names) or self._foreign_state() or self._later_row()

    def _out_of_order(self, names: set[str]) -> str | None:
        """Return a few words about an entry that stands without an earlier one.

        The result is None if there is no such entry.

        A run makes state/ first, then recipe.yaml, then all other entries. A folder in which an
        earlier entry is missing was not left so by a killed run.

        Args:
            names: The names of the folder's entries.
        """
        # The entries that a run makes after the first two.
        later = sorted(name for name in names if name in _NAMES and name not in (_STATE, _RECIPE))
        if later and _RECIPE not in names:
            return f"{later[0]} and no {_RECIPE}"
        # A recipe that a user wrote must not be overwritten.
        if _RECIPE in names and _STATE not in names and not self._is_written_by_a_run():
            return f"{_RECIPE}, which no run has written"
        # Somebody may have removed state/, and kept what was trained: networks and metrics.csv.
        networks = [name for name in later if name in _WITH_STATE]
        if networks and _STATE not in names:
            return f"{networks[0]} and no {_STATE}"
        return None

    def _is_written_by_a_run(self) -> bool:
        """Return whether recipe.yaml has exactly the text that a run writes for its recipe.

        A recipe that a user has written has other comments, other spaces or fewer keys.
        """
        try:
            recipe = recipe_files.load_recipe(self.recipe)
        except RecipeError:
            return False
        return recipe_files.dump(recipe) == self.recipe.read_text(encoding="utf-8")

    def _foreign_state(self) -> str | None:
        """Return the path of an entry in state/ that no killed run has left, or None.

        A run that was killed while it wrote its first state leaves unfinished files there.
        """
        folder = self.state.parent
        if not folder.is_dir():
            return None
        for path in sorted(folder.iterdir()):
            is_lock = path.name == _LOCK and not path.is_symlink()
            if not (is_lock or left_behind.is_unfinished(path, self.state)):
                return f"{folder.name}/{path.name}"
        return None

    def _later_row(self) -> str | None:
        """Return words about metrics.csv if it has more than the row before training, or None.

        A run with more rows had a state, and the networks in its folder are trained. A table that
        cannot be read counts as one with more rows.
        """
        if not self.metrics.is_file():
            return None
        try:
            with self.metrics.open(newline="", encoding="utf-8") as opened:
                table = csv.DictReader(opened)
                updates = [float(row["update"]) for row in table]
        except (OSError, ValueError, KeyError, TypeError):
            updates = []
        if updates != [0.0]:
            return f"{self.metrics.name}, which tells of more than a beginning"
        return None

    def put_back(self) -> None:
        """Mend the folder after a process was killed while it replaced a file or a network.

        A process moves the old one aside before it puts the new one in its place. If the new one is
        missing, the old one is put back. Files and networks that were not finished are removed.
        """
        for network in (self.best, self.last):
            network_folder.put_back(network, removes=True)
        for file in (self.recipe, self.metrics, self.state):
            left_behind.put_back(file, removes=True)

    def write_state(self, position: TrainingState, parts: State) -> None:
        """Replace state/run.pt, from which the run can be continued, atomically.

        Args:
            position: The position of the run.
            parts: The tensors of the run.

        Raises:
            OutputError: The state cannot be written. The old one stays.
        """
        body = {"identity": self.identity, "position": vars(position), **parts}
        # On a full disk torch.save raises various errors, and may leave half a file.
        buffer = io.BytesIO()
        # Tensors are copied from a GPU to the CPU. torch.save would store the GPU as their device,
        # and for a view all memory behind it.
        torch.save(calling.changed(body, Tensor.cpu), buffer)
        atomic_write.whole(self.state, lambda aside: aside.write_bytes(buffer.getbuffer()))

    def read_state(self) -> tuple[TrainingState, State]:
        """Return the position and the tensors of a run, if this run may be continued from them.

        Raises:
            SourceError: The state cannot be read.
            OptionError: The state belongs to another run. The message says what differs.
        """
        try:
            body = torch.load(self.state, map_location="cpu", weights_only=True)
            identity = body.pop("identity")
            position = TrainingState(**body.pop("position"))
        # The file may hold anything, and torch.load raises many kinds of errors.
        except Exception as error:
            raise SourceError(f"{self.state} cannot be read", first_line(error)) from None

        # An older version did not know the keys that were added later. Its runs had their defaults.
        # `Recipe(summary="")` has the default of every key.
        for name, value in recipe_files.flat(Recipe(summary="")).items():
            if name in self.identity:
                identity.setdefault(name, value)
        differ = recipe_files.differences(identity, self.identity)
        if differ:
            remedy = "Continue with the same recipe, network and images, or give another folder"
            raise OptionError(f"{self.place} holds another run", "; ".join(differ[:4]), remedy)
        return position, body

    def write_network(self, model: nn.Module, place: Path) -> None:
        """Write a network into best/ or last/, in place of the network that is there.

        Args:
            model: The network.
            place: The folder, best/ or last/.

        Raises:
            OutputError: The network cannot be written. The old one stays.
        """
        checkpoint.save(model, place, force=True)


def identify(model: nn.Module, recipe: Recipe, images: str) -> dict[str, object]:
    """Return the values, by name, that must be the same when a run continues.

    They are the values of the recipe's keys, without those that may change, and hashes of the
    network before training, of the plan that converted it before, of how its images are prepared,
    and of the images.

    Args:
        model: The network before the recipe converts it.
        recipe: The recipe.
        images: The digest of the training images.
    """
    keys = recipe_files.flat(recipe)
    for key in _FREE_KEYS:
        keys.pop(key, None)
    preparation = json.dumps(data_config(model), sort_keys=True, default=str)
    # An error may read: the network's hash was '1f...', is '2e...'
    hashes = {
        "the network's hash": hash_tensors(state_tensors(model)),
        "its plan's": provenance.of(model).plan.digest,
        "that of how its images are prepared": hashlib.sha256(preparation.encode()).hexdigest(),
        "the images'": images,
    }
    return keys | {name: digest[:12] for name, digest in hashes.items()}
