"""Normalizer-free: y = skip + beta f(x), every convolution with standardized weights, gain and bias; no norm.

Convolutions become timm's `ScaledStdConv2d`, which computes any filter that sums to zero exactly; beta is a scalar at
the branch's end that makes f's output of unit variance, exactly. The constant alpha = 1 / sqrt(expected variance) in
front of a branch is part of the first convolution's gain. A network without residual blocks gets the convolutions
alone. The price is each filter's mean. `--mean fit` (needs `--calibrate`) scales channels so that little is lost
(`zero_sum_rescaling`; beta is then for the scaled branch), and finds, layer by layer, the zero-sum filters that come
nearest to the source on the converted network's own inputs (`sequential_fit`). `--mean keep` keeps the means as one
more parameter per filter, and with it the function. Those of the convolution that reads the image, which tell its
brightness and colour, and of depthwise ones are kept unless `--stem fit`, `--depthwise fit`.
"""

from __future__ import annotations

from normswap.calibration.zero_sum_fit import fit_zero_sum
from normswap.folding.canonical_form import fold_norms
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.schemes import Scheme
from normswap.schemes.parts.branch_scale import scale_branches
from normswap.schemes.parts.zero_sum_filters import kept as fitting_target
from normswap.schemes.parts.zero_sum_filters import standardize


def plan(anatomy: Anatomy, *, mean: str, stem: str, depthwise: str) -> PlanBuilder:
    """Plan standardized filters, and a scalar on each residual branch."""
    builder = scale_branches(anatomy, None) if anatomy.blocks else fold_norms(anatomy)
    return standardize(builder, mean=mean, stem=stem, depthwise=depthwise)


SCHEME = Scheme(
    plan,
    paper="Brock et al. 2021, arXiv:2101.08692, sections 3 and 4",
    exact=lambda options: bool(options["mean"] == "keep"),
    needs_data=lambda options: bool(options["mean"] != "keep"),
    fit=fit_zero_sum,
    fitting_target=fitting_target,
    on_branches=True,
)
