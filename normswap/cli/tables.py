"""Tables, facts and lines on stdout, by rich, at the terminal's width; in a pipe at COLUMNS, or 100.

rich is imported inside functions: it takes a third of the time that `normswap --help` has.
"""

from __future__ import annotations

import math
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from normswap.cli.printing import between_words

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_WIDTH = 100
_FEW = 4  # of a list of values, in a table
_NAME = 40  # so much of the first column stays on one line
_WORD = 20  # so long a word of another column is not broken


def _out(least: int = 0) -> Console:
    from rich.console import Console

    width = None if sys.stdout.isatty() else max(shutil.get_terminal_size((_WIDTH, 0)).columns, least)
    return Console(width=width, markup=False, highlight=False, emoji=False)


def _print(renderable: RenderableType, least: int = 0) -> None:
    """Print it; in a pipe without the blanks that fill its lines up, and at least so wide."""
    console = _out(least)
    if sys.stdout.isatty():
        console.print(renderable)
        return
    with console.capture() as captured:
        console.print(renderable)
    sys.stdout.writelines(f"{text.rstrip()}\n" for text in captured.get().splitlines())


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Sequence[str] = (),
    spare: Sequence[str] = (),
) -> None:
    """Print a table, without the columns that are empty in every row.

    Args:
        right: columns of numbers, which are never wrapped.
        spare: columns that are left out, the first of them first, where the terminal is too narrow for whole lines.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    cells = [[cell(value) for value in row] for row in rows]
    widths = [max((len(texts[i]) for texts in cells), default=0) for i in range(len(columns))]
    kept = [i for i, width in enumerate(widths) if width]
    for name in spare:
        if sum(max(widths[i], len(columns[i])) + 3 for i in kept) > _out().width:
            kept = [i for i in kept if columns[i] != name]
    if title:  # by itself: as a part of the table it would be wrapped to the table's width
        _print(Text(title, style="bold"))
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    whole = {i: max(widths[i], len(columns[i])) for i in kept}
    folded = [i for i in kept if columns[i] not in right]  # a number that is cut would be another number
    if folded and folded[0] == kept[0]:  # names are told apart by their ends as well
        folded, whole[kept[0]] = folded[1:], min(whole[kept[0]], _NAME)
    room = _out().width - (3 * len(kept) - 1) - sum(whole[i] for i in kept if i not in folded)
    words = [max((len(word) for texts in cells for word in texts[i].split()), default=1) for i in folded]
    shares = _shared(room, [whole[i] for i in folded], [min(longest, _WORD) for longest in words])
    for i in kept:
        if columns[i] in right:  # rich makes a column of a `width` smaller where the table is too wide, and cuts
            made.add_column(columns[i], justify="right", no_wrap=True, min_width=whole[i])
        else:
            made.add_column(columns[i], overflow="fold", width=shares[folded.index(i)] if i in folded else whole[i])
    for texts in cells:
        made.add_row(*(Text(texts[i]) for i in kept))
    _print(made)


def _shared(room: int, wanted: Sequence[int], least: Sequence[int]) -> list[int]:
    """Part so many characters among columns: whole to those that want less than their share, the rest alike."""
    shares = dict.fromkeys(range(len(wanted)), 0)
    left = sorted(shares, key=lambda i: wanted[i] - least[i])
    while left:
        i = left[0]
        shares[i] = min(wanted[i], max(room // len(left), least[i]))
        room -= shares[left.pop(0)]
    return [shares[i] for i in range(len(wanted))]


def facts(*pairs: tuple[str, object]) -> None:
    """Names and what goes with them; those without are left out. In a pipe a path is never cut."""
    from rich.table import Table
    from rich.text import Text

    shown = [(name, cell(value)) for name, value in pairs if value not in (None, "")]
    made = Table(box=None, show_header=False, pad_edge=False)
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, text in shown:
        made.add_row(Text(name), Text(text))
    names = max((len(name) for name, _ in shown), default=0)
    _print(made, names + 2 + max((len(word) for _, text in shown for word in text.split()), default=0))


def entry(name: str, lines: Iterable[str]) -> None:
    """A name, and below it, set in, what there is to say about it."""
    from rich.padding import Padding
    from rich.text import Text

    _print(Text(name, style="bold"))
    for text in lines:
        if text:
            _print(Padding(Text(text), (0, 0, 0, 2)))


def line(text: str) -> None:
    """A line, however long; on a terminal, broken between words."""
    print(between_words(text, sys.stdout))


def next_step(*words: object) -> None:
    """The command that most people want next, as the last line; words in capitals stand for what is the reader's."""
    print(f"next: normswap {shlex.join(map(str, words))}")  # to be copied: never broken


def written(files: Iterable[object]) -> None:
    """Where what was made is."""
    for file in files:
        print(f"written to {file}")


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


def few(values: Sequence[object]) -> str:
    """Write the first values, and how many there are where those are not all."""
    shown = " ".join(cell(value) for value in values[:_FEW])
    return shown if len(values) <= _FEW else f"{shown} ... ({len(values)} values)"


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
