"""Weight normalization and spectral normalization: torch's parametrizations of every convolution and linear layer.

The network is folded first. W = g v / |v| per filter with g the filter's norm describes the same filters; those that
were switched off get g = 0 and keep a direction. W = alpha V / sigma(V) keeps the function as alpha starts as sigma(W).
"""

from __future__ import annotations

from normswap.errors import RefusedError
from normswap.folding.canonical_form import fold_norms
from normswap.folding.plan_builder import PlanBuilder
from normswap.folding.propagation import NotFoldable, check_linear, distinct
from normswap.graph.inspection import Anatomy
from normswap.graph.node_reader import LINEAR
from normswap.layers import reparametrized


def plan(anatomy: Anatomy) -> PlanBuilder:
    """Plan a weight norm for every linear layer."""
    return reparametrize(anatomy, "WeightNorm")


def plan_spectralnorm(anatomy: Anatomy) -> PlanBuilder:
    """Plan a spectral norm for every linear layer."""
    return reparametrize(anatomy, "SpectralNorm")


def reparametrize(anatomy: Anatomy, layer: str) -> PlanBuilder:
    """Fold the network, and give every linear layer whose weight can be replaced that `layer`."""
    builder, traced = fold_norms(anatomy), anatomy.traced
    paths = [str(node.target) for node in traced.nodes if isinstance(traced.module(node), LINEAR)]
    count = 0
    for path in distinct(traced.modules, list(dict.fromkeys(paths))):
        if not anatomy.takes_part(path):
            continue
        try:
            check_linear(builder, path, traced.modules[path])
            if reparametrized.keeps_input_bias(traced.modules[path]):
                raise NotFoldable("it adds a scalar to its input")
        except NotFoldable as why:
            builder.notes.append(f"{path} stays as it is: {why}")
        else:
            builder.linear(path).layer = layer
            count += 1
    if not count:
        raise RefusedError("the network has no convolution or linear layer that could be changed")
    return builder
