"""What commands print on stdout: JSON, or tables and lines by rich at the terminal's width; in a pipe COLUMNS, or 100.

rich is imported inside functions: it takes a third of the time that `normswap --help` has.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from normswap.plan import Body

if TYPE_CHECKING:
    from rich.console import RenderableType

_WIDTH = 100
# A table shows so many values of a list.
_FEW = 4
Said = TypeVar("Said", Body, Sequence[Body])


def show(body: Said, as_json: bool, human: Callable[[Said], None], *following: object) -> None:
    """Print `body` as strict JSON, or let `human` print it, and then the words of the command that follows."""
    if as_json:
        print(json.dumps(plain(body), indent=2, allow_nan=False))
        return
    human(body)
    if following:
        next_step(*following)


def plain(value: object) -> object:
    """`value` as JSON has it: numbers that are not finite become null, paths text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _print(renderable: RenderableType, least: int = 0) -> None:
    """Print it; in a pipe without the blanks that fill its lines up, and at least so wide."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else max(shutil.get_terminal_size((_WIDTH, 0)).columns, least)
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    with console.capture() as captured:
        console.print(renderable)
    sys.stdout.writelines(f"{text.rstrip()}\n" for text in captured.get().splitlines())


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = ()) -> None:
    """Print a table, without the columns that are empty in every row; `right`: numbers, which are never wrapped."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    cells = [[cell(value) for value in row] for row in rows]
    # As a part of the table the title would be wrapped to the table's width.
    if title:
        _print(Text(title, style="bold"))
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    filled = [i for i in range(len(columns)) if any(texts[i] for texts in cells)]
    for i in filled:
        number = columns[i] in right
        shown.add_column(columns[i], justify="right" if number else "left", no_wrap=number, overflow="fold")
    for texts in cells:
        shown.add_row(*(Text(texts[i]) for i in filled))
    _print(shown)


def facts(*pairs: tuple[str, object]) -> None:
    """Names and what goes with them; those without are left out. In a pipe a path is never cut."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, show_header=False, pad_edge=False)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    names, words = [0], [0]
    for name, value in pairs:
        if value not in (None, ""):
            grid.add_row(Text(name), Text(cell(value)))
            names.append(len(name))
            words += map(len, cell(value).split())
    _print(grid, max(names) + 2 + max(words))


def next_step(*words: object) -> None:
    """The command that most people want next, as the last line; words in capitals stand for what is the reader's."""
    print(f"next: normswap {shlex.join(map(str, words))}")


def listing(label: str, lines: Iterable[str], most: int = 20) -> None:
    """Lines that begin with the same word, not too many of them; `PATH: text` is printed once for all paths with it."""
    listed: list[str] = []
    groups: dict[str, list[tuple[str, str, str]]] = {}
    for line in lines:
        # A line without a path is a group by itself.
        groups.setdefault(line.partition(": ")[2] or line, []).append(line.partition(": "))
    for group in groups.values():
        paths, (_, colon, said) = [path for path, _, _ in group], group[0]
        if len(paths) > _FEW:
            paths = [*paths[:3], f"{len(paths) - 3} more"]
        listed.append(f"{', '.join(paths)}{colon}{said}")
    for text in listed[:most]:
        print(f"{label}: {text}")
    if len(listed) > most:
        print(f"{label}: ... and {len(listed) - most} more")


def network(body: Body) -> None:
    """Print a network in a few lines, as `inspect` and `demo` do."""
    architecture = f" ({body['architecture']})" if body["architecture"] else ""
    skips = Counter(block["skip"] for block in body["blocks"]) if "blocks" in body else Counter(body["skips"])
    norms = sum(body["norms"].values())
    facts(
        ("network", f"{body['source']}: {body['class']}{architecture}"),
        ("input", size(body["input_size"])),
        ("parameters", f"{body['parameters']:,}"),
        ("converted", " -> ".join(body["plan"])),
        ("blocks", f"{sum(skips.values())} (skip: {counts(skips)})" if skips else "none"),
        ("norms", f"{norms} ({counts(body['norms'])})" if norms else "none"),
        ("roles", counts(body["roles"])),
    )


def cell(value: object) -> str:
    """Anything, as it stands in a table."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def few(values: Sequence[object]) -> str:
    """Write the first values, and how many there are where those are not all."""
    shown = " ".join(cell(value) for value in values[:_FEW])
    if len(values) > _FEW:
        shown += f" ... ({len(values)} in all)"
    return shown


def text(value: object) -> str:
    """A record, a list or a value in one line: `mean 0.5 0.5 0.5, std 0.2 0.2 0.2`."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {text(item)}" for name, item in value.items() if item is not None)
    if isinstance(value, list | tuple):
        return few([text(item) for item in value])
    return cell(value)


def counts(counted: Mapping[str, int]) -> str:
    """`3 identity, 1 projection`."""
    return ", ".join(f"{count} {name}" for name, count in counted.items() if count)


def span(pair: Sequence[float] | None) -> str:
    """`0.1 .. 0.4`, or one number where both are the same."""
    if pair is None:
        return ""
    return " .. ".join(dict.fromkeys(f"{value:.2g}" for value in pair))


def size(sides: Sequence[int]) -> str:
    """`3x224x224`."""
    return "x".join(map(str, sides))


def small(value: float | None) -> str:
    """An error: `2.1e-07`."""
    if value is None:
        return ""
    return f"{value:.1e}"
