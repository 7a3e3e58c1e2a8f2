"""What became of a norm, as a record; and the one place where it becomes a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Fate(Enum):
    """What happens to a site: (how many of them are called, when counted; the sentence)."""

    FOLDED_BACK = ("folded back", "folds into {into}")
    FOLDED_FORWARD = ("folded forward", "folds forward into {into}")
    LEFT_SHIFT = ("left a shift", "scale moves to {into}; a shift stays")
    MOVED_ON = ("scale and shift moved on", "its scale and shift move to {into}")
    RMSNORM = ("RMSNorm", "becomes an RMSNorm")
    LEFT_AFFINE = ("left scale and shift", "keeps scale and shift")
    STAYS = ("stay", "stays")
    NEVER_CALLED = ("never called", "never called by forward")
    SCALES_WEIGHT = ("scale a weight", "scales the weight of {into}")
    KEEPS_STATISTICS = ("keep their statistics", "keeps its statistics")
    KEPT = ("kept", "kept")
    FROZEN = ("frozen", "frozen")
    PER_SAMPLE = ("statistics per sample", "statistics per sample")
    GHOST = ("statistics over some samples", "statistics over")
    FROM_RECORD = ("norms from the statistics kept", "gets a norm from the statistics kept")
    ESTIMATED = ("estimated", "becomes what it does on average")
    BENT = ("Dynamic Tanh", "becomes a Dynamic Tanh")
    LEARNS = ("learn", "learns")
    RESTORED = ("restored", "restored")

    @property
    def counted(self) -> str:
        return self.value[0]


@dataclass(frozen=True)
class Verdict:
    """What happens to one site.

    Args:
        fate: which way it goes.
        into: paths of the layers that take in what it was.
        reason: why it stays, or what is special about it.
        detail: what stands behind the sentence's own words, without a colon.
    """

    fate: Fate
    into: tuple[str, ...] = ()
    reason: str = ""
    detail: str = ""

    def __str__(self) -> str:
        words = self.fate.value[1].format(into=", ".join(self.into))
        words += f" {self.detail}" if self.detail else ""
        return words + (f": {self.reason}" if self.reason else "")


def counts(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """How many sites go which way, in the order of `Fate`."""
    found = Counter(verdict.fate for verdict in verdicts)
    return {fate.counted: found[fate] for fate in Fate if fate in found}
