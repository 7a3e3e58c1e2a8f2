"""The files of a network's directory, and whether one may be written somewhere, by whom: without importing torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from normswap.errors import OutputError, spelled

WEIGHTS, CONFIG, NORMS, CARD = FILES = ("model.safetensors", "config.json", "norms.safetensors", "README.md")


def check_writable(place: Path, *, force: bool) -> None:
    """See, before any work, that `place` may be written.

    Raises:
        OutputError: it exists (without `force`), holds something that normswap did not write, or lies in a network.
    """
    check_beside(place)
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


def check_beside(place: Path) -> None:
    """See that `place` does not lie in the directory of a network, which is replaced as a whole.

    Raises:
        OutputError: it does.
    """
    for parent in place.absolute().parents:
        if (parent / WEIGHTS).is_file() and (parent / CONFIG).is_file():
            remedy = "Name a place beside it"
            raise OutputError(f"{place} lies in {parent}", "that is the directory of a network", remedy)


@contextmanager
def one_writer(place: Path) -> Iterator[None]:
    """Hold a lock beside `place`, which the system lets go when the process ends; the same thread may hold it again.

    Raises:
        OutputError: another process, or thread, holds it.
    """
    real = place.resolve()
    if not os.access(real.parent, os.W_OK):  # writing to it will say what is wrong
        yield
        return
    lock = FileLock(real.with_name(f".{real.name}.lock"), timeout=0, is_singleton=True)
    try:
        lock.acquire()
    except Timeout:
        what = f"{place} is being written by another process"
        raise OutputError(what, remedy="Wait until that is done, or give another directory") from None
    try:
        yield
    finally:
        if lock.lock_counter == 1:  # removed while it is held
            Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()
