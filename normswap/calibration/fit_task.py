"""What a scheme's `fit` is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from normswap.models.calling import Example
from normswap.models.modes import Progress
from normswap.plan import Step


@dataclass(frozen=True, eq=False)
class FitTask:
    """A result whose values are to be set from data, and all that they are set from.

    Args:
        source: the network before the step.
        result: the network after the step; its tensors are set in place.
        step: the step.
        batches: calls of both networks, read as often as needed; None where the user gave no images.
        example: one call, for its form and the size of its images.
        after: after(step) is the source, which stays, after another step.
        seed: of all that is drawn.
        progress: called with what is done and the total.
    """

    source: nn.Module
    result: nn.Module
    step: Step
    batches: Iterable[Example] | None
    example: Example
    after: Callable[[Step], nn.Module]
    seed: int = 0
    progress: Progress | None = None
