"""What a report says, as plain records. `report` finds it out, `page` and `figures` show it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from normswap.analysis.signal_propagation import Point
from normswap.plan import Arch
from normswap.surgery.comparison import Report

ROLES = ("stem", "other", "last", "down", "head")


@dataclass(frozen=True)
class StepFact:
    """One step of the plan: the scheme, what it is, and how many of which layers it seated."""

    scheme: str
    options: dict[str, Any]
    summary: str
    paper: str
    edits: dict[str, int]


@dataclass(frozen=True)
class NormFact:
    """A norm of the source, and what the plan did to it.

    Args:
        fate: `gone` (its seat is empty), `scalar` (an alpha sits there), `bias` or `affine` (a shift, or a scale and a
            shift, per channel stay), `replaced` (by any other layer) or `kept`.
        said: the same in words.
    """

    path: str
    role: str
    channels: int
    fate: str
    said: str


@dataclass(frozen=True)
class BlockFact:
    """A residual block of the source."""

    path: str
    stage: str
    skip: str
    norms: tuple[NormFact, ...]


@dataclass(frozen=True)
class Gammas:
    """The gammas of the norms of one role, counted between shared edges."""

    role: str
    norms: int
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    mean: float
    negative: int
    zero: int


@dataclass(frozen=True)
class Alpha:
    """The scalar at the end of a branch: as it is now, and as the plan seated it."""

    block: str
    seat: str
    value: float
    planned: float | None
    bias: float | None


@dataclass(frozen=True)
class Facts:
    """Everything the page says.

    Args:
        against: what `before` was measured on: `source`, `unfolded` or nothing.
        notes: what the reader should know about the figures.
        signal: the points of the networks `before` and `after`, and what they were measured on.
        accuracy: top-1 in percent of source and result, agreement and count, where measured.
        sizes: norms and parameters of `before` and `after`.
    """

    source: str
    sha256: str | None
    arch: Arch
    steps: tuple[StepFact, ...]
    digest: str
    versions: dict[str, str]
    report: Report | None
    blocks: tuple[BlockFact, ...]
    others: tuple[NormFact, ...]
    gammas: tuple[Gammas, ...]
    alphas: tuple[Alpha, ...]
    sizes: dict[str, dict[str, int]]
    against: str
    notes: tuple[str, ...] = ()
    signal: dict[str, tuple[Point, ...]] = field(default_factory=dict)
    signal_inputs: str = ""
    accuracy: dict[str, float] = field(default_factory=dict)

    @property
    def title(self) -> str:
        names = [step.scheme for step in self.steps]
        return f"{self.arch.name} converted to {', then '.join(names)}" if names else self.arch.name

    @property
    def stages(self) -> tuple[str, ...]:
        """The stage of each block, in order of the forward pass."""
        return tuple(block.stage for block in self.blocks)
