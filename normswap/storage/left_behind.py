"""Find the folder that a process left when it was killed while it wrote a file, and tell the user.

`atomic_write.writing` writes each file in a folder beside it, `.NAME.xxxxxxxx`. The folder holds:

- the new files, until they are moved to their places;
- in `old/`, the files that they replace, until all new files are in their places;
- `.normswap`, a list of the files' names, which the writing process keeps locked.

A process that is killed loses its lock and leaves the folder. If it was killed between the two
moves, the file is missing, and `put_back` moves the old files from `old/` to their places.
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
# The folders in which this process writes. Its locks are no help here: a process can always take a
# lock that it holds, and loses the lock when it opens the file once more and closes it.
_own_folders: set[Path] = set()


class Claim:
    """A lock by which this process tells others that it is writing files in a folder.

    Args:
        folder: The folder, in which the list of names is written and locked.
        names: The names of the files that are written.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        # This process remembers its own folders, because it can take a lock that it holds itself.
        self._folder = folder.resolve()
        _own_folders.add(self._folder)
        # The names of the files are written to the file `.normswap` (`_OWNER`), which is locked.
        self._opened = os.open(folder / _OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        if sys.platform != "win32":
            # Some file systems have no locks. `_is_claimed` gets none there either, and takes the
            # folder for one in which a process writes.
            with suppress(OSError):
                fcntl.lockf(self._opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._opened, json.dumps(list(names)).encode())

    def end(self) -> None:
        """Give up the lock on the folder. This process has finished writing files there."""
        os.close(self._opened)
        _own_folders.discard(self._folder)


def lock(file: Path) -> int | None:
    """Lock a file, which is made if it is missing, and return its descriptor. Closing it unlocks.

    The result is None if a living process has locked it. On Windows, and where the file system has
    no locks, nothing is locked.

    Raises:
        OSError: The file cannot be opened, or is a link.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(file, flags, 0o600)
    if sys.platform != "win32":
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(descriptor)
            return None
        except OSError:
            pass
    return descriptor


def remove(folder: Path) -> None:
    """Remove a folder in which files were written, and ignore what cannot be removed.

    The file `.normswap` in it is removed last. If this process is killed meanwhile, or something
    cannot be removed, that file tells the next process that the folder is normswap's.
    """
    for name in _entries(folder):
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif name != _OWNER:
            with suppress(OSError):
                path.unlink()
    if not set(_entries(folder)).difference([_OWNER]):
        shutil.rmtree(folder, ignore_errors=True)


def old_folder(folder: Path, names: Sequence[str]) -> Path:
    """Return the path to which the replaced files are moved while new ones are written.

    It is `old` inside `folder`, with underscores behind it if one of the files is called `old`.

    Args:
        folder: The folder in which the new files are written.
        names: The names of the new files.
    """
    name = "old"
    while name in names:
        name += "_"
    return folder / name


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Yield the path of a new folder among the system's temporary ones, and remove it at the end.

    Folders that killed processes of the same user have left are removed, too.

    Args:
        prefix: The beginning of the folder's name. Only left folders with the same one are removed.
    """
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{prefix}*")):
        # A folder of this function holds the file `.normswap` (`_OWNER`). If this user may write to
        # that file, the folder is the user's own. A link is left alone, as it may lead anywhere.
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
    """Return whether a folder is one in which a process writes `file`, or was killed meanwhile.

    Args:
        path: The folder.
        file: The file, at the path that it has when it is finished.
    """
    # The folder of `model.onnx` is called `.model.` and eight random characters.
    pattern = rf"\.{re.escape(file.stem)}\.[a-z0-9_]{{8}}"
    if path.parent != file.parent or not re.fullmatch(pattern, path.name):
        return False
    if path.is_symlink() or not path.is_dir():
        return False
    # A process that was killed before it began the list of names leaves an empty folder. Without
    # the list, a folder that holds anything is somebody else's.
    names = _entries(path)
    return not names or (_OWNER in names and file.name in _names_of(path, file))


def put_back(file: Path, *, removes: bool = False) -> None:
    """Put back the old `file` if it is missing because a process that replaced it was killed.

    The old files are moved from the process's folder to their places. No file is overwritten: if
    one stands in such a place, nothing is moved, and the user is told which one. A folder in which
    a living process writes is not touched.

    Args:
        file: The file or directory that was being written.
        removes: Whether the folders of killed processes, with the new files in them, are then
            removed. If not, the user is told where they are, and the command that removes them.
    """
    for folder in _abandoned(file):
        # If the file is missing and the folder holds old files, these are put back.
        if not os.path.lexists(file) and _entries(_old(folder, file)):
            problem = _restored(file, folder)
            if problem is not None:
                _tell(f"{_missing(file)}. It was not put back: {problem}. {_remedy(file, folder)}")
                continue
            _tell(f"{file} was put back: a run that replaced it was killed")

        if removes:
            remove(folder)
            _tell(f"removed {folder}, which a run that was killed had left behind")
        else:
            command = f"rm -r {shlex.quote(str(folder))}"
            _tell(f"a run that was killed left {folder} behind. To remove it: {command}")


def check_not_moved_aside(file: Path) -> None:
    """Raise SourceError if `file` is missing because a process that replaced it was killed.

    Raises:
        SourceError: The process had moved the file to `old/` in its own folder. The message has the
            command that puts the file back.
    """
    if os.path.lexists(file):
        return
    for folder in _abandoned(file):
        if os.path.lexists(_old(folder, file) / file.name):
            raise SourceError(_missing(file), remedy=_remedy(file, folder))


def _abandoned(file: Path) -> list[Path]:
    """Return the folders that killed processes have left beside `file`.

    The processes were writing `file`. They are no longer alive.
    """
    try:
        beside = sorted(file.parent.iterdir())
    except OSError:
        return []
    return [path for path in beside if is_unfinished(path, file) and not _is_claimed(path)]


def _is_claimed(folder: Path) -> bool:
    """Return whether a process that is alive is writing files in a folder.

    Such a process keeps the file `.normswap` in the folder locked.
    """
    # A process can take a lock that it holds itself, so its own folders are remembered.
    if folder.resolve() in _own_folders:
        return True
    # On Windows nothing is locked, so no other process is found.
    if sys.platform == "win32":
        return False

    # If the file `.normswap` (`_OWNER`) is missing, nobody can have locked it. The flags keep
    # `open` from following a link, and from waiting for a pipe. A file that this user may not open
    # is another user's, who may be writing.
    try:
        opened = os.open(folder / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except PermissionError:
        return True
    except OSError:
        return False

    # If this process gets the lock, the one that had it is dead.
    try:
        fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(opened)
    return False


def _restored(file: Path, folder: Path) -> str | None:
    """Move the old files, which a killed process had moved aside, back to their places.

    Args:
        file: The file that the process was writing.
        folder: The folder in which the process wrote its new files.

    Returns:
        The reason why the old files cannot be moved back. None if they were moved back.
    """
    # The names of all new files, and of those old files that the process had moved away.
    names = _names_of(folder, file)
    old = _old(folder, file)
    moved_away = _entries(old)
    # The killed process had already moved these new files to their places. They must make room for
    # the old files, so they go back to the folder.
    moved_in = [
        name
        for name in names
        if os.path.lexists(file.with_name(name)) and not os.path.lexists(folder / name)
    ]
    # If another file stands in the place of an old one, somebody else has written it since. It must
    # not be overwritten.
    taken = [name for name in moved_away if os.path.lexists(file.with_name(name))]
    strangers = sorted(set(taken).difference(moved_in))
    if strangers:
        return f"{file.with_name(strangers[0])} is there"

    try:
        for name in moved_in:
            os.replace(file.with_name(name), folder / name)
        # `file` is the last, so that it never stands beside files of another version.
        for name in sorted(moved_away, key=lambda name: name == file.name):
            os.replace(old / name, file.with_name(name))
    except OSError as error:
        return error.strerror or str(error)
    return None


def _names_of(folder: Path, file: Path) -> list[str]:
    """Return the names of all files that are written together with `file` in a folder.

    They are read from the list in the folder, the file `.normswap`. If that cannot be read, only
    `file` is known. If it holds something else than a list, no name is returned.
    """
    try:
        names = reading.parse_json(reading.file_text(folder / _OWNER))
    except reading.UnreadableError:
        return [file.name]
    if not isinstance(names, list):
        return []
    # Other users may write to this disk, so a name that leads to another folder is dropped.
    texts = [name for name in names if isinstance(name, str)]
    return [name for name in texts if name not in ("", ".", "..") and Path(name).name == name]


def _old(folder: Path, file: Path) -> Path:
    """Return the folder to which a killed process moved the files that it replaced.

    Args:
        folder: The folder in which the process wrote the new files.
        file: The file that it was replacing.
    """
    return old_folder(folder, _names_of(folder, file))


def _missing(file: Path) -> str:
    return f"{file} is missing, as a run that replaced it was killed"


def _remedy(file: Path, folder: Path) -> str:
    """Return a sentence with the command that moves replaced files back to their places.

    Args:
        file: The file that a killed process was replacing.
        folder: The folder in which that process wrote. It holds the replaced files.
    """
    old = shlex.quote(str(_old(folder, file)))
    return f"To put it back: mv -n {old}/* {shlex.quote(str(file.parent))}/"


def _entries(folder: Path) -> list[str]:
    """Return the names in a folder, sorted. The list is empty if the folder cannot be read."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []


def _tell(sentence: str) -> None:
    """Warn with a sentence that the command line prints for the user."""
    warnings.warn(sentence, LeftBehindNote, stacklevel=3)
