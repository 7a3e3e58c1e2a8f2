"""Which linear layers make what a norm reads, so that they can take it in: W' = s W, b' = s b + t.

Between them and the norm there may be whatever is silent in eval mode, what treats all channels alike (reshapes,
average pooling; `channel_axes` says where the channels are), and a concatenation of convolutions, each of which gets
its part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from normswap.folding.draft import Draft
from normswap.folding.passage import Blocked, check_linear, is_flat, name
from normswap.graph import channel_axes
from normswap.graph.inspection import LINEAR
from normswap.graph.tracing import inputs
from normswap.layers import affine

Part = tuple[int, int] | None  # of the norm's channels: from, up to; None: all


def makers(draft: Draft, module: nn.Module) -> dict[str, Part]:
    """Paths of the linear layers whose outputs go through this norm and nowhere else, with the part of its channels
    that each of them makes (`layers.Folded`).

    Raises:
        Blocked: there are none, or they also make something else.
    """
    traced = draft.anatomy.traced
    found: dict[fx.Node, Part] = {}
    for call in traced.calls[id(module)]:
        for node, part in _above(draft, module, call):
            if found.setdefault(node, part) != part:
                raise Blocked(f"{node.target} is several parts of its input")
    ways: dict[int, tuple[str, Part]] = {}
    for node, part in found.items():
        linear = traced.module(node)
        assert linear is not None
        check_linear(draft, str(node.target), linear)
        if any(call not in found for call in traced.calls[id(linear)]):
            raise Blocked(f"{node.target} is called elsewhere too, without this norm")
        if ways.setdefault(id(linear), (str(node.target), part))[1] != part:
            raise Blocked(f"{node.target} is several parts of its input")
    return dict(ways.values())


def _above(draft: Draft, module: nn.Module, call: fx.Node) -> Iterator[tuple[fx.Node, Part]]:
    traced, channels = draft.anatomy.traced, affine.channels(module)
    (value,) = above = inputs(call)
    stepped = False
    while True:
        if len(above) != 1:
            raise Blocked("it has no convolution before it")
        node = above[0]
        if isinstance(traced.module(node), LINEAR):
            break
        if channels > 1 and node.target is torch.cat and not stepped:
            yield from _parts(draft, node, channels)
            return
        stepping = channels > 1 and channel_axes.is_step(traced, node) and len(inputs(node)) == 1
        if not draft.silent(node) and not stepping:
            raise Blocked(f"it follows {name(node)}, not a convolution")
        stepped |= stepping and not draft.silent(node)
        _only_user(draft, node)
        above = inputs(node)
    _only_user(draft, node)
    linear = isinstance(traced.module(node), nn.Linear) and not is_flat(draft, node)
    if channels > 1 and (stepped or linear):
        _prove(draft, value, node)
    yield node, None


def _only_user(draft: Draft, node: fx.Node) -> None:
    if len(draft.anatomy.traced.users[node]) > 1:
        raise Blocked(f"{node.target} has another consumer")


def _prove(draft: Draft, value: fx.Node, node: fx.Node) -> None:
    """See that the norm's channels are the outputs of the linear layer that `node` calls, whatever was done to them."""
    seen = draft.axes()
    axis = seen.get(value)
    if axis is None or axis.dim != 1:
        kind = type(draft.anatomy.traced.module(node)).__name__
        why = f": {seen.why}" if seen.why else ""
        raise Blocked(f"the outputs of {node.target} ({kind}) may not be its channels{why}")
    if not axis.pure:
        raise Blocked(f"zeros are padded after {node.target}")


def _parts(draft: Draft, cat: fx.Node, channels: int) -> Iterator[tuple[fx.Node, Part]]:
    """The convolutions whose maps are joined, with the part of the channels that each of them is."""
    traced = draft.anatomy.traced
    dim = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
    joined: Any = cat.args[0] if cat.args else cat.kwargs.get("tensors")
    _only_user(draft, cat)
    if dim != 1 or len(joined) != len(inputs(cat)):
        raise Blocked("it follows cat, not a convolution")
    start = 0
    for node in joined:
        conv = traced.module(node)
        if not isinstance(conv, nn.modules.conv._ConvNd):
            raise Blocked(f"it follows cat, of {name(node)} among others, not of convolutions")
        _only_user(draft, node)
        yield node, (start, start + conv.out_channels)
        start += conv.out_channels
    if start != channels:
        raise Blocked("it follows cat, not a convolution")
