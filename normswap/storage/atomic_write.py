"""Files are there whole or not at all: written beside their place, then renamed."""

import csv
import io
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from normswap.errors import OutputError, spelled


@contextmanager
def writing(file: Path, beside: Sequence[str] = ()) -> Iterator[Path]:
    """Give a place for a file or directory of the same name, beside `file`, which takes its place
    at the end.

    Further files that belong to it are written there by the names `beside`. Where a process is
    killed, the place has all of the old files, all of the new ones, or no `file`: never one beside
    parts of another.

    Raises OutputError: the disk is full, or the place cannot be written. Nothing is left behind.
    """
    try:
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.stem}.") as folder:
            aside = Path(folder) / file.name
            yield aside
            new_files = [aside.with_name(name) for name in (*beside, file.name)]
            for written in (
                path for new_file in new_files for path in (new_file, *new_file.rglob("*"))
            ):
                if written.exists():
                    written.chmod((0o777 if written.is_dir() else 0o666) & ~_umask())
            if beside or aside.is_dir():
                _exchange(new_files, file.parent, Path(folder) / "old")
            else:
                os.replace(aside, file)
    except OSError as error:
        raise OutputError(f"cannot write {file}", error.strerror or str(error)) from None


def whole(file: Path, write: Callable[[Path], object]) -> Path:
    """Let `write` fill a place beside `file`, then put it in place; an OutputError where it cannot
    be written.
    """
    with writing(file) as aside:
        write(aside)
    return file


def _exchange(new_files: Sequence[Path], folder: Path, old: Path) -> None:
    """Move files to `folder`, the last one last; those of their names go to `old` before, the last
    one first.

    Raises OSError: it cannot be done; the old files are back.
    """
    old.mkdir()
    removed: list[str] = []
    placed: list[str] = []
    try:
        for new_file in reversed(new_files):
            if (folder / new_file.name).exists():
                os.replace(folder / new_file.name, old / new_file.name)
                removed.append(new_file.name)
        for new_file in new_files:
            os.replace(new_file, folder / new_file.name)
            placed.append(new_file.name)
    except OSError:
        for name in reversed(placed):
            os.replace(folder / name, new_files[0].with_name(name))
        for name in reversed(removed):
            os.replace(old / name, folder / name)
        raise


def text(file: Path, content: str) -> Path:
    """Write text in UTF-8, whole or not at all; an OutputError where it cannot be written."""
    return whole(file, lambda aside: aside.write_text(content, encoding="utf-8"))


def table(file: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> Path:
    """Write these columns of each row as CSV, whole or not at all, None as nothing; or raises
    OutputError.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    lines = ([row.get(column) for column in columns] for row in rows)
    writer.writerows(
        [f"{cell:.8g}" if isinstance(cell, float) else cell for cell in line] for line in lines
    )
    return text(file, out.getvalue())


def check_writable(file: Path, *, force: bool = False, folder_with: str | None = None) -> None:
    """Check, before any work, that `file` may be written, or a directory that has a file of the
    name `folder_with`.

    Raises OutputError: it exists (and `force` is not given), its folder does not, or it is another
    folder.
    """
    if file.is_dir() and folder_with is None:
        raise OutputError(f"{file} is a directory", remedy="Give the name of a file")
    if file.exists() and not force:
        raise OutputError(
            f"{file} exists", remedy=f"Give another name, or {spelled('force', True)} to replace it"
        )
    if folder_with is not None and file.exists() and not (file / folder_with).is_file():
        raise OutputError(
            f"{file} has no {folder_with}", remedy="Remove it yourself, or give another name"
        )
    if not file.parent.is_dir():
        raise OutputError(f"cannot write {file}", f"there is no directory {file.parent}")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
