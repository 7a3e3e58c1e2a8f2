"""LayerScale at the end of a branch: into the linear layer before it, W' = gamma W, b' = gamma b.

Touvron et al. 2021, arXiv:2103.17239, section 2: y = x + gamma * f(x), one gamma per channel; DeiT III, DINOv2,
EfficientFormer, MaxViT ... A gamma that a block keeps as a parameter of its own (ConvNeXt, CaiT, BEiT) has no seat.
"""

from __future__ import annotations

from timm import layers as timm_layers
from torch import fx, nn

from normswap.folding.draft import Draft
from normswap.folding.passage import Blocked, check_linear, name, read_directly
from normswap.folding.verdict import Fate
from normswap.graph.inspection import LINEAR
from normswap.graph.tracing import inputs
from normswap.layers import affine
from normswap.plan import Way


def move(draft: Draft) -> None:
    """Give the gamma of every LayerScale to the linear layer before it, where that is exact."""
    traced = draft.anatomy.traced
    for node in traced.nodes:
        module, path = traced.module(node), str(node.target)
        if not isinstance(module, affine.LAYER_SCALES) or not draft.anatomy.takes_part(path) or path in draft.seats:
            continue
        try:
            linear = maker(draft, node, module)
        except Blocked as why:
            draft.notes.append(f"{path} stays: {why}")
            continue
        draft.take(linear).add(path, Way.AFTER)
        draft.vacate(path)
        draft.judge(path, Fate.FOLDED_BACK, linear)


def maker(draft: Draft, scale: fx.Node, module: nn.Module) -> str:
    """The path of the linear layer whose output this LayerScale, and nothing else, reads.

    Raises:
        Blocked: there is none, or it cannot take in a scale of its output.
    """
    traced = draft.anatomy.traced
    if type(module).forward not in {kind.forward for kind in affine.LAYER_SCALES} or "forward" in vars(module):
        raise Blocked(f"{type(module).__name__} has a forward of its own")
    if module._forward_hooks or module._forward_pre_hooks:
        raise Blocked("it has forward hooks, which would be lost with it")
    read = read_directly(traced, module)
    if read:
        raise Blocked(f"{read} is read elsewhere in forward")
    if len(traced.calls[id(module)]) > 1:
        raise Blocked("it is called more than once")
    (node,) = inputs(scale)
    while draft.silent(node) and len(traced.users[node]) == 1:
        (node,) = inputs(node)
    linear, path = traced.module(node), str(node.target)
    if not isinstance(linear, LINEAR) or isinstance(linear, nn.Linear) == isinstance(module, timm_layers.LayerScale2d):
        raise Blocked(f"{name(node)} makes its input, not a linear layer")
    if len(traced.users[node]) > 1 or len(traced.calls[id(linear)]) > 1:
        raise Blocked(f"{path} is read elsewhere too")
    check_linear(draft, path, linear)
    return path
