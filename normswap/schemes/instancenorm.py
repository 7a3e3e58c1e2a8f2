"""InstanceNorm: every channel of every sample is normalized by itself, as GroupNorm with one channel per group.

gamma' and beta' as in `groupnorm`; with one channel per group the BatchNorm's own gamma and beta come out. Approximate,
and costly: a channel's mean and size, which often say what is in the image, are erased. Without calibration and
further training little is left of a classifier's accuracy. A channel of one
element would be erased: refused.
"""

from __future__ import annotations

from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.schemes import Scheme
from normswap.schemes.groupnorm import fit
from normswap.schemes.parts.per_sample_norms import insert_per_sample_norms
from normswap.schemes.parts.per_sample_norms import recentred as fitting_target


def plan(anatomy: Anatomy) -> PlanBuilder:
    """Plan a norm per channel and sample in place of every BatchNorm."""
    return insert_per_sample_norms(anatomy, lambda channels: channels, channelwise=True)


SCHEME = Scheme(
    plan,
    paper="Ulyanov et al. 2016, arXiv:1607.08022, section 2",
    exact=False,
    fit=fit,
    fitting_target=fitting_target,
    starts_from="batchnorm",
    fits_without_images=True,
)
