"""Affine: in the seat of every norm a scale and a shift per channel, which learn; no statistics at all.

y = s x + t with s = gamma / sqrt(var + eps), t = beta - mean s: what the BatchNorm computes in eval mode, as a layer of
its own. Unlike `folded` the convolutions keep their values and their names, and each channel keeps a gain of its own to
train; unlike `frozen-bn` that gain learns. What is lost: the statistics no longer follow the data.
"""

from __future__ import annotations

from normswap.errors import RefusedError
from normswap.folding.draft import Draft
from normswap.folding.passage import read_directly
from normswap.folding.verdict import Fate
from normswap.graph.inspection import Anatomy
from normswap.layers import affine
from normswap.schemes import Scheme


def plan(anatomy: Anatomy) -> Draft:
    """Raises:
    RefusedError: there is no norm with statistics to take the place of.
    """
    draft, traced = Draft(anatomy), anatomy.traced
    modules = {str(node.target): traced.module(node) for node in traced.nodes}
    called = [path for path, module in modules.items() if module is not None and affine.holds_statistics(module)]
    for path in called:
        if not anatomy.takes_part(path):
            continue
        why = affine.refusal(traced.modules[path]) or read_directly(traced, traced.modules[path])
        if why:
            draft.refusals[path] = why
        else:
            draft.seat(path, "ChannelAffine")
            draft.judge(path, Fate.LEFT_AFFINE, reason="its own map")
    if not called:
        raise RefusedError("the network has no norm with statistics to take the place of")
    return draft


SCHEME = Scheme(plan, paper="Touvron et al. 2021, ResMLP, arXiv:2105.03404, section 2 (Aff)", starts_from="batchnorm")
