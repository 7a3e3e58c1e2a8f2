"""One process at a time writes a directory: a lock beside it, which the system lets go when the process ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from normswap.errors import OutputError

_HELD: ContextVar[frozenset[Path]] = ContextVar("_HELD", default=frozenset())


@contextmanager
def alone(place: Path) -> Iterator[None]:
    """Hold `place` while this is entered; who holds it already may enter again.

    Nothing is held where its parent is not there yet, on Windows, and on file systems without locks.

    Raises:
        OutputError: another process (or thread) holds it, or nothing can be written beside it.
    """
    real = place.resolve()
    if real in _HELD.get() or not real.parent.is_dir():
        yield
        return
    file = _lock(real)
    opened = _locked(file, place)
    before = _HELD.set(_HELD.get() | {real})
    try:
        yield
    finally:
        _HELD.reset(before)
        if opened is not None:
            file.unlink(missing_ok=True)  # while it is held: nobody else takes this one afterwards
            os.close(opened)


def _lock(real: Path) -> Path:
    return real.with_name(f".{real.name}.lock")


def _locked(file: Path, place: Path) -> int | None:
    """Return a descriptor that holds the lock; None where there are no locks."""
    if sys.platform == "win32":
        return None
    import fcntl

    while True:
        try:
            opened = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise OutputError(f"cannot write to {place}", error.strerror or str(error)) from None
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(opened)
            what = f"{place} is being written by another process"
            raise OutputError(what, remedy="Wait until that is done, or give another directory") from None
        except OSError:  # the file system has no locks
            os.close(opened)
            file.unlink(missing_ok=True)
            return None
        try:
            if os.path.samestat(os.fstat(opened), file.stat()):
                return opened
        except FileNotFoundError:
            pass
        os.close(opened)  # whoever held that one has removed it meanwhile
