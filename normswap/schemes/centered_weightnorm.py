"""Centered weight normalization: W = g (v - mean v) / |v - mean v| per filter; no normalization of activations.

That is timm's `ScaledStdConv2d` up to a constant factor sqrt(fan-in) in g, which is what the convolutions become. The
network is folded first; then, as in `nf`, channels are scaled and the filters that sum to zero and come nearest to the
source are fitted (`--mean fit`, needs `--calibrate`), or the means are kept as one more parameter per filter (`--mean
keep`, exact).
"""

from __future__ import annotations

from normswap.calibration.zero_sum_fit import fit_zero_sum
from normswap.folding.canonical_form import fold_norms
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.schemes import Scheme
from normswap.schemes.parts.zero_sum_filters import kept as fitting_target
from normswap.schemes.parts.zero_sum_filters import standardize


def plan(anatomy: Anatomy, *, mean: str, stem: str, depthwise: str) -> PlanBuilder:
    """Plan standardized filters for every convolution."""
    return standardize(fold_norms(anatomy), mean=mean, stem=stem, depthwise=depthwise)


SCHEME = Scheme(
    plan,
    paper="Huang et al. 2017, arXiv:1710.02338, section 3",
    exact=lambda options: bool(options["mean"] == "keep"),
    needs_data=lambda options: bool(options["mean"] != "keep"),
    fit=fit_zero_sum,
    fitting_target=fitting_target,
)
