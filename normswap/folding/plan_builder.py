"""The plan builder: what each layer absorbs, which layer goes where, and what became of each norm."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch.nn.functional as F
from torch import fx, nn

from normswap.graph import channel_axes
from normswap.graph.anatomy import Anatomy
from normswap.graph.channel_axes import Axes
from normswap.graph.tracing import Traced
from normswap.layers import affine
from normswap.layers.activations import is_identity
from normswap.layers.placeholders import Vacant
from normswap.plan import AbsorbMode, Absorption, Body, Edit, Outcome, Then

FOLDED_BACK = "folded into the layer before"
FOLDED_FORWARD = "folded into the layer after"
LEFT_SHIFT = "folded but for a shift"
LEFT_AFFINE = "left as a scale and shift"
KEEPS_STATISTICS = Outcome("keep their statistics", "keeps its statistics")
NEVER_CALLED = Outcome("never called", "never called by forward")


def folded_back(*into: str) -> Outcome:
    """The outcome of a norm that goes into the layers before it, named by their paths."""
    return Outcome(FOLDED_BACK, f"folds into {', '.join(into)}")


def left_affine(reason: str) -> Outcome:
    """The outcome of a norm whose scale and shift stay in its place, and why."""
    return Outcome(LEFT_AFFINE, "keeps scale and shift", reason)


def stays(reason: str, with_what: str = "") -> Outcome:
    """The outcome of a norm that stays as it is, and why."""
    return Outcome("stay as they are", f"stays{with_what}", reason)


def counts(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """How many norms have which outcome, in the order in which each is first met."""
    return dict(Counter(outcome.counted for outcome in outcomes))


@dataclass
class LinearBuilder:
    """The absorptions of one linear layer, collected until its single edit is written."""

    reads: list[tuple[str, Absorption]] = field(default_factory=list)
    gain: float = 1.0
    in_gain: float = 1.0
    bake: bool = False
    layer: str = "Folded"
    extra: Body = field(default_factory=dict)

    def add(self, path: str, way: AbsorbMode, channels: tuple[int, int] | None = None) -> None:
        """Absorb the module at `path`, or a range of its channels."""
        self.reads.append((path, Absorption(way, channels)))

    def edit(self, path: str) -> Edit:
        # What comes before the convolution is absorbed first; among those after it, the nearest
        # first.
        reads = sorted(self.reads, key=lambda read: not read[1].way.precedes)
        args: Body = {
            name: value for name in ("gain", "in_gain") if (value := getattr(self, name)) != 1.0
        }
        if self.bake:
            args["bake"] = True
        takes = tuple(absorption for _, absorption in reads)
        return Edit(
            path, self.layer, {**args, **self.extra}, tuple(read for read, _ in reads), takes
        )


@dataclass
class PlanBuilder:
    """Edits in the making, and for every norm what happens to it (`outcomes`) or why nothing can
    (`refusals`).
    """

    anatomy: Anatomy
    linears: dict[str, LinearBuilder] = field(default_factory=dict)
    replacements: dict[str, Edit] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    # By path, what is chained after the replacement there.
    scalars: dict[str, Then] = field(default_factory=dict)

    @property
    def traced(self) -> Traced:
        return self.anatomy.traced

    def linear(self, path: str) -> LinearBuilder:
        return self.linears.setdefault(path, LinearBuilder())

    def replace(self, path: str, layer: str, **args: object) -> None:
        self.replacements[path] = Edit(path, layer, args)

    def remove(self, path: str) -> None:
        """Remove what stands at the path, but for the activation that its norm carried."""
        self.replace(path, Vacant.__name__)

    def removes(self, path: str) -> bool:
        """Whether this plan removes what stands at the path."""
        return path in self.replacements and self.replacements[path].layer == Vacant.__name__

    def is_removed(self, path: str, module: nn.Module | None) -> bool:
        """Whether nothing but an activation will stand at `path`, where `module` stands now."""
        if path in self.replacements:
            return self.removes(path)
        return isinstance(module, Vacant)

    def settle(self, path: str, outcome: Outcome) -> None:
        self.outcomes[path] = outcome

    @cached_property
    def axes(self) -> Axes:
        """The axis of channels of each value."""
        return channel_axes.find_axes(self.traced, self.is_identity)

    def edits(self) -> tuple[Edit, ...]:
        then = {path: (scalar,) for path, scalar in self.scalars.items()}
        # A layer that stays, with a follower, may absorb a norm: then the follower follows the
        # changed layer.
        followers = {
            path: edit
            for path, edit in self.replacements.items()
            if edit.keep and path in self.linears
        }
        then |= {path: (Then(edit.layer, edit.args),) for path, edit in followers.items()}
        replacements = (edit for path, edit in self.replacements.items() if path not in followers)
        edits = (*(linear.edit(path) for path, linear in self.linears.items()), *replacements)
        return tuple(replace(edit, then=(*edit.then, *then.get(edit.path, ()))) for edit in edits)

    def is_identity(self, node: fx.Node) -> bool:
        """Whether `node` passes its input on unchanged in eval mode, once the plan is carried out."""
        module = self.traced.module(node)
        if module is None:
            asleep = node.target is F.dropout and node.kwargs.get("training") is False
            return asleep or (node.op == "call_method" and node.target == "contiguous")
        if is_identity(module):
            return True
        return self.is_removed(str(node.target), module) and affine.activation(module) is None
