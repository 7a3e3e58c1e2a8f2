"""Which linear layers make what a norm reads, so that they can absorb it: W' = s W, b' = s b + t.

Between them and the norm there may be whatever is the identity in eval mode, what treats all channels alike (reshapes,
average pooling; `channel_axes` says where the channels are), and a concatenation of convolutions, each of which gets
its part.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx, nn

from normswap.folding.plan_builder import PlanBuilder
from normswap.folding.propagation import NotFoldable, check_linear, name
from normswap.graph import channel_axes
from normswap.graph.node_reader import LINEAR
from normswap.graph.tracing import inputs, listed
from normswap.layers import affine

Part = tuple[int, int] | None  # of the norm's channels: from, up to; None: all


def producers(builder: PlanBuilder, module: nn.Module) -> dict[str, Part]:
    """Paths of the linear layers whose outputs go through this norm alone, each with its part of the channels.

    Raises:
        NotFoldable: there are none, or they also make something else.
    """
    traced = builder.anatomy.traced
    parts: dict[fx.Node, Part] = {}
    for call in traced.calls[id(module)]:
        for node, part in _above(builder, module, call):
            if parts.setdefault(node, part) != part:
                raise NotFoldable(f"{node.target} is several parts of its input")
    ways: dict[int, tuple[str, Part]] = {}
    for node, part in parts.items():
        linear = traced.module(node)
        assert linear is not None
        check_linear(builder, str(node.target), linear)
        if any(call not in parts for call in traced.calls[id(linear)]):
            raise NotFoldable(f"{node.target} is called elsewhere too, without this norm")
        if ways.setdefault(id(linear), (str(node.target), part))[1] != part:
            raise NotFoldable(f"{node.target} is several parts of its input")
    return dict(ways.values())


def _above(builder: PlanBuilder, module: nn.Module, call: fx.Node) -> Iterator[tuple[fx.Node, Part]]:
    traced, channels = builder.anatomy.traced, affine.channels(module)
    (value,) = above = inputs(call)
    stepped = False
    while True:
        if len(above) != 1:
            raise NotFoldable("it has no convolution before it")
        node = above[0]
        if isinstance(traced.module(node), LINEAR):
            break
        if channels > 1 and node.target is torch.cat and not stepped:
            yield from _parts(builder, node, channels)
            return
        stepping = channels > 1 and channel_axes.is_step(traced, node) and len(inputs(node)) == 1
        if not builder.is_identity(node) and not stepping:
            raise NotFoldable(f"it follows {name(node)}, not a convolution")
        stepped |= stepping and not builder.is_identity(node)
        _only_user(builder, node)
        above = inputs(node)
    _only_user(builder, node)
    if channels > 1 and (stepped or isinstance(traced.module(node), nn.Linear)):
        _prove(builder, value, node)
    yield node, None


def _only_user(builder: PlanBuilder, node: fx.Node) -> None:
    if len(builder.anatomy.traced.users[node]) > 1:
        raise NotFoldable(f"{node.target} has another consumer")


def _prove(builder: PlanBuilder, value: fx.Node, node: fx.Node) -> None:
    """See that the norm's channels are the outputs of the linear layer that `node` calls, whatever was done to them."""
    axis = builder.axes().get(value)
    if axis is None or axis.dim != 1:
        kind = type(builder.anatomy.traced.module(node)).__name__
        raise NotFoldable(f"the outputs of {node.target} ({kind}) may not be its channels")
    if not axis.pure:
        raise NotFoldable(f"zeros are padded after {node.target}")


def _parts(builder: PlanBuilder, cat: fx.Node, channels: int) -> Iterator[tuple[fx.Node, Part]]:
    """The convolutions whose maps are joined, with the part of the channels that each of them is."""
    traced = builder.anatomy.traced
    dim = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
    joined = listed(cat)
    _only_user(builder, cat)
    if dim != 1 or len(joined) != len(inputs(cat)):
        raise NotFoldable("it follows cat, not a convolution")
    start = 0
    for node in joined:
        conv = traced.module(node)
        if not isinstance(conv, nn.modules.conv._ConvNd):
            raise NotFoldable(f"it follows cat, of {name(node)} among others, not of convolutions")
        _only_user(builder, node)
        yield node, (start, start + conv.out_channels)
        start += conv.out_channels
    if start != channels:
        raise NotFoldable("it follows cat, not a convolution")
