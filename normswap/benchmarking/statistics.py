"""From runs to figures: medians, quartiles, and ratios of what ran in the same round."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Median, and the first and third quartile (linear between the values, as numpy does it)."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """The spread of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def speedup(base: Sequence[Sequence[float]], own: Sequence[Sequence[float]]) -> Spread:
    """How many times as fast as `base` something is: the spread, over the rounds, of base's median to its own.

    A round's runs lie close together in time, so what slows the machine down slows both sides of each ratio.

    Args:
        base, own: the seconds of each run, by round; the same number of rounds.
    """
    pairs = zip(base, own, strict=True)
    return spread([statistics.median(theirs) / statistics.median(ours) for theirs, ours in pairs])


def rotated(order: Sequence[int], turn: int) -> list[int]:
    """`order`, begun at another place each turn, and every other time walked backwards.

    So nobody always runs first, nor always after the same neighbour.
    """
    if not order:
        return []
    start = turn // 2 % len(order)
    walked = [*order[start:], *order[:start]]
    return walked[::-1] if turn % 2 else walked
