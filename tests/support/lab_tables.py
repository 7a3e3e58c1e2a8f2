"""The tables that scripts of tests/lab wrote, as rows by the words at the head of their columns."""

import re
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, str]


def text(name: str) -> str:
    """Return the text of a table's file, wherever in tests/ it is."""
    found = next(path for path in (ROOT / "tests").rglob(name) if path.suffix == ".md")
    return found.read_text(encoding="utf-8")


def table(name: str) -> Iterator[Row]:
    """Yield all rows of all tables of a file."""
    head: list[str] = []
    for line in text(name).splitlines():
        if not line.startswith("|"):
            head = []
            continue

        cells = [
            cell.strip().replace("`", "").replace("*", "")
            for cell in re.split(r"(?<!\\)\|", line)[1:-1]
        ]
        if set(line) <= set("|- "):
            continue

        if not head:
            head = cells
        else:
            yield dict(zip(head, cells, strict=True))


def row_of(name: str, **wanted: str) -> Row:
    """Return the first row of a file whose cells are as wanted.

    Args:
        name: The name of the file.
        wanted: The text of a cell, by the head of its column; `_` stands for a blank.
    """
    cells = {column.replace("_", " "): cell for column, cell in wanted.items()}
    for row in table(name):
        if all(row.get(column) == cell for column, cell in cells.items()):
            return row
    raise LookupError(f"{name} has no row with {cells}")


def number(cell: str) -> float:
    """Return the first number of a cell."""
    return float(re.findall(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", cell)[0].replace(",", ""))


def tenths(value: float | str) -> str:
    """Return a number with one decimal; half a tenth is rounded up."""
    return str(Decimal(str(value)).quantize(Decimal("0.1"), ROUND_HALF_UP))
