"""GroupNorm in place of every BatchNorm, its gamma and beta set so that an average sample sees the BatchNorm.

With the running statistics of the channels of a group taken together (mean m, variance v): gamma' = s sqrt(v + eps),
beta' = beta + s (m - mean), where s is the BatchNorm's slope. That needs no data. A large eps
makes the deviation steady by which a sample is divided (`steady`). What is free before such a norm, sign and factor of
each channel, is chosen so that a sample's own statistics cost least (`steady_signs`, on made images; with `--calibrate`
on the images); where no convolution comes before the norm, as in pre-activation networks, a scale and shift in front
of it holds them.
With `--calibrate` the convolutions and the norms' gamma and beta are then fitted, layer by layer, to what the source
computes on the same images (`sequential_fit`). Approximate: each sample has its own statistics. The fewer groups, the
less is lost; nothing is tied to the batch.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from normswap.calibration.sequential_fit import refit
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.models.modes import Progress
from normswap.plan import Step
from normswap.schemes import Scheme
from normswap.schemes.parts.per_sample_norms import insert_per_sample_norms
from normswap.schemes.parts.per_sample_norms import recentred as fitting_target
from normswap.schemes.parts.per_sample_rescaling import choose_rescaling


def plan(anatomy: Anatomy, *, groups: int, group_size: int, steady: float) -> PlanBuilder:
    """A sample's value of d times the usual deviation is divided by sqrt(steady + (1 - steady) d^2) times the usual."""
    return insert_per_sample_norms(
        anatomy, lambda channels: max(channels // group_size, 1) if group_size else groups, steady
    )


def fit(
    source: nn.Module, result: nn.Module, step: Step, batches: Iterable[object], *, seed: int, progress: Progress | None
) -> None:
    """Choose the rescaling before each norm, then fit layer by layer.

    Args:
        batches: read three times.
    """
    choose_rescaling(source, result, step, batches)
    refit(source, result, batches, seed=seed, progress=progress)


SCHEME = Scheme(
    plan,
    paper="Wu & He 2018, arXiv:1803.08494, section 3",
    exact=False,
    fit=fit,
    fitting_target=fitting_target,
    starts_from="batchnorm",
    at_a_glance={"steady": 0.0},
)
