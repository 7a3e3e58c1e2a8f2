"""InstanceNorm: every channel of every sample is normalized by itself, as GroupNorm with one channel per group.

gamma' and beta' as in `groupnorm`; with one channel per group the BatchNorm's own gamma and beta come out. Approximate,
and costly: a channel's mean and size, which often say what is in the image, are erased. Without calibration and
further training little is left of a classifier's accuracy. A channel of one
element would be erased: refused.
"""

from __future__ import annotations

from normswap.folding.draft import Draft
from normswap.graph.inspection import Anatomy
from normswap.schemes import Scheme
from normswap.schemes.groupnorm import fit, pattern
from normswap.schemes.parts.per_sample_norms import dress_per_sample


def plan(anatomy: Anatomy) -> Draft:
    return dress_per_sample(anatomy, lambda channels: channels, channelwise=True)


SCHEME = Scheme(
    plan,
    paper="Ulyanov et al. 2016, arXiv:1607.08022, section 2",
    exact=False,
    fit=fit,
    pattern=pattern,
    starts_from="batchnorm",
)
