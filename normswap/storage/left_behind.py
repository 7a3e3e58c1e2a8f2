"""What a killed process left behind while it wrote a file: found, put back, and named to the user.

`atomic_write.writing` writes each file in a folder beside it, `.NAME.xxxxxxxx`, which has the new
files, the old ones in `old/` for as long as they are replaced, and a file that the process locks
and that lists the names. A process that is killed loses its lock and leaves the folder.
"""

import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from normswap import reading
from normswap.errors import LeftBehindNote, SourceError

if sys.platform != "win32":
    import fcntl

# In the folder of a writing: the names of its files, locked by the process that writes them.
_OWNER = ".normswap"
# The folders of this process. A process is not kept out by its own lock, and loses it where it
# closes the file a second time.
_own_folders: set[Path] = set()


class Claim:
    """This process's claim on a folder in which it writes files of the given names."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder = folder.resolve()
        _own_folders.add(self._folder)
        self._opened = os.open(folder / _OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        if sys.platform != "win32":
            # Some file systems have no locks: then this process is taken for a killed one.
            with suppress(OSError):
                fcntl.lockf(self._opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._opened, json.dumps(list(names)).encode())

    def end(self) -> None:
        """Give the folder up."""
        os.close(self._opened)
        _own_folders.discard(self._folder)


def remove(folder: Path) -> None:
    """Remove a folder in which files were written, as far as that is possible.

    The note of who made it goes last: what a process that is killed meanwhile leaves still has it.
    """
    for name in _entries(folder):
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif name != _OWNER:
            with suppress(OSError):
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def old_folder(folder: Path, names: Sequence[str]) -> Path:
    """Return where the old files are, in a folder in which files of the given names are written."""
    name = "old"
    while name in names:
        name += "_"
    return folder / name


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Yield a folder among the system's temporary ones, which is removed at the end.

    Folders of the same prefix that killed processes of the same user have left are removed, too.
    """
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{prefix}*")):
        is_ours = os.access(path / _OWNER, os.W_OK) and not path.is_symlink()
        if is_ours and not _is_claimed(path):
            shutil.rmtree(path, ignore_errors=True)
            _tell(f"removed {path}, which a run that was killed had left behind")

    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        claim = Claim(Path(name), [])
        try:
            yield Path(name)
        finally:
            claim.end()


def is_unfinished(path: Path, file: Path) -> bool:
    """Tell whether `path` is a folder in which `file` is written, or was when a process died."""
    pattern = rf"\.{re.escape(file.stem)}\.[a-z0-9_]{{8}}"
    if path.parent != file.parent or not re.fullmatch(pattern, path.name):
        return False
    if path.is_symlink() or not path.is_dir():
        return False
    names = _entries(path)
    if _OWNER in names:
        return file.name in _names_of(path, file)
    # A process that was killed at once has left nothing in it.
    return not names or bool({file.name, "old"}.intersection(names))


def put_back(file: Path, *, removes: bool = False) -> None:
    """Put back what killed processes had moved aside to write `file`.

    The user is told so, and what else they have left behind. A folder in which a process still
    writes is not touched. Nothing that is there is replaced.

    Args:
        file: The file or directory.
        removes: Whether the rest is removed. By default the user is told the command that does so.
    """
    for folder in _abandoned(file):
        if not os.path.lexists(file) and _entries(_old(folder, file)):
            problem = _restored(file, folder)
            if problem is not None:
                _tell(f"{_missing(file)}. It was not put back: {problem}. {_way(file, folder)}")
                continue
            _tell(f"{file} was put back: a run that replaced it was killed")

        names = _entries(folder)
        # A folder that does not say who made it may be somebody's.
        is_ours = _OWNER in names or not names
        if removes and is_ours:
            remove(folder)
            _tell(f"removed {folder}, which a run that was killed had left behind")
        else:
            command = f"rm -r {shlex.quote(str(folder))}"
            _tell(f"a run that was killed left {folder} behind. To remove it: {command}")


def check_not_moved_aside(file: Path) -> None:
    """Check that `file` is not missing because a process that replaced it was killed.

    Raises:
        SourceError: It is. The error has the command that puts it back.
    """
    if os.path.lexists(file):
        return
    for folder in _abandoned(file):
        if os.path.lexists(_old(folder, file) / file.name):
            raise SourceError(_missing(file), remedy=_way(file, folder))


def _abandoned(file: Path) -> list[Path]:
    """List the folders in which `file` was written by processes that are dead."""
    try:
        beside = sorted(file.parent.iterdir())
    except OSError:
        return []
    return [path for path in beside if is_unfinished(path, file) and not _is_claimed(path)]


def _is_claimed(folder: Path) -> bool:
    """Tell whether a process that lives writes in a folder."""
    if folder.resolve() in _own_folders:
        return True
    if sys.platform == "win32":
        return False

    try:
        opened = os.open(folder / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False

    # Who gets the lock knows that the process which had it is dead.
    try:
        fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(opened)
    return False


def _restored(file: Path, folder: Path) -> str | None:
    """Move the old files back to their places; returns why it cannot be done, or None."""
    names = _names_of(folder, file)
    old = _old(folder, file)
    moved_away = _entries(old)
    # New files that have come to their places already. They go back to the folder.
    came = [
        name
        for name in names
        if os.path.lexists(file.with_name(name)) and not os.path.lexists(folder / name)
    ]
    taken = [name for name in moved_away if os.path.lexists(file.with_name(name))]
    strangers = sorted(set(taken).difference(came))
    if strangers:
        return f"{file.with_name(strangers[0])} is there"

    try:
        for name in came:
            os.replace(file.with_name(name), folder / name)
        # `file` is the last, so that it never stands beside parts of another.
        for name in sorted(moved_away, key=lambda name: name == file.name):
            os.replace(old / name, file.with_name(name))
    except OSError as error:
        return error.strerror or str(error)
    return None


def _names_of(folder: Path, file: Path) -> list[str]:
    """Return the names of the files that are written in a folder, `file`'s own among them."""
    try:
        names = reading.parse_json(reading.file_text(folder / _OWNER))
    except reading.UnreadableError:
        return [file.name]
    if not isinstance(names, list):
        return []
    # Others may write to this disk: no name leads to another folder.
    texts = [name for name in names if isinstance(name, str)]
    return [name for name in texts if name not in ("", ".", "..") and Path(name).name == name]


def _old(folder: Path, file: Path) -> Path:
    return old_folder(folder, _names_of(folder, file))


def _missing(file: Path) -> str:
    return f"{file} is missing, as a run that replaced it was killed"


def _way(file: Path, folder: Path) -> str:
    old = shlex.quote(str(_old(folder, file)))
    return f"To put it back: mv -n {old}/* {shlex.quote(str(file.parent))}/"


def _entries(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []


def _tell(sentence: str) -> None:
    warnings.warn(sentence, LeftBehindNote, stacklevel=3)
