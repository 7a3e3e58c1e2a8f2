"""Runs of recipes that a benchmark keeps, each in a folder of its own: made once, continued when interrupted."""

import csv
import re
from pathlib import Path

from normswap.errors import TrainingError
from normswap.training.engine import finetune
from normswap.training.recipe import Recipe

Rows = tuple[dict[str, float | None], ...]


def called(name: str) -> str:
    """A row's name as a folder's."""
    return re.sub(r"\W+", "-", name).strip("-")


def attempt(recipe: Recipe, place: Path) -> None:
    """Train the recipe's network in `place`, unless that is done; that it diverged is written down there."""
    if (place / "diverged.txt").exists():
        return
    try:
        finetune(None, recipe, place, resume="auto", device="cpu", track="none")
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
