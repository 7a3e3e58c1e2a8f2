"""Tables of which a part runs by default, so that each row is met, and the rest is long."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def named(row: Any) -> str:
    return row if isinstance(row, str) else str(row[0])


def sampled(rows: Iterable[Any], every: int) -> list[Any]:
    """The rows of a table, one in `every` of which is not long."""
    return [
        pytest.param(row, marks=[pytest.mark.long] * bool(i % every)) for i, row in enumerate(rows)
    ]


def dice(*case: Any) -> random.Random:
    """Random numbers of a case: the same in each run, and others than those of any other case."""
    return random.Random(" ".join(map(str, case)))


def quick(rows: Iterable[Any], default: Iterable[Any]) -> list[Any]:
    """Return the rows of a table, of which all but the default ones are slow.

    Args:
        rows: the table.
        default: the rows that run by default. A row that is added to the table is slow until it
            is named here, and moves no other.
    """
    kept = list(default)
    params = []
    for row in rows:
        marks = [] if row in kept else [pytest.mark.slow]
        params.append(pytest.param(row, marks=marks))
    return params


def crossed(
    names: str,
    ones: Iterable[Any],
    others: Iterable[Any],
    every: int,
    ids: Callable[[Any], str] = str,
    mark: pytest.MarkDecorator = pytest.mark.long,
    slow: tuple[str, ...] = (),
) -> pytest.MarkDecorator:
    """Parametrize a test with the pairs of two tables, one in `every` of which is not long, or what
    the mark says.

    Args:
        names: of the two arguments, as pytest takes them.
        ids: the name of a row.
        slow: rows of the first table all pairs of which have the mark.
    """
    rows = list(ones)
    columns = list(others)
    assert every <= min(len(rows), len(columns)), "some row would never run"

    pairs = [
        pytest.param(
            one,
            other,
            id=f"{ids(one)}-{ids(other)}",
            marks=[mark] * ((i + j) % every > 0 or one in slow),
        )
        for i, one in enumerate(rows)
        for j, other in enumerate(columns)
    ]

    return pytest.mark.parametrize(names, pairs)
