"""Where the images of a dataset are: the part of a folder that holds them, and a CSV that lists them."""

from __future__ import annotations

import csv
import os
import tarfile
from pathlib import Path
from typing import IO

from timm.data.readers.img_extensions import get_img_extensions
from timm.data.readers.reader import Reader
from timm.utils.misc import natural_key

from normswap.errors import SourceError, first_line

TRAIN = ("train", "training")
VALIDATION = ("val", "valid", "validation", "eval", "evaluation", "test")
_PACKED = ("", ".tar", ".tar.xz", ".tar.gz")
_PICTURES = frozenset(
    {".arw", ".avif", ".bmp", ".cr2", ".cr3", ".dng", ".gif", ".heic", ".heif", ".jfif", ".jp2", ".jpe", ".jpeg",
     ".jpg", ".jxl", ".nef", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)  # fmt: skip
_BETWEEN = (",", ";", "\t")
_FILE = ("file", "filename", "file_name", "path", "image")
_LABEL = ("label", "class", "class_name", "category", "target", "wnid", "name")


def part_named(folder: Path, names: tuple[str, ...]) -> Path | None:
    """The folder or tar in `folder` that has one of these names, the first first."""
    if not folder.is_dir():
        return None
    options = (folder / f"{name}{ending}" for name in names for ending in _PACKED)
    return next((path for path in options if path.exists() and _is_part(path)), None)


def _is_part(path: Path) -> bool:
    """Whether that is a part, and not the class of trains: folders are in it, or only parts are beside it."""
    if path.is_file():
        return True
    beside = {other.name for other in path.parent.iterdir() if other.is_dir()}
    return beside <= {*TRAIN, *VALIDATION} or any(other.is_dir() for other in path.iterdir())


def chosen(folder: Path, split: str) -> Path:
    """The part of a folder that a split's name means, or the folder itself where it has no parts.

    Raises:
        SourceError: it has no part of a name that the user made up.
    """
    usual = next((names for names in (TRAIN, VALIDATION) if split in names), None)
    named_part = part_named(folder, (split, *(usual or ())))
    if named_part is None and usual is None:
        raise SourceError(f"{folder} has no part {split}", remedy="A part is a folder in it: train, val, test ...")
    return named_part or folder


def passed_over(place: Path) -> str:
    """Count, for a note, the pictures in a folder or tar of formats that timm's reader does not know; empty if none.

    It passes over them without a word, and an accuracy is then of the others alone.
    """
    unread = _PICTURES - get_img_extensions(as_set=True)
    if place.is_dir():
        names = [name for _, _, files in os.walk(place, followlinks=True) for name in files]
    elif place.suffix == ".tar":
        with tarfile.open(place) as packed:
            names = packed.getnames()
    else:
        return ""
    endings = [ending for name in names if (ending := os.path.splitext(name)[1].lower()) in unread]
    if not endings:
        return ""
    counted = "1 picture of another format" if len(endings) == 1 else f"{len(endings)} pictures of other formats"
    return f"{counted} passed over: {', '.join(sorted(set(endings)))}"


class CsvReader(Reader):
    """timm's reader of images that a CSV lists: a column of files, relative to it, and a column of labels.

    The columns are found by their names in the first line, or are the first two where it has none.

    Raises:
        SourceError: it cannot be read, or a file that it names is not there.
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.root = file.parent
        try:
            with file.open(newline="", encoding="utf-8-sig") as lines:
                first = lines.readline()
                between = next((sign for sign in _BETWEEN if sign in first), _BETWEEN[0])
                lines.seek(0)
                rows = [(number, row) for number, row in enumerate(csv.reader(lines, delimiter=between), 1) if row]
        except UnicodeDecodeError:
            raise SourceError(f"{file} cannot be read", "it is not UTF-8 text", "Save it as UTF-8") from None
        except (OSError, csv.Error) as error:
            raise SourceError(f"{file} cannot be read", first_line(error)) from None
        pairs = _pairs(file, rows)
        again = len(pairs) - len(set(pairs))
        self.note = f"{file}: {again} lines name a file and label that stand there before" if again else ""
        ordered = sorted({label for _, label in pairs}, key=natural_key)
        self.class_to_idx = {label: number for number, label in enumerate(ordered)}
        self.samples = [(path, self.class_to_idx[label]) for path, label in pairs]

    def __getitem__(self, index: int) -> tuple[IO[bytes], int]:
        path, label = self.samples[index]
        return path.open("rb"), label

    def __len__(self) -> int:
        return len(self.samples)

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        path = self.samples[index][0]
        return path.name if basename else str(path if absolute else path.relative_to(self.root))


def _pairs(file: Path, rows: list[tuple[int, list[str]]]) -> list[tuple[Path, str]]:
    """Files and labels; without a column of labels every label is empty."""
    if not rows:
        raise SourceError(f"{file} is empty", remedy="It has a line for each image: its file and its label")
    names = [name.strip().lower() for name in rows[0][1]]
    where = next((names.index(name) for name in _FILE if name in names), None)
    label = next((names.index(name) for name in _LABEL if name in names), None) if where is not None else None
    if where is None:
        where, label = 0, 1 if len(names) > 1 else None
    else:
        rows = rows[1:]
    pairs: list[tuple[Path, str]] = []
    labels: dict[Path, str] = {}
    for number, row in rows:
        if len(row) <= max(where, label or 0):
            raise SourceError(f"{file}, line {number} has {len(row)} columns", remedy="It names a file and its label")
        path = file.parent / row[where].strip()
        if not path.is_file():
            remedy = "Files are named relative to the CSV's folder; the first line names the columns: file,label"
            raise SourceError(f"{file}, line {number}: {path} does not exist", remedy=remedy)
        pairs.append((path, "" if label is None else row[label].strip()))
        if labels.setdefault(*pairs[-1]) != pairs[-1][1]:
            what = f"{file}, line {number}: {path} is of {pairs[-1][1]!r}, and of {labels[path]!r} in a line before"
            raise SourceError(what, remedy="An image has one label")
    return pairs
