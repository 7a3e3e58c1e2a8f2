"""Tables, facts and lines on stdout, by rich, at 100 columns or the terminal's width.

rich is imported inside functions: it takes a third of the time that `normswap --help` has.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH = 100
_NAME = 40  # so much of the first column stays on one line


def _out() -> Console:
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDTH
    return Console(width=width, markup=False, highlight=False, emoji=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = ()) -> None:
    """A table; columns named in `right` are numbers, and one that is empty in every row is left out."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    cells = [[cell(value) for value in row] for row in rows]
    kept = [i for i in range(len(columns)) if any(texts[i] for texts in cells)]
    made = Table(title=Text(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for i in kept:
        longest = max(len(texts[i]) for texts in cells)
        if columns[i] in right:  # a number that is cut would be another number
            made.add_column(columns[i], justify="right", no_wrap=True, min_width=longest)
        else:  # names are told apart by their ends as well
            made.add_column(columns[i], overflow="fold", min_width=min(longest, _NAME) if i == 0 else None)
    for texts in cells:
        made.add_row(*(Text(texts[i]) for i in kept))
    _out().print(made)


def facts(*pairs: tuple[str, object]) -> None:
    """Names and what goes with them; those without are left out."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, show_header=False, pad_edge=False)
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in pairs:
        if value not in (None, ""):
            made.add_row(Text(name), Text(cell(value)))
    _out().print(made)


def entry(name: str, lines: Iterable[str]) -> None:
    """A name, and below it, set in, what there is to say about it."""
    from rich.padding import Padding
    from rich.text import Text

    out = _out()
    out.print(Text(name, style="bold"))
    for text in lines:
        if text:
            out.print(Padding(Text(text), (0, 0, 0, 2)))


def line(text: str) -> None:
    """A line, however long."""
    from rich.text import Text

    _out().print(Text(text), soft_wrap=True)


def written(files: Iterable[object]) -> None:
    """Where what was made is."""
    for file in files:
        line(f"written to {file}")


def listing(label: str, lines: Iterable[str], most: int = 20) -> None:
    """Lines that begin with the same word, not too many of them."""
    listed = list(lines)
    for text in listed[:most]:
        line(f"{label}: {text}")
    if len(listed) > most:
        line(f"{label}: ... and {len(listed) - most} more")


# --- what stands in them ----------------------------------------------------------------------------------------------


def cell(value: object) -> str:
    """Anything, as it stands in a table."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def counts(counted: Mapping[str, int]) -> str:
    """`3 identity, 1 projection`."""
    return ", ".join(f"{count} {name}" for name, count in counted.items() if count)


def span(pair: Sequence[float] | None) -> str:
    """`0.1 .. 0.4`, or one number where both are the same."""
    if pair is None:
        return ""
    low, high = (f"{value:.2g}" for value in pair)
    return low if low == high else f"{low} .. {high}"


def size(sides: Sequence[int]) -> str:
    """`3x224x224`."""
    return "x".join(map(str, sides))


def small(value: float | None) -> str:
    """An error: `2.1e-07`."""
    return "" if value is None else f"{value:.1e}" if math.isfinite(value) else "inf"
