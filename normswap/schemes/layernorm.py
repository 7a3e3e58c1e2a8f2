"""LayerNorm over all channels and positions of a sample: GroupNorm with one group, which see.

gamma and beta stay per channel, as in GroupNorm (`torch.nn.GroupNorm(1, C)`). Approximate; of the norms with statistics
per sample the one that keeps most of the accuracy.
"""

from __future__ import annotations

from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.schemes import Scheme
from normswap.schemes.groupnorm import fit
from normswap.schemes.parts.per_sample_norms import insert_per_sample_norms
from normswap.schemes.parts.per_sample_norms import recentred as fitting_target


def plan(anatomy: Anatomy, *, steady: float) -> PlanBuilder:
    """Plan a norm over all channels in place of every BatchNorm."""
    return insert_per_sample_norms(anatomy, lambda channels: 1, steady)


SCHEME = Scheme(
    plan,
    paper="Ba et al. 2016, arXiv:1607.06450, section 3",
    exact=False,
    fit=fit,
    fitting_target=fitting_target,
    starts_from="batchnorm",
    fits_without_images=True,
)
