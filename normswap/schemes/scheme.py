"""The record of a scheme: what it is called, what it computes with, what it needs. Without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from normswap.schemes.options import EVERY, Option

# torch takes a second to import, and the command line needs none of it.
if TYPE_CHECKING:
    from torch import nn

    from normswap.folding.plan_builder import PlanBuilder
    from normswap.models.calling import Example
    from normswap.models.modes import Progress
    from normswap.plan import Step


@dataclass(frozen=True, eq=False)
class FitTask:
    """The input of a fit.

    Args:
        source: the network before the step.
        result: the network after it; its tensors are set in place.
        batches: calls of both networks, read as often as needed; None where the user gave no images.
        example: one call, for its form and the size of its images.
        after: after(step) is a copy of the source after another step.
        takes_part: whether the layer at a path of the result may be changed (`only`, `skip`).
        progress: called with the number of steps so far, and the total.
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
"""plan(anatomy, *, options): a scheme names its options one by one, which no type but this says."""

FitFunction: TypeAlias = "Callable[[FitTask], Iterable[str] | None]"
"""Sets values of the result from data, in place; returns what the user should know."""


@dataclass(frozen=True)
class Scheme:
    """What a scheme is called, how it plans and fits, and what it needs.

    Args:
        plan: plan(anatomy, **options) -> PlanBuilder: what would be done, and why not.
        exact: whether the function is kept; a function of the options where it depends on them.
        fit: fit(task) sets values of the result from data, in place, where the function is not kept; it may return what
            the user should know. A batch is a call, `batch.call(task.source)`.
        needs_data: whether `fit` needs images of the user's.
        settle: of an exact scheme whose `fit` measures statistics on images: settle(source, result, step) sets the
            other tensors, in place, so that the function is kept. Synthetic images are refused.
        starts_from: the scheme that a network without norms must be brought to first.
        on_branches: it places a layer at the end of residual branches, which must not end in a factor of their own.
        may_do_nothing: a plan without edits is allowed.
        decay: which parameters decay in its paper, a policy of `param_groups`.
        options: records of the keywords of `plan`; of a registered scheme by default made from its signature.
        summary: one line about it; of a registered scheme by default the first line of `plan`'s docstring.
    """

    plan: Planner
    paper: str = ""
    exact: bool | Callable[[Options], bool] = True
    fit: FitFunction | None = None
    needs_data: bool = False
    settle: Callable[[nn.Module, nn.Module, Step], None] | None = None
    starts_from: str | None = None
    on_branches: bool = False
    may_do_nothing: bool = False
    decay: str = "kim2022"
    options: tuple[Option, ...] = ()
    summary: str = ""
    name: str = ""

    @property
    def defaults(self) -> Options:
        return {option.name: option.default for option in self.options}

    def is_exact(self, options: Options) -> bool:
        """Whether the function is kept with these options, which are complete."""
        if callable(self.exact):
            return self.exact(options)
        return self.exact


@dataclass(frozen=True)
class Chosen:
    """A scheme with all its options, those of every scheme too."""

    scheme: Scheme
    options: Options

    @property
    def own(self) -> Options:
        """The options without those that every scheme has."""
        return {name: value for name, value in self.options.items() if name not in EVERY}

    @property
    def exact(self) -> bool:
        return self.scheme.is_exact(self.options)

    @property
    def fits(self) -> bool:
        """Whether values are fitted."""
        return self.scheme.fit is not None and (self.measures or not self.exact)

    @property
    def measures(self) -> bool:
        """Whether its images give statistics that leave the function as it is (`settle`)."""
        return self.scheme.settle is not None
