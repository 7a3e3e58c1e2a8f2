"""Files are there whole or not at all: written beside their place, then renamed."""

from __future__ import annotations

import csv
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from normswap.errors import OutputError


@contextmanager
def writing(file: Path, beside: Sequence[str] = ()) -> Iterator[Path]:
    """Give a place for a file of the same name, in a temporary directory beside `file`, to put in its place at the end.

    Args:
        beside: names of further files that are written there, and that belong to it. A process that is killed leaves
            all of the old files, all of the new ones, or no `file`: never one beside parts of another.

    Raises:
        OutputError: the disk is full, or the place cannot be written. Nothing is left behind.
    """
    try:
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.stem}.") as folder:
            aside = Path(folder) / file.name
            yield aside
            made = [aside.with_name(name) for name in (*beside, file.name)]
            for one in made:
                one.chmod(0o666 & ~umask())  # some writers make it private
            if beside:
                _exchange(made, file.parent, Path(folder) / "old")
            else:
                os.replace(aside, file)
    except OSError as error:
        raise OutputError(f"cannot write {file}", error.strerror or str(error)) from None


def whole(file: Path, write: Callable[[Path], object]) -> Path:
    """The same, filled by `write`.

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
        raise


def text(file: Path, content: str) -> Path:
    """The same for text, in UTF-8.

    Raises:
        OutputError: it cannot be written.
    """
    return whole(file, lambda aside: aside.write_text(content, encoding="utf-8"))


def table(file: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> Path:
    """The same for a table (CSV): of each row these columns, what is missing or None as nothing.

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


def claim(file: Path, *, force: bool = False) -> None:
    """See that `file` may be written, before any work is done for it.

    Raises:
        OutputError: it exists (and `force` is not given), its folder does not, or it is a folder.
    """
    if file.is_dir():
        raise OutputError(f"{file} is a directory", remedy="Give the name of a file")
    if file.exists() and not force:
        raise OutputError(f"{file} exists", remedy="Give another name, or --force to replace it")
    if not file.parent.is_dir():
        raise OutputError(f"cannot write {file}", f"there is no directory {file.parent}")


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
    """The permissions that new files do without."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
