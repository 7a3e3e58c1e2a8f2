"""Rescaling channel by channel: which channels of a folded network must share one positive factor,
and which are free.

A channel that a convolution or linear layer writes may be multiplied by a factor if its readers
divide by it (Nagel et al. 2019, arXiv:1906.04721, section 4.1, equations 5 to 7). Channels are
followed through the graph: homogeneous functions, pooling and identities pass them on; the two arms
of a sum share factors; a concatenation joins channels; a gate x g(x) passes on those of x. The
factor of channels that anything else reads is 1. A convolution's inputs and outputs have separate
factors, a depthwise one's, too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from normswap.folding.plan_builder import PlanBuilder
from normswap.folding.propagation import NotFoldable, check_linear, propagates_scale
from normswap.graph.tracing import argument, inputs, is_add, is_constant_mul, is_mul, listed
from normswap.layers import standardized
from normswap.layers.activations import is_homogeneous, keeps_forward
from normswap.layers.channelwise import ChannelAffine, ChannelBias
from normswap.layers.planned_layer import Linearity, scales_branch
from normswap.layers.reparametrized import CONVOLUTIONS

_POOLS = (F.avg_pool2d, F.max_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d, F.interpolate)
_FLAT = (torch.flatten, torch.reshape, "flatten", "reshape", "view")
# The group of all channels whose factor is 1.
FIXED = 0


@dataclass(frozen=True)
class Reach:
    """A layer whose weights depend on the factors, with the group of each channel that it writes
    and reads.
    """

    path: str
    writes: Tensor
    reads: Tensor


class Channels:
    """The groups of channels of a folded network.

    Attributes:
        layers: those whose weights depend on factors; shifts: those that pass channels on, and
            whose biases do.
        count: the number of groups; group 0 has the channels that cannot be scaled.
    """

    def __init__(self, builder: PlanBuilder) -> None:
        self.builder = builder
        self.traced = builder.traced
        self.parent = [FIXED]
        self.of: dict[fx.Node, list[int]] = {}
        visited = [
            (node, reads) for node in self.traced.nodes if (reads := self._visit(node)) is not None
        ]
        roots = torch.tensor([self._root(i) for i in range(len(self.parent))])
        distinct_roots, groups = roots.unique(return_inverse=True)
        self.count = len(distinct_roots)
        self.layers: list[Reach] = []
        self.shifts: list[Reach] = []
        for node, reads in visited:
            reach = Reach(
                str(node.target), groups[torch.tensor(self.of[node])], groups[torch.tensor(reads)]
            )
            if _shifts(self.traced.module(node)):
                self.shifts.append(reach)
            else:
                self.layers.append(reach)

    def _visit(self, node: fx.Node) -> list[int] | None:
        """Follow the channels through a node; returns those it reads, where its parameters depend
        on their factors.
        """
        sources = inputs(node)
        arms = [self.of.get(source) for source in sources]
        module = self.traced.module(node)
        if isinstance(module, (*CONVOLUTIONS, nn.Linear)) and self._usable(node, module):
            width: int = module.weight.shape[1] * getattr(module, "groups", 1)
            reads = self.of.get(sources[0])
            if reads is None or len(reads) != width:
                self._fix(arms)
                reads = [FIXED] * width
            first = len(self.parent)
            self.of[node] = [*range(first, first + len(module.weight))]
            self.parent += self.of[node]
            return reads
        passed = self._passed(node, sources, arms)
        if passed is None:
            self._fix(arms)
            return None
        self.of[node] = passed
        return passed if _shifts(module) else None

    def _passed(
        self, node: fx.Node, sources: list[fx.Node], arms: list[list[int] | None]
    ) -> list[int] | None:
        """The channels of the node's value, if it passes factors on."""
        if not any(arms):
            return None
        if (
            node.target is torch.cat
            and all(arms)
            and argument(node, 1, "dim", "axis", default=0) == 1
        ):
            return [channel for source in listed(node) for channel in self.of[source]]
        if len(sources) == 1:
            return self._alone(node, sources[0], arms[0] or [])
        shape = node.meta["shape"]
        if is_add(node) and all(arms) and all(source.meta["shape"] == shape for source in sources):
            first, second = (channels or [] for channels in arms)
            for a, b in zip(first, second, strict=True):
                self._join(a, b)
            return first
        if is_mul(node):
            main = self.traced.main_input(node)
            if main is not None and main.meta["shape"] == shape:
                self._fix(
                    [
                        channels
                        for source, channels in zip(sources, arms, strict=True)
                        if source is not main
                    ]
                )
                return self.of.get(main)
        return None

    def _alone(self, node: fx.Node, source: fx.Node, channels: list[int]) -> list[int] | None:
        module: Any = self.traced.module(node)
        before = source.meta["shape"]
        after = node.meta["shape"]
        if not isinstance(after, torch.Size) or not isinstance(before, torch.Size):
            return None
        if _shifts(module):
            if (
                not self.builder.anatomy.takes_part(str(node.target))
                or self.traced.called(module) > 1
            ):
                return None
            return channels
        scaled = keeps_forward(module, (nn.Upsample,)) or (
            scales_branch(module) and module.bias is None
        )
        if (
            self.builder.is_identity(node)
            or is_constant_mul(node)
            or scaled
            or node.target in _POOLS
        ):
            return channels
        if keeps_forward(module, (nn.Flatten,)) or node.target in _FLAT:
            whole = (
                len(before) > 1
                and after == (before[0], math.prod(before[1:]))
                and before[1] == len(channels)
            )
            return (
                [channel for channel in channels for _ in range(math.prod(before[2:]))]
                if whole
                else None
            )
        if node.target in (torch.mean, "mean", torch.amax, "amax"):
            dims = argument(node, 1, "dim", "axis")
            if not isinstance(dims, list | tuple):
                dims = [dims]
            over = {dim % len(before) for dim in dims if isinstance(dim, int)} or {0}
            return channels if over and min(over) > 1 else None
        return channels if propagates_scale(self.builder, node) else None

    def _usable(self, node: fx.Node, module: nn.Module) -> bool:
        if self.traced.called(module) > 1 or (
            isinstance(module, nn.Linear) and len(node.meta["shape"]) != 2
        ):
            # Channels that are not the second dimension are not followed.
            return False
        if not self.builder.anatomy.takes_part(str(node.target)):
            return False
        try:
            check_linear(self.builder, str(node.target), module)
        except NotFoldable:
            return False
        return True

    def _fix(self, arms: Sequence[list[int] | None]) -> None:
        for channels in arms:
            for channel in channels or ():
                self._join(channel, FIXED)

    def _join(self, a: int, b: int) -> None:
        a = self._root(a)
        b = self._root(b)
        self.parent[max(a, b)] = min(a, b)

    def _root(self, channel: int) -> int:
        while self.parent[channel] != channel:
            self.parent[channel] = self.parent[self.parent[channel]]
            channel = self.parent[channel]
        return channel


def _shifts(module: nn.Module | None) -> bool:
    """Whether a layer passes channels on, and its bias (C,) depends on their factors."""
    return isinstance(module, ChannelAffine | ChannelBias) and is_homogeneous(module.act)


@torch.no_grad()
def scale(model: nn.Module, channels: Channels, factors: Tensor) -> None:
    """Multiply each channel, in place, by its group's factor; of `factors` (groups,) the first is
    1. Exact.
    """
    factors = factors.to(next(model.parameters()).device, torch.float64)
    for layer in channels.layers:
        module = cast(Linearity, model.get_submodule(layer.path))
        weight = standardized.computed(module)
        groups = getattr(module, "groups", 1)
        out = factors[layer.writes]
        incoming = (
            (1 / factors[layer.reads])
            .view(groups, 1, -1)
            .expand(-1, len(out) // groups, -1)
            .flatten(0, 1)
        )
        wide = weight.double() * out.view(-1, *[1] * (weight.ndim - 1))
        standardized.compute(
            module, wide * incoming.view(*incoming.shape, *[1] * (weight.ndim - 2))
        )
        if module.bias is not None:
            module.bias.copy_(module.bias.double() * out)
    for layer in channels.shifts:
        bias = model.get_submodule(layer.path).get_parameter("bias")
        bias.copy_(bias.double() * factors[layer.writes])
