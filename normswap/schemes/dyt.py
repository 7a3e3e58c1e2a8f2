"""Dynamic Tanh in place of every BatchNorm: gamma tanh(alpha x) + beta, with one alpha a layer; no statistics.

The convolution before absorbs mean and deviation of the BatchNorm, so that one alpha fits all channels; where there is
none, as in pre-activation networks, a scale and shift in front does. gamma' is gamma times a number that follows from
alpha: the least-squares line through N(0, 1) bent by the tanh (`dynamic_tanh`). Channels with long tails are made
smaller, so that none is bent more than N(0, 1) (`tanh_factors`, on images of dead leaves, or those of `--calibrate`).
With `--calibrate` the convolutions, gamma and beta are then fitted, layer by layer. Approximate: the tanh bends what is
large, which is what keeps training stable without a norm; the smaller `--bend`, the less.
"""

from __future__ import annotations

from normswap.calibration.fit_task import FitTask
from normswap.calibration.sequential_fit import refit
from normswap.calibration.tanh_factors import choose_factors
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.layers.dynamic_tanh import DynamicTanh, Straight, Whitened
from normswap.plan import Edit, Outcome, Step
from normswap.schemes.replaceable_batchnorms import conv_before, exchanged, replaceable_batchnorms


def plan(anatomy: Anatomy, *, bend: float) -> PlanBuilder:
    """Plan a Dynamic Tanh in place of every BatchNorm.

    Raises:
        RefusedError: there is no BatchNorm.
    """
    builder, norms = replaceable_batchnorms(anatomy, "Dynamic Tanh")
    for path, module in norms:
        conv = conv_before(builder, module)
        if conv is not None:
            builder.replacements[conv] = Edit(conv, Whitened.__name__, {}, (path,))
        lead = {"lead": True} if conv is None else {}
        builder.replace(path, DynamicTanh.__name__, alpha=float(bend), **lead)
        sentence = "becomes a Dynamic Tanh" + ("" if conv else " behind a scale and shift")
        builder.settle(path, Outcome("Dynamic Tanh", sentence))
    return builder


def fit(task: FitTask) -> None:
    """Choose the channels' factors; with images, then fit convolutions, gamma and beta, layer by layer."""
    target = task.after(fitting_target(task.step))
    choose_factors(target, task.result, task.step, task.example, task.batches)
    if task.batches is not None:
        refit(target, task.result, task.batches, seed=task.seed, progress=task.progress)


def fitting_target(step: Step) -> Step:
    """The same step without the tanh: what its result is fitted to."""
    return exchanged(step, DynamicTanh.__name__, Straight.__name__)
