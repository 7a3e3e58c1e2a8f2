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


_ALPHA = Option(
    "alpha", object, "match", "`match`, `inv-sqrt-depth` (1 / sqrt(number of blocks)) or a number", "NUMBER",
    choices=("match", "inv-sqrt-depth"),
)  # fmt: skip
_BEND = Option("bend", float, 0.25, "the alpha that every layer starts with; its input has deviation 1, less where "
               "tails are long", "ALPHA", range=Range(0, 4, low_open=True, high_open=False))  # fmt: skip
_GROUPS = Option(
    "groups", int, 1, "of channels; a norm whose channels they do not divide gets the nearest divisor, and a note "
    "says so", "N", range=Range(1),
)  # fmt: skip
_GROUP_SIZE = Option(
    "group_size", int, 0, "instead: so many channels to a group (robot policies take 16); 0: `groups` says it", "N",
    range=Range(0), instead_of="groups",
)  # fmt: skip
_STEADY = Option(
    "steady", float, 0.9, "the share, made by a large eps, of what a sample's variance is divided by; the more, the "
    "more is kept, and the less it normalizes; 0: the plain norm", "SHARE",
    range=Range(0, 1),
)  # fmt: skip
_FILTER_MEANS = (
    Option("mean", str, "fit", "`fit` or `keep` the filters' means", choices=("fit", "keep")),
    Option("stem", str, "keep", "the same for the convolution that reads the image; without them it is blind to "
           "brightness and colour", choices=("fit", "keep")),
    Option("depthwise", str, "keep", "the same for filters that read one channel, which without a mean lose its level",
           choices=("fit", "keep")),
)  # fmt: skip

OPTIONS: dict[str, tuple[Option, ...]] = {
    "batchnorm": (
        Option("where", str, "norms", "`norms`: where they stand, or stood; of a network that never had any, with "
               "--calibrate, as `activation`: after each convolution whose values reach an activation next; `conv`: "
               "after each that another layer reads", choices=("norms", "activation", "conv")),
        Option("like", str, "", "instead: an architecture (named as MODEL is) whose norms' places are taken and whose "
               "own class, without normswap's layers, holds the result", "ARCH", or_network=True),
        Option("ghost_batch", int, 0, "how many samples share their statistics in training; 0: the whole batch", "N",
               range=Range(0)),
    ),
    "centered-weightnorm": _FILTER_MEANS,
    "dyt": (_BEND,),
    "fixup": (Option("init", str, "keep", "`keep` the weights, or `fixup`, the paper's reset",
                     choices=("keep", "fixup")),),
    "folded": (Option("branches", str, "merge", "`merge` branches whose sum one convolution computes (RepVGG, "
                      "MobileOne, RepViT, FastViT), or `keep` them, so that `unfold` finds the way back",
                      choices=("merge", "keep")),),
    "groupnorm": (_GROUPS, _GROUP_SIZE, _STEADY),
    "layernorm": (_STEADY,),
    "nf": _FILTER_MEANS,
    "regularized-skipinit": (
        _ALPHA,
        Option("dropout", float, 0.2, "probability of dropping a feature before the classifier, in [0, 1)", "P",
               range=Range(0, 1)),
    ),
    "residual-scale": (
        Option("rule", str, "rescale", "the published rule that gives a and b",
               choices=("balduzzi", "szegedy", "hanin", "arpit", "rescale")),
    ),
    "skipinit": (_ALPHA,),
}  # fmt: skip
"""By scheme."""
