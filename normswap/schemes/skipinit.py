"""SkipInit, regularized or not: no norm, one learned scalar at the end of every residual branch.

y = skip + alpha * f(x). With `--alpha match` (the default) alpha is the standard deviation of the branch's output and
the branch's last convolution is divided by it, so that f has unit variance, as the paper's analysis has it, and the
function is kept exactly. A branch whose last gamma and beta are all 0 (a fresh network) gets alpha = 0 and a live f.
`--alpha 0`, `--alpha inv-sqrt-depth`, `--alpha 1` or any number set the scalars to the paper's initial values instead:
a reset, which changes the function. Of a network in `regularized-skipinit` the scalars stay, their biases go into the
branches' last convolutions, and the dropout goes.
"""

from __future__ import annotations

import math

from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.schemes.parts.branch_scale import drop_before_classifier, drop_no_more, scale_branches


def plan(anatomy: Anatomy, *, alpha: str | float) -> PlanBuilder:
    """Plan a scalar at the end of each residual branch."""
    return drop_no_more(scale_branches(anatomy, initial(alpha, len(anatomy.blocks))))


def plan_regularized(anatomy: Anatomy, *, alpha: str | float, dropout: float) -> PlanBuilder:
    """Plan a scalar on each residual branch, a scalar bias after each v1 sum, and dropout before the classifier.

    The biases start at 0 and stand before the block's final ReLU (post-activation blocks only). The paper drops 0.2 on
    ImageNet and 0.6 on CIFAR. In eval mode nothing changes.
    """
    builder = scale_branches(anatomy, initial(alpha, len(anatomy.blocks)), bias=True)
    return drop_before_classifier(builder, dropout)


def initial(alpha: str | float, depth: int) -> float | None:
    """The value every alpha starts from, or None to match the network."""
    if alpha == "match":
        return None
    if alpha == "inv-sqrt-depth":
        return 1 / math.sqrt(max(depth, 1))
    return float(alpha)
