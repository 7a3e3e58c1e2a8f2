"""LayerScale at the end of a branch: into the linear layer before it, W' = gamma W, b' = gamma b.

Touvron et al. 2021, arXiv:2103.17239, section 2: y = x + gamma * f(x), one gamma per channel; DeiT III, DINOv2,
EfficientFormer, MaxViT ... A gamma that a block keeps as a parameter of its own (ConvNeXt, CaiT, BEiT) is no module.
"""

from __future__ import annotations

from torch import fx, nn

from normswap.folding.outcomes import folded_back
from normswap.folding.plan_builder import PlanBuilder
from normswap.folding.propagation import NotFoldable, check_linear, name
from normswap.graph.node_reader import LINEAR
from normswap.graph.tracing import inputs
from normswap.layers.channel_norm import scaled_dim
from normswap.plan import AbsorbMode


def move(builder: PlanBuilder) -> None:
    """Give the gamma of every LayerScale to the linear layer before it, where that is exact."""
    traced = builder.anatomy.traced
    for call, *_ in traced.calls.values():
        module, path = traced.module(call), str(call.target)
        if module is None or scaled_dim(module) is None or path in builder.replacements:
            continue
        if not builder.anatomy.takes_part(path):
            continue
        try:
            linear = producer(builder, module)
        except NotFoldable as why:
            builder.notes.append(f"{path} stays: {why}")
            continue
        builder.linear(linear).add(path, AbsorbMode.AFTER)
        builder.remove(path)
        builder.settle(path, folded_back(linear))


def producer(builder: PlanBuilder, module: nn.Module) -> str:
    """The path of the linear layer whose output this LayerScale, and nothing else, reads, at each of their calls.

    Raises:
        NotFoldable: there is none, or it cannot absorb a scale of its output.
    """
    traced = builder.anatomy.traced
    if module._forward_hooks or module._forward_pre_hooks:
        raise NotFoldable("it has forward hooks, which would be lost with it")
    read = traced.read_directly(module)
    if read:
        raise NotFoldable(f"{read} is read elsewhere in forward")
    made = [_made(builder, call) for call in traced.calls[id(module)]]
    linear, path = traced.module(made[0]), str(made[0].target)
    if not isinstance(linear, LINEAR) or isinstance(linear, nn.Linear) == (scaled_dim(module) == 1):
        raise NotFoldable(f"{name(made[0])} makes its input, not a linear layer")
    if any(len(traced.users[node]) > 1 for node in made) or set(traced.calls[id(linear)]) != set(made):
        raise NotFoldable(f"{path} is read elsewhere too")
    check_linear(builder, path, linear)
    return path


def _made(builder: PlanBuilder, scale: fx.Node) -> fx.Node:
    """The node that makes the input of this call."""
    (node,) = inputs(scale)
    while builder.is_identity(node) and len(builder.anatomy.traced.users[node]) == 1:
        (node,) = inputs(node)
    return node
