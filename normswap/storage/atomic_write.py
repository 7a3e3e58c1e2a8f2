"""Files are there whole or not at all: written beside their place, then renamed."""

from __future__ import annotations

import csv
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from normswap.errors import OutputError


def whole(file: Path, write: Callable[[Path], object], parts: Sequence[str] = ()) -> Path:
    """Let `write` fill a file of the same name in a temporary directory beside `file`, then put it in its place.

    Args:
        parts: endings of further files that `write` makes, which get their places first.

    Raises:
        OutputError: the disk is full, or the place cannot be written. Nothing is left behind.
    """
    try:
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.stem}.") as folder:
            aside = Path(folder) / file.name
            write(aside)
            for ending in (*parts, file.suffix):
                made = aside.with_suffix(ending)
                made.chmod(0o666 & ~umask())  # some writers make it private
                made.replace(file.with_suffix(ending))
    except OSError as error:
        raise OutputError(f"cannot write {file}", error.strerror or str(error)) from None
    return file


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
