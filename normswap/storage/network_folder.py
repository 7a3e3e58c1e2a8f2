"""The files of a network's directory, and whether one may be written somewhere.

Nothing here imports torch.
"""

from pathlib import Path

from normswap.errors import OutputError, SourceError, spelled
from normswap.storage import left_behind

WEIGHTS, CONFIG, NORMS, CARD = FILES = (
    "model.safetensors",
    "config.json",
    "norms.safetensors",
    "README.md",
)
# An entry of config.json that keeps transformers from opening the directory. transformers would
# build a network of the source's class, and draw the tensors that the weights lack at random. The
# entry says that the weights are in a file of this name. There is no such file, so
# `from_pretrained` stops with an error that has the name.
NOT_OF_TRANSFORMERS = {
    "transformers_weights": "converted by normswap - open it with normswap.load.safetensors"
}


def check_writable(place: Path, *, force: bool) -> None:
    """Raise OutputError, before any work is done, if a network may not be written to a directory.

    Args:
        place: The path of the directory.
        force: Whether the files of a network that lies there are replaced. Whatever lies beside
            these files stays.

    Raises:
        OutputError: The directory exists and `force` is not given, it holds something else than a
            network, or it lies in the directory of a network.
    """
    check_beside(place)
    put_back(place)
    if not place.exists():
        return
    if not place.is_dir():
        raise OutputError(f"{place} is a file", remedy="Name a directory")

    entries = [path for path in place.iterdir() if not _is_unfinished(path)]
    # An empty directory is as good as a new one.
    if not entries:
        return
    if not force:
        remedy = f"Give another directory, or {spelled('force', True)} to replace it"
        raise OutputError(f"{place} exists", remedy=remedy)
    # A directory with the name of one of our files could not be replaced by that file.
    directories = [path for path in entries if path.name in FILES and path.is_dir()]
    if not _is_network(place) or directories:
        raise OutputError(
            f"{place} is not a model directory",
            remedy="Remove it yourself, or give another directory",
        )


def check_beside(place: Path) -> None:
    """Raise OutputError if a path lies inside a file, or inside the directory of a network.

    Args:
        place: The path that is to be written.

    Raises:
        OutputError: One of the folders above `place` is a file, or the directory of a network.
    """
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


def put_back(place: Path, *, removes: bool = False) -> None:
    """Put back old files that a killed process had moved aside while it wrote a network.

    Args:
        place: The directory of the network.
        removes: Whether the folders that killed processes have left are then removed. If not, the
            user is told where they are.
    """
    # The process may have been replacing the whole directory, or the files in it. The weights stand
    # for these files, because they are the main one.
    left_behind.put_back(place, removes=removes)
    if place.is_dir():
        left_behind.put_back(place / WEIGHTS, removes=removes)


def check_not_moved_aside(place: Path) -> None:
    """Raise SourceError if a killed process has moved a network's directory or weights away.

    A process that replaces a network moves the old one aside for a moment.

    Args:
        place: The directory of the network.

    Raises:
        SourceError: One of them was moved away. The message has the command that puts it back.
    """
    # The process may have moved the whole directory, or the files in it.
    left_behind.check_not_moved_aside(place)
    if place.is_dir():
        left_behind.check_not_moved_aside(place / WEIGHTS)


def check_no_run(directory: Path) -> None:
    """Raise SourceError if a directory is that of a training run, where a network's is wanted.

    Args:
        directory: The directory that the user named as a network.

    Raises:
        SourceError: It is a run's folder. The message says where the networks of the run are.
    """
    # A run's folder has its recipe, and the best network in `best`.
    if (directory / "recipe.yaml").is_file() and (directory / "best").is_dir():
        raise SourceError(
            f"{directory} is the folder of a run",
            remedy=f"Its networks are {directory / 'best'} and last",
        )


def _is_network(place: Path) -> bool:
    """Return whether a directory holds a saved network: model.safetensors and config.json."""
    return (place / WEIGHTS).is_file() and (place / CONFIG).is_file()


def _is_unfinished(path: Path) -> bool:
    return left_behind.is_unfinished(path, path.parent / WEIGHTS)
