"""Where the images of a dataset are: the part of a folder that holds them, and a CSV that lists them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import IO

from timm.data.readers.reader import Reader
from timm.utils.misc import natural_key

from normswap.errors import SourceError, first_line

TRAIN = ("train", "training")
VALIDATION = ("val", "valid", "validation", "eval", "evaluation", "test")
_HEAD = ["file", "label"]


def part_named(folder: Path, names: tuple[str, ...]) -> Path | None:
    """The folder or tar in `folder` that has one of these names, the first first."""
    if not folder.is_dir():
        return None
    options = (folder / f"{name}{ending}" for name in names for ending in ("", ".tar"))
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


class CsvReader(Reader):
    """timm's reader of images that a CSV lists: its first line is `file,label`, files are named relative to it.

    Raises:
        SourceError: it cannot be read, or a file that it names is not there.
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.root = file.parent
        try:
            with file.open(newline="", encoding="utf-8-sig") as lines:
                head, *rows = [*csv.reader(lines)] or [[]]
        except UnicodeDecodeError:
            raise SourceError(f"{file} cannot be read", "it is not UTF-8 text", "Save it as UTF-8") from None
        except (OSError, csv.Error) as error:
            raise SourceError(f"{file} cannot be read", first_line(error)) from None
        if head != _HEAD:
            remedy = "A line for each image follows: its file, a comma, its label"
            raise SourceError(f"{file} does not begin with the line file,label", remedy=remedy)
        pairs = [self._pair(file, number, row) for number, row in enumerate(rows, 2) if row]
        ordered = sorted({label for _, label in pairs}, key=natural_key)
        self.class_to_idx = {label: number for number, label in enumerate(ordered)}
        self.samples = [(path, self.class_to_idx[label]) for path, label in pairs]

    @staticmethod
    def _pair(file: Path, number: int, row: list[str]) -> tuple[Path, str]:
        if len(row) != len(_HEAD):
            raise SourceError(f"{file}, line {number} has {len(row)} columns", remedy="It names a file and its label")
        path = file.parent / row[0].strip()
        if not path.is_file():
            remedy = "Files are named relative to the CSV's folder"
            raise SourceError(f"{file}, line {number}: {path} does not exist", remedy=remedy)
        return path, row[1].strip()

    def __getitem__(self, index: int) -> tuple[IO[bytes], int]:
        path, label = self.samples[index]
        return path.open("rb"), label

    def __len__(self) -> int:
        return len(self.samples)

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        path = self.samples[index][0]
        return path.name if basename else str(path if absolute else path.relative_to(self.root))
