"""The records of a scheme and of its options.

The record of a scheme holds its name, its functions and what it needs. The records of options are
the only place that says what a user may give: the command line, recipes, errors, cards and pages
are made from them. A registered scheme brings records of its own. This file imports without torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from normswap.errors import OptionError, spelled

# torch takes a second to import, and the command line needs none of it.
if TYPE_CHECKING:
    from torch import nn

    from normswap.folding.plan_builder import PlanBuilder
    from normswap.models.calling import Example
    from normswap.models.modes import Progress
    from normswap.plan import Step

# The options that every scheme has. `graph.anatomy` says which layers they choose.
EVERY = ("only", "skip")


@dataclass(frozen=True)
class Range:
    """The numbers between two bounds.

    Args:
        low: The lower bound.
        high: The upper bound.
        low_open: Whether the lower bound itself is left out.
        high_open: Whether the upper bound itself is left out.
    """

    low: float
    high: float = math.inf
    low_open: bool = False
    high_open: bool = True

    def __contains__(self, value: float) -> bool:
        is_bound = (value == self.low and not self.low_open) or (
            value == self.high and not self.high_open
        )
        return self.low < value < self.high or is_bound

    def __str__(self) -> str:
        return (
            f"{'(' if self.low_open else '['}{self.low:g},"
            f" {self.high:g}{')' if self.high_open else ']'}"
        )


@dataclass(frozen=True)
class Option:
    """An option of a scheme.

    Args:
        name: The name as Python spells it.
        kind: The type: int, float, bool or str. `object` stands for one of the choices or a number.
        default: The value if the user gives none.
        help: A line about the option.
        metavar: The word that stands for a value in help texts, behind the choices if there are
            any.
        choices: The allowed words.
        range: The allowed numbers.
        instead_of: The option that says the same in another way. Only one of the two is given.
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
    def placeholder(self) -> str:
        """The text that stands for the option's value in help texts.

        It has the choices and the metavar, as `a|b|METAVAR`, or else the name of the type.
        """
        return "|".join(filter(None, (*self.choices, self.metavar))) or self.kind.__name__.upper()

    def check(self, value: Any) -> object:
        """Return the value as a plan stores it.

        - An option of kind float stores an int as a float: 0 becomes 0.0.
        - An option of kind `object` stores an int, a float or the text of a number as a float: 0
          and "0" become 0.0. The command line gives it every number as text.
        - An option of kind int takes no float and no text.
        - A choice is stored as it is given.
        - A str or bool option without choices stores every value as it is given, unchecked.

        Raises:
            OptionError: The option does not take this value.
        """
        # One of the choices is taken as it is. So is any value, if the option has neither choices
        # nor numbers.
        is_number = self.kind in (int, float, object)
        if value in self.choices or not (is_number or self.choices):
            return value
        if is_number and self._is_number(value):
            return value if self.kind is int else float(value)
        # The rest says in the error what the option takes.
        allowed = [repr(choice) for choice in self.choices]
        if self.kind is int:
            allowed.append(
                "a whole number" if self.range is None else f"a whole number >= {self.range.low:g}"
            )
        elif is_number:
            allowed.append("a finite number" if self.range is None else f"in {self.range}")
        raise OptionError(f"{spelled(self.name, value)} is not {' or '.join(allowed)}")

    def _is_number(self, value: object) -> bool:
        """Whether a value is a finite number of the option's kind, in its range.

        For the kind `object` the value may be the text of a number.
        """
        if isinstance(value, str) and self.kind is object:
            try:
                value = float(value)
            except ValueError:
                return False
        # In Python True and False are instances of int.
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if self.kind is int and not isinstance(value, int):
            return False
        return math.isfinite(value) and (self.range is None or value in self.range)


def check_given(
    scheme: str, options: Sequence[Option], values: Mapping[str, object]
) -> dict[str, object]:
    """Return the values of all options of a scheme: the given ones, and the defaults of the others.

    Args:
        scheme: The name of the scheme, for the errors.
        options: The records of its options.
        values: The given values by name. `only` and `skip` may be among them, and are left out.

    Raises:
        OptionError: The scheme has no such option, or an option does not take its value, or two
            options are given that say the same.
    """
    checked: dict[str, object] = {}
    by_name = {option.name: option for option in options}
    if unknown := set(values) - {*by_name, *EVERY}:
        why = f"its options are {_listed(by_name)}" if options else "it takes no options"
        raise OptionError(f"scheme '{scheme}' has no option {_listed(unknown)}", why)
    for option in options:
        value = checked[option.name] = option.check(values.get(option.name, option.default))
        # Of two options that say the same, only one may be given. An option counts as given if its
        # value is not the default.
        is_given = value != option.default
        other = by_name.get(option.instead_of)
        if other and is_given and values.get(other.name, other.default) != other.default:
            both = f"{spelled(other.name)} and {spelled(option.name)}"
            raise OptionError(both, "each says the same in its own way", "Give one of them")
    return checked


def _listed(names: Iterable[str]) -> str:
    """Return the names of options as one text, sorted, in the spelling of the command line."""
    return ", ".join(name.replace("_", "-") for name in sorted(names))


@dataclass(frozen=True, eq=False)
class FitTask:
    """What a scheme's function `fit` is called with, after the edits of a plan's step were made.

    Args:
        source: The network before the step.
        result: The network after the step. `fit` sets its tensors in place.
        step: The step of the plan, with its edits.
        batches: Calls of both networks, which may be read several times. None if the user gave no
            images.
        example: One call of the networks, which shows their inputs and the size of the images.
        after: A function that carries out another step on a copy of the source, and returns the
            copy.
        takes_part: Whether the layer at a path of the result may be changed (`only`, `skip`).
        seed: The seed of all random numbers.
        progress: Called with the number of steps so far, and the total.
    """

    source: nn.Module
    result: nn.Module
    step: Step
    batches: Iterable[Example] | None
    example: Example
    after: Callable[[Step], nn.Module]
    takes_part: Callable[[str], bool]
    seed: int = 0
    progress: Progress | None = None


Options: TypeAlias = dict[str, Any]

Planner: TypeAlias = "Callable[..., PlanBuilder]"
"""A function plan(anatomy, *, options), which names each option. No stricter type allows that."""

FitFunction: TypeAlias = "Callable[[FitTask], Iterable[str] | None]"
"""A function that sets values of the result from data, in place, and may return notes."""


@dataclass(frozen=True)
class TrainingProof:
    """What a run in training mode proves of a converted network.

    It always proves that no sample's output depends on another sample, and that no buffer changes.

    Args:
        rows_are_samples: Whether row i of a learning layer's input must be sample i.
        validator: A function of the result in training mode that returns the layers that the
            trainer refuses, by path, with the reason. None if the trainer has no check of its own.
    """

    rows_are_samples: bool = False
    validator: Callable[[nn.Module], dict[str, str]] | None = None


@dataclass(frozen=True)
class Scheme:
    """How a scheme is called, how it plans and fits, and what it needs.

    Args:
        plan: A function plan(anatomy, **options) -> PlanBuilder that says what would be done, and
            what cannot be done and why.
        paper: The paper that proposes the scheme.
        exact: Whether the function of the network is kept, or a function of the options that tells
            whether it is.
        resets: A function of the options that tells whether they reset the weights of a fresh
            network. Then `fit` is not called. None if no option resets weights.
        fit: A function fit(task) that sets values of the result from data, in place, if the scheme
            does not keep the function. It may return notes for the user. A batch is a call,
            `batch.call(task.source)`.
        needs_data: Whether `fit` needs images of the user's.
        takes_all_images: Whether `fit` measures statistics on all images, so that none is held out.
        settle: For an exact scheme whose `fit` measures statistics on images, a function
            settle(source, result, step) that sets the other tensors, in place, so that the function
            is kept. Synthetic images are refused.
        starts_from: The scheme that a network without norms is brought to first.
        on_branches: Whether it places a scalar at the end of residual branches. A network whose
            branches end in factors of their own is then folded first.
        keeps_blocks: Whether an exact result has the source's values at the ends of the residual
            blocks, too. A scheme that rescales the residual stream has other values there.
        may_do_nothing: Whether a plan without edits is allowed.
        training: The properties of the result that a run in training mode proves. None if nothing
            has to be proved.
        decay: The parameters that decay in its paper, as a policy of `param_groups`.
        options: The records of the keywords of `plan`. A registered scheme gets them from the
            signature of `plan` by default.
        summary: One line about it. A registered scheme gets it from the first line of `plan`'s
            docstring by default.
        name: The name under which it is registered.
    """

    plan: Planner
    paper: str = ""
    exact: bool | Callable[[Options], bool] = True
    resets: Callable[[Options], bool] | None = None
    fit: FitFunction | None = None
    needs_data: bool = False
    takes_all_images: bool = False
    settle: Callable[[nn.Module, nn.Module, Step], None] | None = None
    starts_from: str | None = None
    on_branches: bool = False
    keeps_blocks: bool = True
    may_do_nothing: bool = False
    training: TrainingProof | None = None
    decay: str = "kim2022"
    options: tuple[Option, ...] = ()
    summary: str = ""
    name: str = ""

    @property
    def defaults(self) -> Options:
        return {option.name: option.default for option in self.options}

    def is_exact(self, options: Options) -> bool:
        """Whether a conversion keeps the network's function. All options must be given."""
        if callable(self.exact):
            return self.exact(options)
        return self.exact


@dataclass(frozen=True)
class Chosen:
    """A scheme and the values of its options.

    Args:
        scheme: The scheme.
        options: The values of all its options, and of `only` and `skip` if they were given.
    """

    scheme: Scheme
    options: Options

    @property
    def own(self) -> Options:
        """The values of the scheme's own options, without `only` and `skip`."""
        return {name: value for name, value in self.options.items() if name not in EVERY}

    @property
    def exact(self) -> bool:
        return self.scheme.is_exact(self.options)

    @property
    def fits(self) -> bool:
        """Whether the scheme's `fit` is called with these options."""
        if self.scheme.fit is None or (self.scheme.resets and self.scheme.resets(self.options)):
            return False
        return self.measures or not self.exact

    @property
    def measures(self) -> bool:
        """Whether the scheme measures statistics on images, and keeps the network's function.

        Its `fit` measures them. Its `settle` then sets the other tensors so that the function of
        the network is what it was.
        """
        return self.scheme.settle is not None
