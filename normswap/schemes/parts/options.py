"""The options of the schemes as records: the one place that says what may be given, readable without torch.

The command line, recipes, errors, cards and pages are made from it. A registered scheme brings records of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from normswap.errors import OptionError, flag, spelled

EVERY = ("only", "skip")  # options of every scheme: see `graph.selection`


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
        choices: the words that it may be.
        range: the numbers that it may be.
        instead_of: the option that says the same in another way; only one of the two is given.
        or_network: in Python it may be a module, too.
    """

    name: str
    kind: type
    default: object
    help: str = ""
    metavar: str = ""
    choices: tuple[str, ...] = ()
    range: Range | None = None
    instead_of: str = ""
    or_network: bool = False

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
        """See that this may be its value.

        Raises:
            OptionError: it is of another type, none of the choices, or out of range.
        """
        if self.choices and value in self.choices:
            return
        if self.kind in (int, float, object):
            if not self._is_number(value):
                raise OptionError(f"{spelled(self.name, value)} is {self._numbers()}")
        elif self.choices:
            one, *rest = (repr(choice) for choice in self.choices)
            if len(rest) > 1:
                raise OptionError(f"unknown {spelled(self.name, value)}", remedy=f"Known: {', '.join(self.choices)}")
            raise OptionError(f"{spelled(self.name, value)} is neither {one} nor {rest[0]}")

    def _is_number(self, value: object) -> bool:
        if isinstance(value, str) and self.kind is object:
            try:
                value = float(value)
            except ValueError:
                return False
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole or (isinstance(value, float) and math.isfinite(value) and self.kind is not int)):
            return False
        return self.range is None or (isinstance(value, int | float) and value in self.range)

    def _numbers(self) -> str:
        """The complaint about a value."""
        if self.choices:
            return f"neither {', '.join(map(repr, self.choices))} nor a finite number"
        if self.kind is int:
            return "not a whole number" + ("" if self.range is None else f" >= {self.range.low:g}")
        return "not a finite number" if self.range is None else f"not in {self.range}"


def check_given(scheme: str, known: Sequence[Option], values: Mapping[str, object]) -> None:
    """See that a scheme has these options, and that they may have these values.

    Raises:
        OptionError: it has not, or they may not.
    """
    names = [option.name for option in known]
    if unknown := set(values) - {*names, *EVERY}:
        has = f"its options are {_listed(names)}" if known else "it takes no options"
        raise OptionError(f"scheme '{scheme}' has no option {_listed(unknown)}", has)
    for option in known:
        if option.name in values:
            option.check(values[option.name])
    changed = [option for option in known if values.get(option.name, option.default) != option.default]
    names = [option.name for option in changed]
    for option in changed:
        if option.instead_of in names:
            both = f"{spelled(option.instead_of)} and {spelled(option.name)}"
            raise OptionError(both, "each says the same in its own way", "Give one of them")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(name.replace("_", "-") for name in sorted(names))
