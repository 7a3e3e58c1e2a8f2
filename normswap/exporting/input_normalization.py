"""`--normalize`: the network eats pixels in 0..1; mean and std go into its first convolution, as far as that is exact.

Normalized, x = (p - m) / s. W / s takes the division in. The subtraction is W m / s off the bias, but only where the
convolution pads nothing: its padding is 0 in x, which is m in p. A first convolution that pads, as nearly all do, hence
keeps one subtraction of m before it, on three channels, after which 0 is right again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from normswap.errors import TraceError
from normswap.folding.draft import Draft
from normswap.folding.passage import Blocked, check_linear, pads
from normswap.graph.inspection import Anatomy
from normswap.layers.channelwise import ChannelAffine
from normswap.layers.folded import Folded
from normswap.plan import Take, Way


@dataclass(frozen=True)
class Before:
    """What is left to do with pixels before the network: scale * p + shift, (C, 1, 1) each, None for nothing.

    Args:
        note: where mean and std went.
    """

    scale: Tensor | None
    shift: Tensor | None
    note: str


def bake(network: nn.Module, anatomy: Callable[[], Anatomy], mean: Tensor, std: Tensor) -> Before:
    """Let `network`, in place, do what it can of (p - mean) / std itself.

    Args:
        network: a folded network; anatomy: its own, or that of one that it is a copy of; mean, std: (C, 1, 1).
    """
    try:
        paths = _first(anatomy())
    except (TraceError, Blocked) as why:
        reason = why.why if isinstance(why, TraceError) else str(why)
        return Before(1 / std, -mean / std, f"mean and std stand before the network: {reason}")
    padded = any(pads(network.get_submodule(path)) for path in paths)
    shift = torch.zeros_like(mean) if padded else -mean / std
    norm = ChannelAffine((1 / std).flatten().double(), shift.flatten().double())
    for path in paths:
        conv: Any = network.get_submodule(path)
        network.set_submodule(path, Folded.replacing(conv, norm, like=conv.weight, takes=[Take(Way.BEFORE)]))
    names = ", ".join(paths)
    if padded:
        return Before(None, -mean, f"std is in {names}, which pads its input; the mean is subtracted before it")
    return Before(None, None, f"mean and std are in {names}")


def _first(anatomy: Anatomy) -> list[str]:
    """The convolutions that read the input, when nothing else does."""
    draft, traced = Draft(anatomy), anatomy.traced
    readers = list(traced.users[next(node for node in traced.nodes if node.op == "placeholder")])
    found: list[fx.Node] = []
    for node in readers:
        if draft.silent(node):
            readers += traced.users[node]
        else:
            found.append(node)
    for node in found:
        conv = traced.module(node)
        if not isinstance(conv, nn.Conv2d):
            raise Blocked("its input feeds something else than convolutions")
        check_linear(draft, str(node.target), conv)
        if any(call not in found for call in traced.calls[id(conv)]):
            raise Blocked(f"{node.target} is called elsewhere too")
    if not found:
        raise Blocked("nothing reads its input")
    return list(dict.fromkeys(str(node.target) for node in found))
