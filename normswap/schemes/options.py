"""The options of the schemes as records: the one place that says what may be given, readable without torch.

The command line, recipes, errors, cards and pages are made from it. A registered scheme brings records of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from normswap.errors import OptionError, flag, spelled

# Options of every scheme: see `graph.selection`.
EVERY = ("only", "skip")


@dataclass(frozen=True)
class Range:
    """The numbers from `low` up to `high`; a bound that is `open` is not one of them."""

    low: float
    high: float = math.inf
    low_open: bool = False
    high_open: bool = True

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        return above and (value < self.high if self.high_open else value <= self.high)

    def __str__(self) -> str:
        return f"{'(' if self.low_open else '['}{self.low:g}, {self.high:g}{')' if self.high_open else ']'}"


@dataclass(frozen=True)
class Option:
    """An option of a scheme.

    Args:
        name: as Python spells it.
        kind: int, float, bool, str; object: one of the choices, or a number.
        default: its value where nothing is said.
        help: a line about it.
        metavar: what stands for its value in help texts, where that is no list of choices.
        choices, range: the words, and the numbers, that it may be.
        instead_of: the option that says the same in another way; only one of the two is given.
    """

    name: str
    kind: type
    default: object
    help: str = ""
    metavar: str = ""
    choices: tuple[str, ...] = ()
    range: Range | None = None
    instead_of: str = ""

    @property
    def flag(self) -> str:
        """As the command line spells it."""
        return flag(self.name)

    @property
    def placeholder(self) -> str:
        """The metavar of its value in help texts."""
        words = (*self.choices, *([self.metavar] if self.metavar else []))
        return "|".join(words) or self.kind.__name__.upper()

    def check(self, value: object) -> None:
        """See that this may be its value; else an OptionError."""
        is_number = self.kind in (int, float, object)
        if value in self.choices or (is_number and self._is_number(value)) or not (is_number or self.choices):
            return
        allowed = [repr(choice) for choice in self.choices]
        if self.kind is int:
            allowed.append("a whole number" if self.range is None else f"a whole number >= {self.range.low:g}")
        elif is_number:
            allowed.append("a finite number" if self.range is None else f"in {self.range}")
        raise OptionError(f"{spelled(self.name, value)} is not {' or '.join(allowed)}")

    def read(self, value: object) -> object:
        """A value that may be its own, as a plan keeps it: 0, 0.0 and `0` are one number."""
        if self.kind not in (float, object) or value in self.choices:
            return value
        return float(value)  # type: ignore[arg-type]

    def _is_number(self, value: object) -> bool:
        if isinstance(value, str) and self.kind is object:
            try:
                value = float(value)
            except ValueError:
                return False
        if isinstance(value, bool) or not isinstance(value, int if self.kind is int else int | float):
            return False
        return math.isfinite(value) and (self.range is None or value in self.range)


def check_given(scheme: str, options: Sequence[Option], values: Mapping[str, object]) -> None:
    """See that a scheme has these options, and that they may have these values; else an OptionError."""
    by_name = {option.name: option for option in options}
    if unknown := set(values) - {*by_name, *EVERY}:
        why = f"its options are {_listed(by_name)}" if options else "it takes no options"
        raise OptionError(f"scheme '{scheme}' has no option {_listed(unknown)}", why)
    for option in options:
        value = values.get(option.name, option.default)
        option.check(value)
        other = by_name.get(option.instead_of)
        if other and value != option.default and values.get(other.name, other.default) != other.default:
            both = f"{spelled(other.name)} and {spelled(option.name)}"
            raise OptionError(both, "each says the same in its own way", "Give one of them")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(name.replace("_", "-") for name in sorted(names))
