"""Regularized SkipInit: SkipInit, Dropout before the classifier, and a scalar bias after every v1 residual sum.

The scalar biases start at 0 and stand before the block's final ReLU (post-activation blocks only). The paper drops 0.2
on ImageNet and 0.6 on CIFAR. In eval mode nothing changes, so the conversion is as exact as `skipinit`.
"""

from __future__ import annotations

from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.schemes import Scheme
from normswap.schemes.parts.branch_scale import drop_before_classifier, scale_branches
from normswap.schemes.skipinit import initial


def plan(anatomy: Anatomy, *, alpha: str | float, dropout: float) -> PlanBuilder:
    """Plan a scalar on each residual branch, scalar biases and dropout."""
    builder = scale_branches(anatomy, initial(alpha, len(anatomy.blocks)), bias=True)
    return drop_before_classifier(builder, dropout)


SCHEME = Scheme(
    plan,
    paper="De & Smith 2020, arXiv:2002.10444, appendix F",
    exact=lambda options: bool(options["alpha"] == "match"),
    on_branches=True,
)
