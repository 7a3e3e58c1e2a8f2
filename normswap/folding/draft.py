"""The draft that every rule writes to: what each layer takes in, what sits where, and what became of each norm."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch.nn.functional as F
from torch import fx, nn

from normswap.graph import channel_axes
from normswap.graph.anatomy import Anatomy
from normswap.graph.channel_axes import Axes
from normswap.layers import affine
from normswap.layers.activations import SILENT
from normswap.layers.placeholders import Vacant
from normswap.plan import Body, Edit, Outcome, Take, Then, Way


@dataclass
class Intake:
    """What one linear layer takes in, collected until its single edit is written."""

    reads: list[tuple[str, Take]] = field(default_factory=list)
    gain: float = 1.0
    in_gain: float = 1.0
    bake: bool = False
    layer: str = "Folded"
    extra: Body = field(default_factory=dict)

    def add(self, path: str, way: Way, part: tuple[int, int] | None = None) -> None:
        """Take in the module at `path`, or, of its channels, those of a part."""
        self.reads.append((path, Take(way, part)))

    def edit(self, path: str) -> Edit:
        # what comes before the convolution is taken in first; among those after it, the nearest first
        reads = sorted(self.reads, key=lambda read: not read[1].way.precedes)
        args = {name: value for name in ("gain", "in_gain") if (value := getattr(self, name)) != 1.0}
        args |= {"bake": True} if self.bake else {}
        takes = tuple(take for _, take in reads)
        return Edit(path, self.layer, {**args, **self.extra}, tuple(read for read, _ in reads), takes)


@dataclass
class Draft:
    """Edits in the making, and for every site what happens to it (`outcomes`) or why nothing can (`refusals`)."""

    anatomy: Anatomy
    takes: dict[str, Intake] = field(default_factory=dict)
    seats: dict[str, Edit] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    scalars: dict[str, Then] = field(default_factory=dict)  # to chain after the newcomer at a path
    _axes: Axes | None = field(default=None, repr=False)

    def take(self, path: str) -> Intake:
        return self.takes.setdefault(path, Intake())

    def seat(self, path: str, layer: str, **args: object) -> None:
        self.seats[path] = Edit(path, layer, args)

    def vacate(self, path: str) -> None:
        """Leave the seat empty, but for the activation that its norm carried."""
        self.seat(path, Vacant.__name__)

    def vacated(self, path: str) -> bool:
        """Whether the draft leaves the seat empty."""
        return path in self.seats and self.seats[path].layer == Vacant.__name__

    def empty(self, path: str, module: nn.Module | None) -> bool:
        """Whether nothing but an activation will sit at `path`, where `module` sits now."""
        return self.vacated(path) if path in self.seats else isinstance(module, Vacant)

    def settle(self, path: str, outcome: Outcome) -> None:
        """Say what becomes of the norm at `path`."""
        self.outcomes[path] = outcome

    def axes(self) -> Axes:
        """Where the channels are in each value, found once, when it is first needed."""
        if self._axes is None:
            self._axes = channel_axes.read(self.anatomy.traced, self.silent)
        return self._axes

    def edits(self) -> tuple[Edit, ...]:
        edits = (*(take.edit(path) for path, take in self.takes.items()), *self.seats.values())
        then = {path: (scalar,) for path, scalar in self.scalars.items()}
        return tuple(replace(edit, then=(*edit.then, *then.get(edit.path, ()))) for edit in edits)

    def silent(self, node: fx.Node) -> bool:
        """Whether `node` passes its input on unchanged in eval mode, once the draft is carried out."""
        module = self.anatomy.traced.module(node)
        if module is None:
            asleep = node.target is F.dropout and node.kwargs.get("training") is False
            return asleep or (node.op == "call_method" and node.target == "contiguous")
        if isinstance(module, SILENT):
            return True
        path = str(node.target)
        return self.empty(path, module) and affine.activation(module) is None
