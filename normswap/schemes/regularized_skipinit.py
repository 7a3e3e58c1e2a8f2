"""Regularized SkipInit: SkipInit, Dropout before the classifier, and a scalar bias after every v1 residual sum.

The scalar biases start at 0 and stand before the block's final ReLU (post-activation blocks only). The paper drops 0.2
on ImageNet and 0.6 on CIFAR. In eval mode nothing changes, so the conversion is as exact as `skipinit`.
"""

from __future__ import annotations

from typing import Any

from normswap.folding.draft import Draft
from normswap.graph.inspection import Anatomy
from normswap.schemes.parts.branch_scale import drop_before_classifier, scale_branches
from normswap.schemes.skipinit import initial

PAPER = "De & Smith 2020, arXiv:2002.10444, appendix F"


def exact(options: dict[str, Any]) -> bool:
    return options["alpha"] == "match"


def plan(anatomy: Anatomy, *, alpha: str | float = "match", dropout: float = 0.2) -> Draft:
    """Args:
    alpha: as in `skipinit`.
    dropout: probability of dropping a feature before the classifier, in [0, 1).
    """
    draft = scale_branches(anatomy, initial(alpha, len(anatomy.blocks)), bias=True)
    return drop_before_classifier(draft, dropout)
