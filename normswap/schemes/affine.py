"""Affine: in place of every norm a scale and a shift per channel, which learn; no statistics at all.

y = s x + t with s = gamma / sqrt(var + eps), t = beta - mean s: what the BatchNorm computes in eval mode, as a layer of
its own. Unlike `folded` the convolutions keep their values and their names, and each channel keeps a gain of its own to
train; unlike `frozen-bn` that gain learns. The price: the statistics no longer follow the data.
"""

from __future__ import annotations

from torch import nn

from normswap.folding.plan_builder import PlanBuilder, left_affine
from normswap.graph.inspection import Anatomy
from normswap.layers.channelwise import ChannelAffine
from normswap.schemes import Scheme
from normswap.schemes.parts.norm_insertion import insert_norms


def plan(anatomy: Anatomy) -> PlanBuilder:
    """Plan a scale and a shift in place of every norm.

    Raises:
        RefusedError: there is no BatchNorm, and no record of one.
    """
    return insert_norms(anatomy, ChannelAffine.__name__, _keep_the_map)


def _keep_the_map(builder: PlanBuilder, path: str, module: nn.Module) -> None:
    builder.replace(path, ChannelAffine.__name__)
    builder.settle(path, left_affine("its own map"))


SCHEME = Scheme(plan, paper="Touvron et al. 2021, ResMLP, arXiv:2105.03404, section 2 (Aff)")
