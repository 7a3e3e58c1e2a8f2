"""Dynamic Tanh in place of every BatchNorm: gamma tanh(alpha x) + beta, with one alpha a layer; no statistics.

The convolution before absorbs mean and deviation of the BatchNorm, so that one alpha fits all channels; where there is
none, as in pre-activation networks, a scale and shift in front does. gamma' is gamma times a number that follows from
alpha: the least-squares line through N(0, 1) bent by the tanh (`dynamic_tanh`). Channels with long tails are made
smaller, so that none is bent more than N(0, 1) (`tails`, on made images; with `--calibrate` on the images). With
`--calibrate` the convolutions, gamma and beta are then fitted, layer by layer. Approximate: the tanh bends what is
large, which is what keeps training stable without a norm; the smaller `--bend`, the less.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from normswap.calibration.sequential_fit import refit
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.layers.dynamic_tanh import DynamicTanh, Straight, Whitened
from normswap.layers.per_sample import letters_of
from normswap.models.modes import Progress
from normswap.plan import Body, Edit, Outcome, Step
from normswap.schemes import Scheme
from normswap.schemes.parts import tails
from normswap.schemes.parts.replaceable_batchnorms import conv_before, exchanged, replaceable_batchnorms

STRAIGHT = 0.01  # a bend that no tail is long for


def plan(anatomy: Anatomy, *, bend: float) -> PlanBuilder:
    """Plan a Dynamic Tanh in place of every BatchNorm.

    Raises:
        RefusedError: there is no BatchNorm.
    """
    builder, readable = replaceable_batchnorms(anatomy, "Dynamic Tanh")
    norms = dict(readable)
    factors = tails.factors_on_leaves(anatomy.traced, norms, bend) if bend > STRAIGHT and not builder.refusals else {}
    for path, module in norms.items():
        conv = conv_before(builder, module)
        known: Body = {"factors": letters_of(factors[path])} if path in factors else {}
        if conv is not None:
            builder.replacements[conv] = Edit(conv, Whitened.__name__, known, (path,))
        lead = {"lead": True} if conv is None else {}
        builder.replace(path, DynamicTanh.__name__, alpha=float(bend), **known, **lead)
        sentence = "becomes a Dynamic Tanh" + ("" if conv else " behind a scale and shift")
        builder.settle(path, Outcome("Dynamic Tanh", sentence))
    return builder


def fit(
    source: nn.Module, result: nn.Module, step: Step, batches: Iterable[object], *, seed: int, progress: Progress | None
) -> None:
    """Choose the channels' factors, then fit convolutions, gamma and beta, layer by layer.

    Args:
        batches: read twice.
    """
    tails.choose_factors(source, result, step, batches)
    refit(source, result, batches, seed=seed, progress=progress)


def fitting_target(step: Step) -> Step:
    """The same step without the tanh: what its result is fitted to."""
    return exchanged(step, DynamicTanh.__name__, Straight.__name__)


SCHEME = Scheme(
    plan,
    paper="Zhu et al. 2025, arXiv:2503.10622, section 4",
    exact=False,
    fit=fit,
    fitting_target=fitting_target,
    starts_from="batchnorm",
    at_a_glance={"bend": STRAIGHT},
)
