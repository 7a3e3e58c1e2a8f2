"""The files of a network's directory, and whether one may be written somewhere: seen before torch is imported."""

from __future__ import annotations

from pathlib import Path

from normswap.errors import OutputError, SourceError, spelled
from normswap.storage import atomic_write

WEIGHTS, CONFIG, NORMS, CARD = FILES = ("model.safetensors", "config.json", "norms.safetensors", "README.md")


def check_writable(place: Path, *, force: bool) -> None:
    """See, before any work, that `place` may be written.

    Raises:
        OutputError: it exists (without `force`), holds something that normswap did not write, lies in a network, or
            is a link to nothing.
    """
    check_beside(place)
    atomic_write.check_link(place)
    for parent in place.absolute().parents:
        if parent.is_file():
            raise OutputError(f"cannot write {place}", f"{parent.name} is a file", "Name a place in a directory")
    if not place.exists():
        return
    if not place.is_dir():
        raise OutputError(f"{place} is a file", remedy="Name a directory")
    if not any(place.iterdir()):
        return
    if not force:
        raise OutputError(
            f"{place} exists", remedy=f"Give another directory, or {spelled('force', True)} to replace it"
        )
    if not (place / WEIGHTS).is_file() or not (place / CONFIG).is_file():
        raise OutputError(f"{place} is not a model directory", remedy="Remove it yourself, or give another directory")


def check_not_empty(place: Path) -> None:
    """See that a directory that is to be opened has something in it; which files, its reader says.

    Raises:
        SourceError: it has not, or is a link to nothing.
    """
    if place.is_symlink() and not place.exists():
        raise SourceError(f"{place} is a link to {place.readlink()}, which does not exist")
    if place.is_dir() and not any(place.iterdir()):
        remedy = f"A model directory has {CONFIG} and {WEIGHTS}; for weights alone name the file."
        raise SourceError(f"{place} has no {CONFIG}", "it is empty", remedy)


def check_directory(place: Path) -> None:
    """See that a directory that is to be opened is one.

    Raises:
        SourceError: it is none.
    """
    if not place.is_dir():
        raise SourceError(f"{place} is no directory", remedy="Name one that `normswap convert` wrote")


def check_beside(place: Path) -> None:
    """See that `place` does not lie in the directory of a network, which is replaced as a whole.

    Raises:
        OutputError: it does.
    """
    for parent in place.absolute().parents:
        if (parent / WEIGHTS).is_file() and (parent / CONFIG).is_file():
            remedy = "Name a place beside it"
            raise OutputError(f"{place} lies in {parent}", "that is the directory of a network", remedy)
