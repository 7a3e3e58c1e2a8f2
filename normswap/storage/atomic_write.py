"""Files are there whole or not at all: written beside their place, then renamed."""

from __future__ import annotations

import csv
import glob
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from normswap.errors import OutputError, spelled


@contextmanager
def writing(file: Path, beside: Sequence[str] = ()) -> Iterator[Path]:
    """Give a place for a file of the same name, in a temporary directory beside `file`, to put in its place at the end.

    Args:
        beside: names of further files that are written there, and that belong to it; with some, `file` itself may be a
            directory, which is replaced as a whole. A process that is killed leaves
            all of the old files, all of the new ones, or no `file`: never one beside parts of another.

            What is then left in the temporary directory, `finish` puts in its place.

    Raises:
        OutputError: the disk is full, or the place cannot be written. Nothing is left behind.
    """
    try:
        finish(file)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.stem}.") as folder:
            aside = Path(folder) / file.name
            yield aside
            made = [aside.with_name(name) for name in (*beside, file.name)]
            for one in made:
                if not one.is_dir():
                    one.chmod(0o666 & ~umask())  # some writers make it private
            if beside:
                with _holding(Path(folder)):
                    _exchange(made, file.parent, Path(folder) / "old")
            else:
                os.replace(aside, file)
    except OSError as error:
        raise OutputError(f"cannot write {file}", error.strerror or str(error)) from None


def whole(file: Path, write: Callable[[Path], object]) -> Path:
    """Let `write` fill a place beside `file`, then put it in place.

    Raises:
        OutputError: it cannot be written.
    """
    with writing(file) as aside:
        write(aside)
    return file


def _exchange(made: Sequence[Path], folder: Path, old: Path) -> None:
    """Move files to `folder`, the last one last; those of their names go to `old` before, the last one first.

    Raises:
        OSError: it cannot be done; the old files are back.
    """
    old.mkdir()
    removed: list[str] = []
    placed: list[str] = []
    try:
        for one in reversed(made):
            if (folder / one.name).exists():
                os.replace(folder / one.name, old / one.name)
                removed.append(one.name)
        for one in made:
            os.replace(one, folder / one.name)
            placed.append(one.name)
    except OSError:
        for name in reversed(placed):
            (folder / name).unlink()
        for name in reversed(removed):
            os.replace(old / name, folder / name)
        old.rmdir()  # nothing is left to finish
        raise


def finish(file: Path) -> None:
    """Carry on what a process began that was killed while it replaced this file and those beside it.

    All new files were whole before the first old one was moved away.
    """
    for old in file.parent.glob(f".{glob.escape(file.stem)}.*/old"):
        aside = old.parent
        with _holding(aside) as ours:
            if ours and (aside / file.name).exists():
                for one in sorted(_new(aside, file.name), key=lambda each: each.name == file.name):
                    place = file.with_name(one.name)
                    if place.is_dir():  # which nothing can be renamed to
                        os.replace(place, old / one.name)
                    os.replace(one, place)
            if ours and not _new(aside, file.name):
                shutil.rmtree(aside)


def _new(aside: Path, name: str) -> list[Path]:
    """The files, and the directory of that name, that have not come to their places yet."""
    return [one for one in aside.iterdir() if one.is_file() or one.name == name]


@contextmanager
def _holding(folder: Path) -> Iterator[bool]:
    """Hold a directory, which the system lets go when the process ends, and tell whether no other process does."""
    from filelock import FileLock, Timeout  # a requirement of torch's; for every system

    (folder / "held").mkdir(exist_ok=True)
    try:
        held = FileLock(folder / "held" / "lock").acquire(timeout=0)
    except Timeout:
        yield False
    else:
        with held:
            yield True


def text(file: Path, content: str) -> Path:
    """Write text in UTF-8, whole or not at all.

    Raises:
        OutputError: it cannot be written.
    """
    return whole(file, lambda aside: aside.write_text(content, encoding="utf-8"))


def table(file: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> Path:
    """Write a table (CSV), whole or not at all: of each row these columns, what is missing or None as nothing.

    Raises:
        OutputError: it cannot be written.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(row.get(column)) for column in columns] for row in rows)
    return text(file, out.getvalue())


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.8g}" if isinstance(value, float) else str(value)


def check_writable(file: Path, *, force: bool = False, folder_with: str | None = None) -> None:
    """Check that `file` may be written, before any work is done for it.

    Args:
        folder_with: it is to be a directory; one that is replaced must have a file of this name.

    Raises:
        OutputError: it exists (and `force` is not given), its folder does not, it is another folder, or a link to
            nothing.
    """
    check_link(file)
    if file.is_dir() and folder_with is None:
        raise OutputError(f"{file} is a directory", remedy="Give the name of a file")
    finish(file)
    if file.exists() and not force:
        raise OutputError(f"{file} exists", remedy=f"Give another name, or {spelled('force', True)} to replace it")
    if folder_with is not None and file.exists() and not (file / folder_with).is_file():
        raise OutputError(f"{file} has no {folder_with}", remedy="Remove it yourself, or give another name")
    if not file.parent.is_dir():
        raise OutputError(f"cannot write {file}", f"there is no directory {file.parent}")


def check_link(place: Path) -> None:
    """Check that what is to be written is no link whose target is gone: nobody knows which of the two is meant.

    Raises:
        OutputError: it is.
    """
    if place.is_symlink() and not place.exists():
        what = f"{place} is a link to {place.readlink()}, which does not exist"
        raise OutputError(what, remedy="Remove the link, or give another name")


def swap(aside: Path, place: Path) -> None:
    """Put `aside` at `place`; what was there lives until the new directory has its name."""
    if not place.exists():
        os.replace(aside, place)
        return
    old = place.with_name(f".{place.name}.old-{os.getpid()}")
    os.replace(place, old)
    try:
        os.replace(aside, place)
    except OSError:
        os.replace(old, place)
        raise
    shutil.rmtree(old, ignore_errors=True)


def umask() -> int:
    """Return the permissions that new files do without."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
