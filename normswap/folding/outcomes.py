"""The outcomes that several rules of folding have in common, and how outcomes are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from normswap.plan import Outcome

FOLDED_BACK, FOLDED_FORWARD, LEFT_SHIFT = "folded back", "folded forward", "left a shift"
LEFT_AFFINE = "left scale and shift"
KEEPS_STATISTICS = Outcome("keep their statistics", "keeps its statistics")
NEVER_CALLED = Outcome("never called", "never called by forward")


def folded_back(*into: str, reason: str = "") -> Outcome:
    """The outcome of a norm that goes into the layers before it, named by their paths."""
    return Outcome(FOLDED_BACK, f"folds into {', '.join(into)}", reason)


def left_affine(reason: str) -> Outcome:
    """The outcome of a norm whose scale and shift stay in its place, and why."""
    return Outcome(LEFT_AFFINE, "keeps scale and shift", reason)


def stays(reason: str, with_what: str = "") -> Outcome:
    """The outcome of a norm that stays as it is, and why."""
    return Outcome("stay", f"stays{with_what}", reason)


def counts(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """How many norms have which outcome, in the order in which each is first met."""
    return dict(Counter(outcome.counted for outcome in outcomes))
