"""The contents of a report as plain records. `report` finds it out, `page` shows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from normswap.analysis.signal_propagation import Point
from normswap.diagnosis.findings import Finding
from normswap.plan import Arch, Body
from normswap.surgery.report import Report

COLOURS = {"stem": 4, "other": 1, "last": 2, "down": 3, "head": 5}  # of norms by role: classes in the page's style
ALPHA = "\N{GREEK SMALL LETTER ALPHA}"
OUTCOMES = {  # what may become of a norm: its mark and its meaning
    "gone": ("", "folded away"),
    "scalar": (ALPHA, f"folded away, a scalar {ALPHA} in its place"),
    "bias": ("b", "a shift per channel stays"),
    "affine": ("a", "scale and shift stay"),
    "replaced": ("r", "replaced by another layer"),
    "kept": ("●", "kept"),
}


@dataclass(frozen=True)
class StepFact:
    """One step of the plan: the scheme, what it is, and how many of which layers it placed."""

    scheme: str
    options: Body
    summary: str
    paper: str
    edits: dict[str, int]


@dataclass(frozen=True)
class NormFact:
    """A norm of the source, and what the plan did to it: one of `OUTCOMES`, and the same in words."""

    path: str
    role: str
    channels: int
    outcome: str
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
    """The scalar at the end of a branch: as it is now, and as the plan placed it."""

    block: str
    path: str
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
        findings: what the doctor says of the BatchNorms of the network before, or else of the result.
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
    findings: tuple[Finding, ...] = ()

    @property
    def title(self) -> str:
        names = [step.scheme for step in self.steps]
        return f"{self.arch.name} converted to {', then '.join(names)}" if names else self.arch.name

    @property
    def norms(self) -> tuple[NormFact, ...]:
        """Every norm of the source."""
        return (*(norm for block in self.blocks for norm in block.norms), *self.others)

    @property
    def before(self) -> tuple[NormFact, ...]:
        """The norms in front of the blocks."""
        return tuple(norm for norm in self.others if norm.role == "stem")

    @property
    def elsewhere(self) -> tuple[NormFact, ...]:
        """The other norms outside of blocks."""
        return tuple(norm for norm in self.others if norm.role != "stem")
