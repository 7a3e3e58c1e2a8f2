"""Affine: in the seat of every norm a scale and a shift per channel, which learn; no statistics at all.

y = s x + t with s = gamma / sqrt(var + eps), t = beta - mean s: what the BatchNorm computes in eval mode, as a layer of
its own. Unlike `folded` the convolutions keep their values and their names, and each channel keeps a gain of its own to
train; unlike `frozen-bn` that gain learns. What is lost: the statistics no longer follow the data.
"""

from __future__ import annotations

from torch import nn

from normswap.folding.draft import Draft
from normswap.folding.outcomes import left_affine
from normswap.graph.inspection import Anatomy
from normswap.layers.channelwise import ChannelAffine
from normswap.schemes import Scheme
from normswap.schemes.parts.norm_sites import dress_in_norms


def plan(anatomy: Anatomy) -> Draft:
    """Raises:
    RefusedError: there is no BatchNorm, and no record of one.
    """
    return dress_in_norms(anatomy, ChannelAffine.__name__, _keep_the_map)


def _keep_the_map(draft: Draft, path: str, module: nn.Module) -> None:
    draft.seat(path, ChannelAffine.__name__)
    draft.settle(path, left_affine("its own map"))


SCHEME = Scheme(plan, paper="Touvron et al. 2021, ResMLP, arXiv:2105.03404, section 2 (Aff)")
