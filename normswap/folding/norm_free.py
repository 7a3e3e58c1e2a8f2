"""Undress timm's normalizer-free networks: their scalars move into the convolutions around them.

A block is y = skip + alpha f(beta act(x)) (Brock et al. 2021, arXiv:2101.08692, section 3). beta, and the gamma of an
activation, are factors of what the next convolutions read; alpha, the attention's gain and SkipInit's gain are factors
of the branch, and go back through its gate into its last convolution. The standardized weights are baked
(`reparametrized`). What cannot move stays: it is a number in the block, and exact where it is. The last activation
keeps its gamma, since the features that the network returns would change.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from timm.models.nfnet import GammaAct, NormFreeBlock
from torch import Tensor, fx

from normswap.folding.draft import Draft
from normswap.folding.gauge import attempt, enlarge, shrink_input
from normswap.folding.passage import Blocked, scalar_readers
from normswap.graph.tracing import constant, inputs, is_constant_mul


def free(draft: Draft) -> None:
    """Fold the scalars of every normalizer-free block of the network."""
    traced = draft.anatomy.traced
    for node in traced.nodes:
        module = traced.module(node)
        if not isinstance(module, GammaAct) or not draft.anatomy.takes_part(str(node.target)):
            continue
        if module.gamma != 1 and len(traced.calls[id(module)]) == 1:
            _try(draft, str(node.target), lambda node=node, gamma=module.gamma: _forward(draft, node, gamma, "gamma"))
    for path, module in traced.modules.items():
        if isinstance(module, NormFreeBlock) and path not in traced.opaque and draft.anatomy.takes_part(path):
            _free_block(draft, path, module)


def _try(draft: Draft, path: str, way: Callable[..., None]) -> None:
    try:
        with attempt(draft):
            way()
    except Blocked as why:
        draft.notes.append(f"{path} keeps its factor: {why}")


def _free_block(draft: Draft, path: str, block: NormFreeBlock) -> None:
    own = [node for node in draft.anatomy.traced.nodes if node.meta["inside"][-1:] == (path,)]
    attention = block.attn is not None or block.attn_last is not None
    named = [("beta", block.beta), *([("attn_gain", block.attn_gain)] if attention else []), ("alpha", block.alpha)]
    named = [(name, value) for name, value in named if value != 1]  # the tracer leaves out factors of 1
    factors = [node for node in own if is_constant_mul(node)]
    if [constant(node) for node in factors] != [value for _, value in named]:
        draft.notes.append(f"{path} keeps its factors: they are not those of a NormFreeBlock")
        return
    nodes = dict(zip([name for name, _ in named], factors, strict=True))
    if "beta" in nodes:
        _try(draft, path, lambda: _forward(draft, nodes["beta"], block.beta, "beta", path))
    for name in ("attn_gain", "alpha"):
        if name in nodes:
            _try(draft, path, lambda name=name: _back(draft, nodes[name], getattr(block, name), name, path))
    if isinstance(block.skipinit_gain, Tensor):
        _try(draft, path, lambda: _back_skipinit(draft, own, block, path))


def _forward(draft: Draft, node: fx.Node, factor: float, name: str, path: str = "") -> None:
    """A factor of what the next convolutions read; the classifier's features are left alone."""
    for reader in scalar_readers(draft, node, set()):
        if reader == draft.anatomy.classifier:
            raise Blocked("the features of the network would change")
        shrink_input(draft, reader, 1 / factor)
    draft.seat(f"{path or node.target}.{name}", "Number", value=1.0)


def _back(draft: Draft, node: fx.Node, factor: float, name: str, path: str) -> None:
    """A factor of what was computed: through gates into the last convolution."""
    (above,) = inputs(node)
    while _is_in_place(above):  # SkipInit's gain, between the attention and alpha
        node, above = above, inputs(above)[0]
    enlarge(draft, above, factor, {node})
    draft.seat(f"{path}.{name}", "Number", value=1.0)


def _back_skipinit(draft: Draft, own: list[fx.Node], block: Any, path: str) -> None:
    gain = float(block.skipinit_gain.detach())
    node = next((node for node in own if _is_in_place(node)), None)
    if node is None:
        raise Blocked("it is not in the graph")
    source: Any = node.args[0]
    readers = set(draft.anatomy.traced.users[source])
    enlarge(draft, source, gain, readers)
    draft.seat(f"{path}.skipinit_gain", "Number", value=None)


def _is_in_place(node: fx.Node) -> bool:
    return (node.op == "call_method" and node.target == "mul_") or node.target in (operator.imul, torch.Tensor.mul_)
