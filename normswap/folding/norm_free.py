"""Fold timm's normalizer-free networks: their scalars move into the convolutions around them.

A block is y = skip + alpha f(beta act(x)) (Brock et al. 2021, arXiv:2101.08692, section 3). beta, and the gamma of an
activation, are factors of what the next convolutions read; alpha, the attention's gain and SkipInit's gain are factors
of the branch, and go back through its gate into its last convolution. The standardized weights are baked
(`reparametrized`). The rest stays: it is a number in the block, and exact where it is. The last activation
keeps its gamma, since the features that the network returns would change.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from timm.models.nfnet import GammaAct, NormFreeBlock
from torch import Tensor, fx, nn

from normswap.folding.plan_builder import PlanBuilder
from normswap.folding.propagation import NotFoldable, scalar_readers
from normswap.folding.rescaling import attempt, enlarge, shrink_input
from normswap.graph.tracing import constant, inputs, is_constant_mul


def free(builder: PlanBuilder) -> None:
    """Fold the scalars of every normalizer-free block of the network."""
    traced = builder.anatomy.traced
    for node in traced.nodes:
        module = traced.module(node)
        if not isinstance(module, GammaAct) or not builder.anatomy.takes_part(str(node.target)):
            continue
        if module.gamma != 1 and len(traced.calls[id(module)]) == 1:
            _try(
                builder, str(node.target), lambda node=node, gamma=module.gamma: _forward(builder, node, gamma, "gamma")
            )
    for path, module in traced.modules.items():
        if isinstance(module, NormFreeBlock) and path not in traced.opaque and builder.anatomy.takes_part(path):
            _free_block(builder, path, module)


def _try(builder: PlanBuilder, path: str, way: Callable[..., None]) -> None:
    try:
        with attempt(builder):
            way()
    except NotFoldable as why:
        builder.notes.append(f"{path} keeps its factor: {why}")


def _free_block(builder: PlanBuilder, path: str, block: NormFreeBlock) -> None:
    nodes_of_block = [node for node in builder.anatomy.traced.nodes if node.meta["inside"][-1:] == (path,)]
    attention = block.attn is not None or block.attn_last is not None
    named = [("beta", block.beta), *([("attn_gain", block.attn_gain)] if attention else []), ("alpha", block.alpha)]
    named = [(name, value) for name, value in named if value != 1]  # the tracer leaves out factors of 1
    factors = [node for node in nodes_of_block if is_constant_mul(node)]
    if [constant(node) for node in factors] != [value for _, value in named]:
        builder.notes.append(f"{path} keeps its factors: they are not those of a NormFreeBlock")
        return
    nodes = dict(zip([name for name, _ in named], factors, strict=True))
    if "beta" in nodes:
        _try(builder, path, lambda: _forward(builder, nodes["beta"], block.beta, "beta", path))
    for name in ("attn_gain", "alpha"):
        if name in nodes:
            _try(builder, path, lambda name=name: _back(builder, nodes[name], getattr(block, name), name, path))
    if isinstance(block.skipinit_gain, Tensor):
        _try(builder, path, lambda: _back_skipinit(builder, nodes_of_block, block, path))


def _forward(builder: PlanBuilder, node: fx.Node, factor: float, name: str, path: str = "") -> None:
    """A factor of what the next convolutions read; the classifier's features are left alone."""
    for reader in scalar_readers(builder, node, set()):
        if reader == builder.anatomy.classifier:
            raise NotFoldable("the features of the network would change")
        shrink_input(builder, reader, 1 / factor)
    builder.replace(f"{path or node.target}.{name}", "Number", value=1.0)


def _back(builder: PlanBuilder, node: fx.Node, factor: float, name: str, path: str) -> None:
    """A factor of what was computed: through gates into the last convolution."""
    (above,) = inputs(node)
    while _is_in_place(above):  # SkipInit's gain, between the attention and alpha
        node, above = above, inputs(above)[0]
    enlarge(builder, above, factor, {node})
    builder.replace(f"{path}.{name}", "Number", value=1.0)


def _back_skipinit(builder: PlanBuilder, nodes_of_block: list[fx.Node], block: nn.Module, path: str) -> None:
    gain = float(block.get_parameter("skipinit_gain").detach())
    node = next((node for node in nodes_of_block if _is_in_place(node)), None)
    if node is None:
        raise NotFoldable("it is not in the graph")
    source = inputs(node)[0]
    readers = set(builder.anatomy.traced.users[source])
    enlarge(builder, source, gain, readers)
    builder.replace(f"{path}.skipinit_gain", "Number", value=None)


def _is_in_place(node: fx.Node) -> bool:
    return (node.op == "call_method" and node.target == "mul_") or node.target in (operator.imul, torch.Tensor.mul_)
