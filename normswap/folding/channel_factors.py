"""Rescaling channel by channel: which channels must share one positive factor, and which are free.

A channel that a convolution or linear layer writes may be multiplied by a factor if its readers
divide by it (Nagel et al. 2019, arXiv:1906.04721, section 4.1, equations 5 to 7). Channels are
followed through the graph of a folded network:

- Homogeneous functions, pooling and identities pass channels on.
- The two arms of a sum share factors.
- A concatenation joins channels.
- A gate x g(x) passes on the channels of x.
- Channels that anything else reads have the factor 1.

The inputs and outputs of a convolution have separate factors, even in a depthwise convolution.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from normswap.folding.plan_builder import PlanBuilder
from normswap.folding.propagation import NotFoldable, check_linear, propagates_scale
from normswap.graph.tracing import argument, inputs, is_add, is_constant_mul, is_mul, listed
from normswap.layers import standardized
from normswap.layers.channelwise import ChannelAffine, ChannelBias
from normswap.layers.planned_layer import Linearity, scales_branch
from normswap.sites.activations import is_homogeneous, keeps_forward
from normswap.sites.own_forwards import CONVOLUTIONS

_POOLS = (F.avg_pool2d, F.max_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d, F.interpolate)
_REDUCTIONS = (torch.mean, "mean", torch.amax, "amax")
_FLAT = (torch.flatten, torch.reshape, "flatten", "reshape", "view")
# The group of all channels whose factor is 1.
FIXED = 0


@dataclass(frozen=True)
class Reach:
    """A layer whose parameters change when the channels around it are multiplied by factors.

    Channels that must have the same factor form a group. The groups are numbered.

    Args:
        path: The path of the layer.
        writes: The number of the group of each output channel, (C_out,).
        reads: The number of the group of each input channel, (C_in,).
    """

    path: str
    writes: Tensor
    reads: Tensor


class Channels:
    """The groups of channels of a folded network: the channels of a group must share one factor.

    The channels can be multiplied by any factors, if weights and biases are changed with them
    (`scale`). The network then computes what it did.

    Attributes:
        layers: The convolutions and linear layers, whose weights change with the factors.
        shifts: The layers of the classes `ChannelAffine` and `ChannelBias` that hand channels on.
            Their biases change with the factors.
        count: The number of groups. Group 0 has the channels that cannot be scaled.
    """

    def __init__(self, builder: PlanBuilder) -> None:
        self.builder = builder
        self.traced = builder.traced

        # Channels are numbered, and groups are trees (union-find): a channel's parent is another
        # channel of its group, or the channel itself at the root.
        self._parents = [FIXED]
        self._channels_of: dict[fx.Node, list[int]] = {}
        reads_of: dict[fx.Node, list[int]] = {}
        for node in self.traced.nodes:
            reads = self._visit(node)
            if reads is not None:
                reads_of[node] = reads

        # The root of a tree stands for the group; `FIXED` is the smallest number, so it is group 0.
        roots = torch.tensor([self._root(channel) for channel in range(len(self._parents))])
        distinct_roots, group_of = roots.unique(return_inverse=True)
        self.count = len(distinct_roots)

        self.layers: list[Reach] = []
        self.shifts: list[Reach] = []
        for node, reads in reads_of.items():
            reach = Reach(
                path=str(node.target),
                writes=group_of[torch.tensor(self._channels_of[node])],
                reads=group_of[torch.tensor(reads)],
            )
            if _shifts(self.traced.module(node)):
                self.shifts.append(reach)
            else:
                self.layers.append(reach)

    def _visit(self, node: fx.Node) -> list[int] | None:
        """Note which channels the node's value has, each as a number that is unique in the network.

        Each channel is to be multiplied by a factor that is not known yet.

        Returns:
            The channels that the node reads, if it calls a layer whose weight or bias must change
            with their factors. None for any other node.
        """
        sources = inputs(node)
        channels_read = [self._channels_of.get(source) for source in sources]
        module = self.traced.module(node)

        # A linear layer ends the channels that it reads and begins new ones.
        if isinstance(module, (*CONVOLUTIONS, nn.Linear)) and self._is_usable(node, module):
            return self._visit_linear(node, module, channels_read)

        # If the node passes no factors on, the channels that it reads keep the factor 1.
        passed = self._passed(node, sources, channels_read)
        if passed is None:
            self._fix(channels_read)
            return None
        # A layer that adds a bias per channel passes on the channels that it reads. Their factors
        # multiply its bias.
        self._channels_of[node] = passed
        return passed if _shifts(module) else None

    def _visit_linear(
        self, node: fx.Node, linear: nn.Module, channels_read: list[list[int] | None]
    ) -> list[int]:
        """Begin a new channel for each output of a linear layer.

        Args:
            node: The node that calls the layer.
            linear: The layer.
            channels_read: The channels of each value that the node reads, or None if they are not
                known.

        Returns:
            The channel of each of the layer's inputs, (C_in,).
        """
        weight = cast(Tensor, linear.weight)
        width: int = weight.shape[1] * getattr(linear, "groups", 1)
        reads = channels_read[0]
        # Inputs that are not followed, or not one by one, keep the factor 1.
        if reads is None or len(reads) != width:
            self._fix(channels_read)
            reads = [FIXED] * width

        # The outputs are new channels, each in a group of its own: its parent is itself.
        first = len(self._parents)
        written = [*range(first, first + len(weight))]
        self._channels_of[node] = written
        self._parents += written
        return reads

    def _passed(
        self, node: fx.Node, sources: list[fx.Node], read: list[list[int] | None]
    ) -> list[int] | None:
        """Return the channels of the node's value, or None if no factor passes the node.

        Each channel is to be multiplied by a factor that is not known yet. A channel is given by a
        number that no other channel of the network has.

        Args:
            node: A node that calls no linear layer.
            sources: The nodes that the node reads, each once.
            read: The channels of each of `sources`, or None if they are not known.
        """
        if not any(read):
            return None

        # A concatenation along the channels has the channels of its list, which may name a source
        # more than once.
        if (
            node.target is torch.cat
            and all(read)
            and argument(node, 1, "dim", "axis", default=0) == 1
        ):
            joined: list[int] = []
            for source in listed(node):
                joined += self._channels_of[source]
            return joined
        if len(sources) == 1:
            return self._passed_alone(node, sources[0], read[0] or [])

        # A sum: channels at the same position must share a factor.
        shape = node.meta["shape"]
        if is_add(node) and all(read) and all(source.meta["shape"] == shape for source in sources):
            # Neither list is None here, since all of them are known.
            first, second = (channels or [] for channels in read)
            for first_channel, second_channel in zip(first, second, strict=True):
                self._join(first_channel, second_channel)
            return first
        if is_mul(node):
            # A gate x g(x) passes the factors of x, its main input, on. The channels of g(x) get
            # the factor 1, since the product would otherwise be multiplied by their factors, too.
            main = self.traced.main_input(node)
            if main is not None and main.meta["shape"] == shape:
                pairs = zip(sources, read, strict=True)
                self._fix([channels for source, channels in pairs if source is not main])
                return self._channels_of.get(main)
        return None

    def _passed_alone(
        self, node: fx.Node, source: fx.Node, channels: list[int]
    ) -> list[int] | None:
        """Return what `_passed` returns, for a node with one input.

        Args:
            node: The node.
            source: The only node that it reads.
            channels: The numbers of the channels of `source`.
        """
        # A tuple of tensors is not followed.
        before = source.meta["shape"]
        after = node.meta["shape"]
        if not isinstance(after, torch.Size) or not isinstance(before, torch.Size):
            return None

        # A layer that adds a bias per channel passes its channels on, and its bias is multiplied by
        # their factors. Another call could ask for other factors, so the layer may have one only.
        module = self.traced.module(node)
        if module is not None and _shifts(module):
            may_change = self.builder.anatomy.takes_part(str(node.target))
            is_called_once = self.traced.called(module) <= 1
            return channels if may_change and is_called_once else None
        if self._is_homogeneous(node, module):
            return channels
        if node.target in _FLAT or keeps_forward(module, (nn.Flatten,)):
            return _flattened(channels, before, after)
        if node.target in _REDUCTIONS:
            dims = argument(node, 1, "dim", "axis")
            if not isinstance(dims, list | tuple):
                dims = [dims]
            # A negative dimension is counted from the end. Without a dimension all are reduced,
            # from 0 on. The channels are in dimension 1, so only a reduction of later dimensions
            # passes them on.
            reduced = {dim % len(before) for dim in dims if isinstance(dim, int)} or {0}
            return channels if min(reduced) > 1 else None
        return channels if propagates_scale(self.builder, node) else None

    def _is_homogeneous(self, node: fx.Node, module: nn.Module | None) -> bool:
        """Whether positive factors of the channels pass `node`, as f(c x) = c f(x).

        This holds for an identity, a product with a number, a pooling or a resizing of maps.
        """
        if self.builder.is_identity(node) or is_constant_mul(node) or node.target in _POOLS:
            return True
        if keeps_forward(module, (nn.Upsample,)):
            return True
        return scales_branch(module) and module.bias is None

    def _is_usable(self, node: fx.Node, module: nn.Module) -> bool:
        """Whether the weights of a linear layer may be multiplied by factors of its channels."""
        if self.traced.called(module) > 1:
            return False
        if isinstance(module, nn.Linear) and len(node.meta["shape"]) != 2:
            # Channels are followed only in dimension 1, where a Linear has its outputs for (N, C).
            return False
        if not self.builder.anatomy.takes_part(str(node.target)):
            return False
        try:
            check_linear(self.builder, str(node.target), module)
        except NotFoldable:
            return False
        return True

    def _fix(self, channels_of_values: Sequence[list[int] | None]) -> None:
        """Give all channels of several values the factor 1.

        Args:
            channels_of_values: The channels of each of several values. None stands for a value
                whose channels are not known.
        """
        for channels in channels_of_values:
            for channel in channels or ():
                self._join(channel, FIXED)

    def _join(self, channel: int, other: int) -> None:
        """Let two channels, and with them all channels of their groups, share one factor."""
        # The smaller root stays, so that `FIXED`, the smallest number, is the root of its group.
        root = self._root(channel)
        other_root = self._root(other)
        self._parents[max(root, other_root)] = min(root, other_root)

    def _root(self, channel: int) -> int:
        """Return the channel that stands for the group of `channel`.

        A group has the channels that share a factor, and is a tree, whose root stands for it. The
        path to the root is shortened (union-find with path halving).
        """
        while self._parents[channel] != channel:
            self._parents[channel] = self._parents[self._parents[channel]]
            channel = self._parents[channel]
        return channel


def _flattened(channels: list[int], before: torch.Size, after: torch.Size) -> list[int] | None:
    """Return every feature's channel number after (N, C, ...) is flattened to (N, features).

    Args:
        channels: The number of each of the C channels before the step.
        before: The shape before the step.
        after: The shape after the step. For any shape but (N, features) the result is None.
    """
    if len(before) < 2 or before[1] != len(channels):
        return None
    if after != (before[0], math.prod(before[1:])):
        return None

    features: list[int] = []
    for channel in channels:
        features += [channel] * math.prod(before[2:])
    return features


def _shifts(module: nn.Module | None) -> bool:
    """Whether a layer adds a bias per channel, and factors of the channels can pass the layer.

    The bias must be multiplied by the factors, too.
    """
    return isinstance(module, ChannelAffine | ChannelBias) and is_homogeneous(module.act)


@torch.no_grad()
def scale(model: nn.Module, channels: Channels, factors: Tensor) -> None:
    """Multiply each channel of a network by its group's factor f, and keep the network's function.

    Weights and biases are changed in place:
    W'[o, i] = f[o] W[o, i] / f[i], b'[o] = f[o] b[o].

    Args:
        model: The folded network.
        channels: The groups of channels of the network.
        factors: One positive factor for each group (groups,). The first factor is 1.
    """
    factors = factors.to(next(nn.Module.parameters(model)).device, torch.float64)
    for layer in channels.layers:
        module = cast(Linearity, model.get_submodule(layer.path))
        weight = standardized.effective_weight(module).double()
        out_factors = factors[layer.writes]

        # In a grouped convolution, each group of filters reads its own share of the input channels,
        # so the factors of a share are repeated for the filters of its group.
        filter_groups = getattr(module, "groups", 1)
        in_factors = (1 / factors[layer.reads]).view(filter_groups, 1, -1)
        in_factors = in_factors.expand(-1, len(out_factors) // filter_groups, -1).flatten(0, 1)

        kernel_ones = [1] * (weight.ndim - 2)
        weight = weight * out_factors.view(-1, 1, *kernel_ones)
        standardized.set_effective_weight(
            module, weight * in_factors.view(*in_factors.shape, *kernel_ones)
        )
        if module.bias is not None:
            module.bias.copy_(module.bias.double() * out_factors)

    # A layer act(s x + t) hands its channels on. Only its shift t changes with their factors.
    for layer in channels.shifts:
        bias = model.get_submodule(layer.path).get_parameter("bias")
        bias.copy_(bias.double() * factors[layer.writes])
