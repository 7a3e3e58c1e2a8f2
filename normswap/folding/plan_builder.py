"""A plan in the making: what a layer absorbs, which layers are placed, what each norm becomes."""

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
from normswap.layers.placeholders import Vacant
from normswap.plan import AbsorbMode, Absorption, Body, Edit, Outcome, Then
from normswap.sites.activations import is_identity

FOLDED_BACK = "folded into the layer before"
FOLDED_FORWARD = "folded into the layer after"
LEFT_SHIFT = "folded but for a shift"
LEFT_AFFINE = "left as a scale and shift"
KEEPS_STATISTICS = Outcome("keep their statistics", "keeps its statistics")
KEPT = Outcome("kept", "kept")
FROZEN_ALREADY = Outcome("frozen", "frozen already")
# The outcomes of norms that are what a scheme would place before it places anything.
ALREADY_THERE = frozenset({KEEPS_STATISTICS, KEPT, FROZEN_ALREADY})
NEVER_CALLED = Outcome("never called", "never called by forward")


def folded_back(*into: str) -> Outcome:
    """Return the `Outcome`, for the user, of a norm that folds into the layers before it.

    Args:
        into: The paths of these layers.
    """
    return Outcome(FOLDED_BACK, f"folds into {', '.join(into)}")


def folded_forward(*into: str) -> Outcome:
    """Return the outcome of a norm that folds into the layers after it.

    Args:
        into: The paths of these layers.
    """
    return Outcome(FOLDED_FORWARD, f"folds forward into {', '.join(into)}")


def scales_weight(*of: str) -> Outcome:
    """Return the outcome of a norm that becomes part of convolutions, whose weights it scales.

    Args:
        of: The paths of these convolutions.
    """
    return Outcome("scale a weight", f"scales the weight of {', '.join(of)}")


def left_affine(reason: str) -> Outcome:
    """Return the outcome of a norm that leaves a scale and shift in its place.

    Args:
        reason: Why no other layer can absorb the scale and shift.
    """
    return Outcome(LEFT_AFFINE, "keeps scale and shift", reason)


def stays(reason: str, with_what: str = "") -> Outcome:
    """Return the outcome of a norm that stays as it is.

    Args:
        reason: Why the norm cannot fold.
        with_what: A phrase to add to "stays", such as " with its scale and shift".
    """
    return Outcome("stay as they are", f"stays{with_what}", reason)


def counts(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Return how many norms have an outcome of each group, by the group's name.

    The groups are those of the summary that the user reads (`Outcome.counted`), in the order in
    which they are met.
    """
    return dict(Counter(outcome.counted for outcome in outcomes))


@dataclass
class LinearBuilder:
    """What one linear layer absorbs, collected until its single edit is written.

    Args:
        reads: The path of every layer beside it that it absorbs (a norm, scale or shift before or
            behind it, or a branch of the same sum), with how it is absorbed.
        gain: The factor by which the layer's output is multiplied.
        in_gain: The factor by which the layer's input is multiplied.
        bake: Whether a weight that each forward computes anew (weight norm and the like) becomes a
            plain parameter.
        layer: The name of the planned layer that the edit places.
        extra: Further arguments of the planned layer.
    """

    reads: list[tuple[str, Absorption]] = field(default_factory=list)
    gain: float = 1.0
    in_gain: float = 1.0
    bake: bool = False
    layer: str = "Folded"
    extra: Body = field(default_factory=dict)

    def add(self, path: str, way: AbsorbMode, channels: tuple[int, int] | None = None) -> None:
        """Plan that the linear layer absorbs a layer beside it, such as a norm.

        Args:
            path: The path of the layer that is absorbed.
            way: The formula of the new weights, such as W' = s W for a norm behind the layer.
            channels: The range of the absorbed layer's channels (from, up to). None means all.
        """
        self.reads.append((path, Absorption(way, channels)))

    def edit(self, path: str) -> Edit:
        """Return the edit that makes the layer at `path` absorb all that was added."""
        # What is before the layer is absorbed first, then what is behind it, the nearest first.
        reads = sorted(self.reads, key=lambda read: not read[1].way.precedes)

        args: Body = {}
        if self.gain != 1.0:
            args["gain"] = self.gain
        if self.in_gain != 1.0:
            args["in_gain"] = self.in_gain
        if self.bake:
            args["bake"] = True
        return Edit(
            path=path,
            layer=self.layer,
            args={**args, **self.extra},
            reads=tuple(neighbour for neighbour, _ in reads),
            takes=tuple(absorption for _, absorption in reads),
        )


@dataclass
class PlanBuilder:
    """A step of a plan while it is made: what a conversion will change, and what it cannot change.

    Args:
        anatomy: The network that the step changes.
        linears: What each linear layer absorbs, such as norms and factors, by the layer's path.
        replacements: The edits that place other layers, by path.
        outcomes: The outcome for each norm, by its path.
        refusals: Why a norm, or another module, cannot be converted, by its path.
        notes: Sentences that the user should read.
        scalars: The layers to place behind a layer that another edit leaves, such as the scalar of
            a residual branch, by that layer's path.
    """

    anatomy: Anatomy
    linears: dict[str, LinearBuilder] = field(default_factory=dict)
    replacements: dict[str, Edit] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    scalars: dict[str, tuple[Then, ...]] = field(default_factory=dict)

    @property
    def traced(self) -> Traced:
        return self.anatomy.traced

    def linear(self, path: str) -> LinearBuilder:
        """Return the builder of the linear layer at `path`, to which absorptions can be added."""
        return self.linears.setdefault(path, LinearBuilder())

    def replace(self, path: str, layer: str, **args: object) -> None:
        """Plan that another layer takes the place of the one at a path.

        Args:
            path: The path.
            layer: The name of the new layer's class, a `PlannedLayer`.
            args: Arguments of the `replacing` of that class.
        """
        self.replacements[path] = Edit(path, layer, args)

    def remove(self, path: str) -> None:
        """Plan that the module at `path` is removed. An activation that it applies stays."""
        self.replace(path, Vacant.__name__)

    def removes(self, path: str) -> bool:
        """Whether this plan removes the module at `path`. An activation that it applies stays."""
        return path in self.replacements and self.replacements[path].layer == Vacant.__name__

    def is_removed(self, path: str, module: nn.Module | None) -> bool:
        """Whether nothing but an activation will stand at `path`, where `module` stands now."""
        if path in self.replacements:
            return self.removes(path)
        return isinstance(module, Vacant)

    def settle(self, path: str, outcome: Outcome) -> None:
        """Record what becomes of the norm at `path`.

        Args:
            path: The path of the norm.
            outcome: The kind of the outcome, and its sentence.
        """
        self.outcomes[path] = outcome

    @cached_property
    def axes(self) -> Axes:
        """The dimension of the channels of each recorded value, by the value's node (`Axis`).

        Values whose channels could not be followed are left out.
        """
        return channel_axes.find_axes(self.traced, self.is_identity)

    def edits(self) -> tuple[Edit, ...]:
        """Return all edits: those of linear layers first, then the replacements.

        The layers that are chained behind a path are part of the edit at that path.
        """
        # The layers that are to be chained behind the one at each path.
        followers = dict(self.scalars)

        # A replacement that keeps the layer at its path only adds a layer behind it. If the kept
        # layer is linear and absorbs neighbours, both are written in one edit.
        replacements = []
        for path, edit in self.replacements.items():
            if edit.keep and path in self.linears:
                followers[path] = (Then(edit.layer, edit.args), *edit.then)
            else:
                replacements.append(edit)

        linears = [linear.edit(path) for path, linear in self.linears.items()]
        return tuple(
            replace(edit, then=(*edit.then, *followers.get(edit.path, ())))
            for edit in (*linears, *replacements)
        )

    def is_identity(self, node: fx.Node) -> bool:
        """Whether `node` will return its input in eval mode, in the network that the plan makes."""
        site = self.traced.site_at(node)
        if site is None:
            is_idle_dropout = node.target is F.dropout and node.kwargs.get("training") is False
            return is_idle_dropout or (node.op == "call_method" and node.target == "contiguous")
        if is_identity(site.module):
            return True
        return self.is_removed(str(node.target), site.module) and site.activation is None
