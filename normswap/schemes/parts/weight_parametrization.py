"""Dress every convolution and linear layer of the canonical form in a parametrization of its weight."""

from __future__ import annotations

from normswap.errors import RefusedError
from normswap.folding.canonical_form import undress
from normswap.folding.draft import Draft
from normswap.folding.passage import Blocked, check_linear, distinct
from normswap.graph.inspection import LINEAR, Anatomy
from normswap.layers import reparametrized


def reparametrize(anatomy: Anatomy, layer: str) -> Draft:
    """Undress the network, and give every linear layer whose weight can be replaced that `layer`.

    Raises:
        RefusedError: there is no such layer, or they all have it already.
    """
    draft, traced = undress(anatomy), anatomy.traced
    paths = [str(node.target) for node in traced.nodes if isinstance(traced.module(node), LINEAR)]
    dressed = 0
    for path in distinct(traced.modules, list(dict.fromkeys(paths))):
        if not anatomy.takes_part(path):
            continue
        try:
            check_linear(draft, path, traced.modules[path])
            if reparametrized.is_stuck(traced.modules[path]):
                raise Blocked("it adds a scalar to its input")
        except Blocked as why:
            draft.notes.append(f"{path} stays as it is: {why}")
        else:
            draft.take(path).layer = layer
            dressed += 1
    if not dressed:
        raise RefusedError("the network has no convolution or linear layer that could be changed")
    return draft
