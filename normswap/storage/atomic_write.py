"""Write files whole or not at all: in a folder beside their place, from which they are renamed.

`left_behind` deals with the folder that a killed process leaves.
"""

import csv
import io
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from normswap.errors import OutputError, spelled
from normswap.storage import left_behind


@contextmanager
def writing(file: Path, beside: Sequence[str] = (), obsolete: Sequence[str] = ()) -> Iterator[Path]:
    """Yield a path at which to write a new file or directory, which is moved to `file` at the end.

    If the process is killed, the files are all old, or all new, or `file` is missing: it never
    stands beside files of another version. If an error is raised, nothing is left behind.

    Args:
        file: The path of the file or directory. Its folder must exist.
        beside: Names of further files that belong to `file`. The caller writes them beside the path
            that is yielded, and they are moved together with it.
        obsolete: Names of files that belonged to the old `file`. They are removed at the end.

    Raises:
        OutputError: The disk is full, or the place cannot be written.
    """
    left_behind.put_back(file)
    try:
        with _folder_beside(file, [*beside, file.name]) as folder:
            aside = folder / file.name
            yield aside

            new_files = [folder / name for name in (*beside, file.name)]
            _open_to_others(folder, new_files)
            # A single file is replaced in one step. If there are several files, or a directory, the
            # old ones are moved away first.
            if beside or obsolete or aside.is_dir():
                old = left_behind.old_folder(folder, [*beside, file.name])
                _exchange(new_files, file.parent, old, obsolete)
            else:
                os.replace(aside, file)
    except OSError as error:
        raise OutputError(f"cannot write {file}", error.strerror or str(error)) from None


@contextmanager
def _folder_beside(file: Path, names: Sequence[str]) -> Iterator[Path]:
    """Yield a new folder beside `file`, which this process has locked, and remove it at the end.

    Args:
        file: The file that will be written in the folder.
        names: The names of all files that will be written there.
    """
    folder = Path(tempfile.mkdtemp(dir=file.parent, prefix=f".{file.stem}."))
    claim = None
    try:
        claim = left_behind.Claim(folder, names)
        yield folder
    finally:
        old = left_behind.old_folder(folder, names)
        # If `file` is missing and `old` has files, an interrupt came between two renames. Then the
        # folder stays, so that the next run puts the old files back.
        if file.exists() or not old.is_dir() or not any(old.iterdir()):
            left_behind.remove(folder)
        if claim is not None:
            claim.end()


def whole(file: Path, write: Callable[[Path], object]) -> Path:
    """Write a file whole or not at all, and return its path.

    Args:
        file: The path of the file.
        write: A function that writes the content to the path that it is given. The new file is then
            moved to `file`.

    Raises:
        OutputError: The file cannot be written.
    """
    with writing(file) as aside:
        write(aside)
    return file


def text(file: Path, content: str) -> Path:
    """Write text in UTF-8, whole or not at all.

    Args:
        file: The path of the file.
        content: The text.

    Raises:
        OutputError: The file cannot be written.
    """
    return whole(file, lambda aside: aside.write_text(content, encoding="utf-8"))


def table(file: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> Path:
    """Write the given columns of each row as CSV, whole or not at all. None is an empty cell.

    Args:
        file: The path of the file.
        columns: The names of the columns.
        rows: The rows, each by the names of its columns.

    Raises:
        OutputError: The file cannot be written.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_csv_cell(row.get(column)) for column in columns])
    return text(file, out.getvalue())


def _csv_cell(value: object) -> object:
    if isinstance(value, float):
        return f"{value:.8g}"
    return value


def check_writable(file: Path, *, force: bool = False, package_of: Sequence[str] = ()) -> None:
    """Raise OutputError, before any work is done, if a file or a package cannot be written.

    A package is a directory that a runtime opens as if it were one file, such as a `.mlpackage`.

    Args:
        file: The path to write.
        force: Whether a file that exists is replaced.
        package_of: The names of a package's entries. A directory that has the first one is taken
            for a package. Empty if a file is written.

    Raises:
        OutputError: The file exists and `force` is not given, or its folder does not exist. Or a
            directory stands at the path that is no package of this kind, or holds other files.
    """
    left_behind.put_back(file)
    if file.is_dir() and not package_of:
        raise OutputError(f"{file} is a directory", remedy="Give the name of a file")
    if file.exists() and not force:
        raise OutputError(
            f"{file} exists", remedy=f"Give another name, or {spelled('force', True)} to replace it"
        )
    if package_of and file.exists():
        _check_package(file, package_of)
    if not file.parent.is_dir():
        raise OutputError(f"cannot write {file}", f"there is no directory {file.parent}")


def _check_package(package: Path, names: Sequence[str]) -> None:
    """Raise OutputError unless a directory is a package that may be replaced.

    A package is a directory that a runtime opens as if it were one file, such as a `.mlpackage`.

    Args:
        package: The path of the directory.
        names: The names of the package's entries. The directory must have the first one, and
            nothing beside these entries.
    """
    remedy = "Remove it yourself, or give another name"
    if not (package / names[0]).is_file():
        raise OutputError(f"{package} has no {names[0]}", remedy=remedy)

    strangers = sorted({path.name for path in package.iterdir()}.difference(names))
    if strangers:
        why = "which is no part of such a package and would be lost"
        raise OutputError(f"{package} holds {strangers[0]}, {why}", remedy=remedy)


def _open_to_others(folder: Path, new_files: Sequence[Path]) -> None:
    """Give new files the permissions that a file gets in this folder (by umask or access list).

    A temporary folder is closed to other users, and some writers close their files, too. The umask
    is read from the mode of a new directory. To ask the system for it would set it for all threads.
    """
    probe = folder / ".mode"
    probe.mkdir(0o777)
    directory_mode = stat.S_IMODE(probe.stat().st_mode)
    probe.rmdir()

    for new_file in new_files:
        for path in (new_file, *new_file.rglob("*")):
            # `chmod` would change the file that a link points to.
            if path.is_symlink() or not path.exists():
                continue
            # Files are not made executable, as directories are.
            path.chmod(directory_mode if path.is_dir() else directory_mode & 0o666)


def _exchange(
    new_files: Sequence[Path], folder: Path, old: Path, obsolete: Sequence[str] = ()
) -> None:
    """Move the old files from `folder` to `old`, then the new files to `folder`.

    The last of `new_files` is the main one. Its old version goes first and its new version comes
    last, so that it never stands beside files of another version.

    Args:
        new_files: The paths at which the new files were written.
        folder: The folder of the old files.
        old: The folder that takes the old files.
        obsolete: The names of old files that have no new one.

    Raises:
        OSError: The files cannot be moved. Then all old files have been put back in their places.
            They are also put back if the user interrupts.
    """
    old.mkdir()
    names = [new_file.name for new_file in new_files]
    # The names of the old files that were moved away, and of the new files that were moved in.
    removed: list[str] = []
    placed: list[str] = []

    try:
        for name in (*reversed(names), *obsolete):
            if os.path.lexists(folder / name):
                os.replace(folder / name, old / name)
                removed.append(name)
        for new_file in new_files:
            os.replace(new_file, folder / new_file.name)
            placed.append(new_file.name)
    # The old files are put back after an interrupt (KeyboardInterrupt), too. Before that, the new
    # files make room: they go back to the folder in which they were written. The moves are undone
    # in reverse order, so that the new main file goes first and the old one comes back last.
    except BaseException:
        for name in reversed(placed):
            os.replace(folder / name, new_files[0].with_name(name))
        for name in reversed(removed):
            os.replace(old / name, folder / name)
        raise
