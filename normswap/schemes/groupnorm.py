"""GroupNorm in place of every BatchNorm, its gamma and beta set so that an average sample sees the BatchNorm.

With the running statistics of the channels of a group taken together (mean m, variance v): gamma' = s sqrt(v + eps),
beta' = beta + s (m - mean), where s is the BatchNorm's slope. By default nine tenths of the divisor v + eps are eps, a
constant (`--steady`); `--steady 0` is the plain norm. One group, the default, is a LayerNorm over channels and
positions. Sign and scale of each channel are free before the norm. They are chosen so that a sample's own statistics
cost least (`per_sample_rescaling`, on images of dead leaves; with `--calibrate` on the images, too); where no
convolution comes before the norm, as in pre-activation networks, a scale and shift in front of it holds them.
With `--calibrate` the convolutions and the norms' gamma and beta are then fitted, layer by layer, to what the source
computes on the same images (`sequential_fit`). Approximate: each sample has its own statistics. The fewer groups, the
less is lost; nothing is tied to the batch.
"""

from __future__ import annotations

from normswap.calibration.fit_task import FitTask
from normswap.calibration.per_sample_rescaling import choose_rescaling
from normswap.calibration.sequential_fit import refit
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.schemes import Scheme
from normswap.schemes.parts.per_sample_norms import insert_per_sample_norms
from normswap.schemes.parts.per_sample_norms import recentred as fitting_target


def plan(anatomy: Anatomy, *, groups: int, group_size: int, steady: float) -> PlanBuilder:
    """Plan a GroupNorm in place of every BatchNorm, with eps = steady / (1 - steady) times the mean variance.

    A sample whose deviation is d times the average one is divided by sqrt(steady + (1 - steady) d^2) times the average.
    """
    return insert_per_sample_norms(
        anatomy, lambda channels: max(channels // group_size, 1) if group_size else groups, steady
    )


def fit(task: FitTask) -> None:
    """Choose the rescaling before each norm; with images, then fit layer by layer."""
    choose_rescaling(task)
    if task.batches is not None:
        refit(task.source, task.result, task.batches, seed=task.seed, progress=task.progress)


SCHEME = Scheme(
    plan,
    paper="Wu & He 2018, arXiv:1803.08494, section 3",
    exact=False,
    fit=fit,
    fitting_target=fitting_target,
    starts_from="batchnorm",
    fits_without_images=True,
)
