"""Tables of which a part runs by default, and the rest only when slow or long tests are asked for.

Whether a row runs by default hangs on the row alone: it is named as a default (`quick`), or its
name decides (`weight`). A row that is added to a table moves no other row.
"""

import random
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def named(row: Any) -> str:
    return row if isinstance(row, str) else str(row[0])


def dice(*case: Any) -> random.Random:
    """Random numbers of a case: the same in each run, and others than those of any other case."""
    return random.Random(" ".join(map(str, case)))


def weight(*names: str) -> int:
    """Return a number that hangs on these names alone, and is the same in each run."""
    return zlib.crc32(" ".join(names).encode())


def one_in(names: Sequence[str], every: int) -> set[str]:
    """Return about one in `every` of these names, by their weights; at least one."""
    chosen = {name for name in names if weight(name) % every == 0}
    return chosen or {min(names, key=weight)}


def quick(
    rows: Iterable[Any], default: Iterable[Any], mark: pytest.MarkDecorator = pytest.mark.slow
) -> list[Any]:
    """Return the rows of a table, of which all but the default ones have a mark.

    Args:
        rows: The table.
        default: The rows that run by default. A row that is added to the table does not, until it
            is named here.
        mark: The mark of the other rows.
    """
    kept = list(default)
    assert kept, "no row would run by default"
    return [pytest.param(row, marks=[] if row in kept else [mark]) for row in rows]


def sampled(rows: Iterable[Any], every: int, ids: Callable[[Any], str] = str) -> list[Any]:
    """Return the rows of a table, all but about one in `every` of which are long.

    Args:
        rows: The table.
        every: The number of rows of which about one runs by default.
        ids: Returns the name of a row, which decides.
    """
    table = list(rows)
    default = one_in([ids(row) for row in table], every)
    return quick(table, [row for row in table if ids(row) in default], pytest.mark.long)


def pairs(ones: Sequence[str], others: Sequence[str]) -> set[tuple[str, str]]:
    """Return some pairs of the names of two tables, so that each name is in one of them."""
    if len(ones) < len(others):
        return {(one, other) for other, one in pairs(others, ones)}

    chosen: set[tuple[str, str]] = set()
    for one in ones:
        chosen.add((one, min(others, key=lambda other: weight(one, other))))
    for other in set(others) - {other for _, other in chosen}:
        chosen.add((min(ones, key=lambda one: weight(one, other)), other))
    return chosen


def crossed(
    names: str,
    ones: Iterable[Any],
    others: Iterable[Any],
    ids: Callable[[Any], str] = str,
    mark: pytest.MarkDecorator = pytest.mark.long,
    slow: tuple[str, ...] = (),
) -> pytest.MarkDecorator:
    """Parametrize a test with all pairs of two tables, most of which have a mark.

    Every row of both tables is in a pair that runs by default (`pairs`).

    Args:
        names: The names of the two arguments, as pytest takes them.
        ones: The first table.
        others: The second table.
        ids: Returns the name of a row.
        mark: The mark of the pairs that do not run by default.
        slow: Rows of the first table all of whose pairs have the mark.
    """
    rows = list(ones)
    columns = list(others)
    quick_rows = [ids(one) for one in rows if one not in slow]
    default = pairs(quick_rows, [ids(other) for other in columns])

    params = []
    for one in rows:
        for other in columns:
            marks = [] if (ids(one), ids(other)) in default else [mark]
            params.append(pytest.param(one, other, id=f"{ids(one)}-{ids(other)}", marks=marks))
    return pytest.mark.parametrize(names, params)
