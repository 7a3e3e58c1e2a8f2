"""Grids of numbers on the command line: `0.1`, `2^-4..2^1` (every whole power), `0.01,0.02,2^-5`. No torch here."""

from __future__ import annotations

import re

from normswap.errors import OptionError

_POWER = re.compile(r"([0-9.]+)\^([-+]?[0-9]+)$")
_MOST = 1000
_FORM = "Write numbers and powers, as in 0.05,0.1 or 2^-4..2^1"


def parse(text: str, option: str = "--lr") -> list[float]:
    """Return the positive numbers that `text` names, ascending, each once.

    Raises:
        OptionError: it names none, or one that is not positive.
    """
    numbers: set[float] = set()
    for part in text.split(","):
        first, dots, last = (word.strip() for word in part.partition(".."))
        numbers |= set(_powers(first, last, option)) if dots else {_number(first, option)}
    return sorted(numbers)


def _powers(first: str, last: str, option: str) -> list[float]:
    low, high = _POWER.match(first), _POWER.match(last)
    if not low or not high or float(low[1]) != float(high[1]):
        raise OptionError(f"{option} {first}..{last}: a range goes from a power to another of the same base", "", _FORM)
    start, end = int(low[2]), int(high[2])
    if start > end:
        raise OptionError(f"{option} {first}..{last} is empty", remedy=f"Write {last}..{first}")
    if end - start >= _MOST:
        raise OptionError(f"{option} {first}..{last} has {end - start + 1} numbers")
    return [_number(f"{low[1]}^{power}", option) for power in range(start, end + 1)]


def _number(text: str, option: str) -> float:
    power = _POWER.match(text)
    try:
        value = float(power[1]) ** int(power[2]) if power else float(text)
    except (ValueError, OverflowError, ZeroDivisionError):
        value = 0.0
    if not 0 < value < float("inf"):
        raise OptionError(f"{option}: {text!r} is no positive number", remedy=_FORM)
    return value
