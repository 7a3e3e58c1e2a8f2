"""Fine-tuning runs that a benchmark keeps, each in a folder of its own: made once, continued when interrupted."""

import csv
import re
from pathlib import Path

from torch import nn

from normswap.errors import TrainingError
from normswap.storage import checkpoint
from normswap.training.engine import finetune
from normswap.training.recipe import Recipe

SHARED = Path(__file__).resolve().parents[4] / "shared"
CLIPPED = ("optim.clip.mode=agc", "optim.clip.value=0.05")  # as `cifar10_recover_skipinit` does
KEPT = ("convert.options.mean=keep", "convert.calibrate=false")  # NF's filter means
Rows = tuple[dict[str, float | None], ...]


def called(name: str) -> str:
    """A row's name as a folder's."""
    return re.sub(r"\W+", "-", name).strip("-")


def run(network: Path | nn.Module | None, recipe: Recipe, place: Path, device: str) -> None:
    """Train in `place`, unless that is done; nothing is tracked.

    Args:
        network: it, or a checkpoint; None: the recipe names it.
    """
    model = checkpoint.open_model(str(network)) if isinstance(network, Path) else network
    finetune(model, recipe, place, resume="auto", device=device, track="none")


def attempt(network: Path | None, recipe: Recipe, place: Path, device: str) -> None:
    """`run`; that it diverged is written down in `place`, and it is not tried again."""
    if (place / "diverged.txt").exists():
        return
    try:
        run(network, recipe, place, device)
    except TrainingError as error:
        (place / "diverged.txt").write_text(f"{error}\n")


def rows(place: Path) -> Rows:
    """The epochs that a run has so far; the first is before training."""
    file = place / "metrics.csv"
    lines = csv.DictReader(file.read_text().splitlines()) if file.is_file() else ()
    return tuple({name: float(value) if value else None for name, value in line.items()} for line in lines)


def missing(place: Path) -> str:
    """Why there is nothing to show of a run; empty if there is."""
    if (place / "diverged.txt").exists():
        return "diverged"
    return "" if rows(place) else "not run yet"
