"""LayerScale at the end of a branch: into the linear layer before it, W' = gamma W, b' = gamma b.

Touvron et al. 2021, arXiv:2103.17239, section 2: y = x + gamma * f(x), one gamma per channel; DeiT III, DINOv2,
EfficientFormer, MaxViT ... A gamma that a block keeps as a parameter of its own (ConvNeXt, CaiT, BEiT) has no seat.
"""

from __future__ import annotations

from torch import fx, nn

from normswap.folding.draft import Draft
from normswap.folding.outcomes import folded_back
from normswap.folding.passage import Blocked, check_linear, name, read_directly
from normswap.graph.inspection import LINEAR
from normswap.graph.tracing import inputs
from normswap.layers.layer_scale import scaled_dim
from normswap.plan import Way


def move(draft: Draft) -> None:
    """Give the gamma of every LayerScale to the linear layer before it, where that is exact."""
    traced = draft.anatomy.traced
    for call, *_ in traced.calls.values():
        module, path = traced.module(call), str(call.target)
        if module is None or scaled_dim(module) is None or not draft.anatomy.takes_part(path) or path in draft.seats:
            continue
        try:
            linear = maker(draft, module)
        except Blocked as why:
            draft.notes.append(f"{path} stays: {why}")
            continue
        draft.take(linear).add(path, Way.AFTER)
        draft.vacate(path)
        draft.settle(path, folded_back(linear))


def maker(draft: Draft, module: nn.Module) -> str:
    """The path of the linear layer whose output this LayerScale, and nothing else, reads, at each of their calls.

    Raises:
        Blocked: there is none, or it cannot take in a scale of its output.
    """
    traced = draft.anatomy.traced
    if module._forward_hooks or module._forward_pre_hooks:
        raise Blocked("it has forward hooks, which would be lost with it")
    read = read_directly(traced, module)
    if read:
        raise Blocked(f"{read} is read elsewhere in forward")
    made = [_made(draft, call) for call in traced.calls[id(module)]]
    linear, path = traced.module(made[0]), str(made[0].target)
    if not isinstance(linear, LINEAR) or isinstance(linear, nn.Linear) == (scaled_dim(module) == 1):
        raise Blocked(f"{name(made[0])} makes its input, not a linear layer")
    if any(len(traced.users[node]) > 1 for node in made) or set(traced.calls[id(linear)]) != set(made):
        raise Blocked(f"{path} is read elsewhere too")
    check_linear(draft, path, linear)
    return path


def _made(draft: Draft, scale: fx.Node) -> fx.Node:
    """What makes the input of this call."""
    (node,) = inputs(scale)
    while draft.silent(node) and len(draft.anatomy.traced.users[node]) == 1:
        (node,) = inputs(node)
    return node
