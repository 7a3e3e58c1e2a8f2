"""GroupNorm in the seat of every BatchNorm, its gamma and beta set so that an average sample sees the BatchNorm.

With the running statistics of the channels of a group taken together (mean m, variance v): gamma' = s sqrt(v + eps),
beta' = beta + s (m - mean), where s is the BatchNorm's slope. That needs no data. What is free before such a norm, the
sign of each channel and a constant in it, is chosen so that a sample's statistics fluctuate least (`steady_signs`);
where no convolution comes before the norm, as in pre-activation networks, a scale and shift in front of it holds them.
With `--calibrate` the convolutions and the norms' gamma and beta are then fitted, layer by layer, to what the source
computes on the same images (`sequential_fit`). Approximate: each sample has its own statistics. The fewer groups, the
less is lost; nothing is tied to the batch.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from normswap.calibration.sequential_fit import Progress, refit
from normswap.errors import OptionError
from normswap.folding.draft import Draft
from normswap.graph.inspection import Anatomy
from normswap.plan import Step
from normswap.schemes import Scheme
from normswap.schemes.parts.per_sample_norms import dress_per_sample
from normswap.schemes.parts.per_sample_norms import recentred as pattern
from normswap.schemes.parts.steady_gauge import regauge


def plan(anatomy: Anatomy, *, groups: int, group_size: int, steady: float) -> Draft:
    """A sample's value of d times the usual deviation is divided by sqrt(steady + (1 - steady) d^2) times the usual."""
    if group_size and groups != 1:
        raise OptionError("--groups and --group-size", "each says how many groups there are", "Give one of them")
    return dress_per_sample(anatomy, lambda channels: max(channels // group_size, 1) if group_size else groups, steady)


def fit(
    source: nn.Module, result: nn.Module, step: Step, batches: Iterable[object], *, seed: int, progress: Progress | None
) -> None:
    """Args:
    batches: read twice.
    """
    regauge(source, result, step, batches)
    refit(source, result, batches, seed=seed, progress=progress)


SCHEME = Scheme(
    plan,
    paper="Wu & He 2018, arXiv:1803.08494, section 3",
    exact=False,
    fit=fit,
    pattern=pattern,
    starts_from="batchnorm",
    at_a_glance={"steady": 0.0},
)
