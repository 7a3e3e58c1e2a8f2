"""The options of the schemes as records: the one place that says what may be given, readable without torch.

The command line, recipes, errors, cards and pages are made from it. A registered scheme brings records of its own.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
        is_bound = (value == self.low and not self.low_open) or (value == self.high and not self.high_open)
        return self.low < value < self.high or is_bound

    def __str__(self) -> str:
        return f"{'(' if self.low_open else '['}{self.low:g}, {self.high:g}{')' if self.high_open else ']'}"


@dataclass(frozen=True)
class Option:
    """An option of a scheme.

    Args:
        name: as Python spells it.
        kind: int, float, bool, str; object: one of the choices, or a number.
        help: a line about it.
        metavar: stands for its value in help texts, where that is no list of choices.
        choices, range: the allowed words, and the allowed numbers.
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
        return flag(self.name)

    @property
    def placeholder(self) -> str:
        """The metavar of its value in help texts."""
        return "|".join(filter(None, (*self.choices, self.metavar))) or self.kind.__name__.upper()

    def check(self, value: Any) -> object:
        """The value as a plan stores it (0, 0.0 and `0` are one number); raises OptionError: it is not allowed."""
        is_number = self.kind in (int, float, object)
        if value in self.choices or not (is_number or self.choices):
            return value
        if is_number and self._is_number(value):
            return value if self.kind is int else float(value)
        allowed = [repr(choice) for choice in self.choices]
        if self.kind is int:
            allowed.append("a whole number" if self.range is None else f"a whole number >= {self.range.low:g}")
        elif is_number:
            allowed.append("a finite number" if self.range is None else f"in {self.range}")
        raise OptionError(f"{spelled(self.name, value)} is not {' or '.join(allowed)}")

    def _is_number(self, value: object) -> bool:
        if isinstance(value, str) and self.kind is object:
            try:
                value = float(value)
            except ValueError:
                return False
        if isinstance(value, bool) or not isinstance(value, int if self.kind is int else int | float):
            return False
        return math.isfinite(value) and (self.range is None or value in self.range)


def check_given(scheme: str, options: Sequence[Option], values: Mapping[str, object]) -> dict[str, object]:
    """The values of all options; raises OptionError: the scheme has no such option, or not with such a value."""
    checked: dict[str, object] = {}
    by_name = {option.name: option for option in options}
    if unknown := set(values) - {*by_name, *EVERY}:
        why = f"its options are {_listed(by_name)}" if options else "it takes no options"
        raise OptionError(f"scheme '{scheme}' has no option {_listed(unknown)}", why)
    for option in options:
        value = checked[option.name] = option.check(values.get(option.name, option.default))
        other = by_name.get(option.instead_of)
        if other and value != option.default and values.get(other.name, other.default) != other.default:
            both = f"{spelled(other.name)} and {spelled(option.name)}"
            raise OptionError(both, "each says the same in its own way", "Give one of them")
    return checked


def _listed(names: Iterable[str]) -> str:
    return ", ".join(name.replace("_", "-") for name in sorted(names))
