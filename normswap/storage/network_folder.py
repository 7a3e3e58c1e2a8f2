"""The files of a network's directory, and whether one may be written somewhere: without importing
torch.
"""

from pathlib import Path

from normswap.errors import OutputError, SourceError, spelled

WEIGHTS, CONFIG, NORMS, CARD = FILES = (
    "model.safetensors",
    "config.json",
    "norms.safetensors",
    "README.md",
)


def check_writable(place: Path, *, force: bool) -> None:
    """See, before any work, that `place` may be written.

    Raises OutputError: it exists (without `force`), holds something that normswap did not write, or
    lies in a network.
    """
    check_beside(place)
    if not place.exists():
        return
    if not place.is_dir():
        raise OutputError(f"{place} is a file", remedy="Name a directory")
    if not any(place.iterdir()):
        return
    if not force:
        remedy = f"Give another directory, or {spelled('force', True)} to replace it"
        raise OutputError(f"{place} exists", remedy=remedy)
    if not _is_network(place):
        raise OutputError(
            f"{place} is not a model directory",
            remedy="Remove it yourself, or give another directory",
        )


def check_beside(place: Path) -> None:
    """See that `place` lies in a directory, and not in that of a network; or raises OutputError."""
    for parent in place.absolute().parents:
        if parent.is_file():
            raise OutputError(
                f"cannot write {place}", f"{parent.name} is a file", "Name a place in a directory"
            )
        if _is_network(parent):
            remedy = "Name a place beside it"
            raise OutputError(
                f"{place} lies in {parent}", "that is the directory of a network", remedy
            )


def check_no_run(directory: Path) -> None:
    """Check that `directory` is not the folder of a training run, where a network is needed.

    Raises:
        SourceError: It is one. The error says where the run's networks are.
    """
    if (directory / "recipe.yaml").is_file() and (directory / "best").is_dir():
        raise SourceError(
            f"{directory} is the folder of a run",
            remedy=f"Its networks are {directory / 'best'} and last",
        )


def _is_network(place: Path) -> bool:
    return (place / WEIGHTS).is_file() and (place / CONFIG).is_file()
