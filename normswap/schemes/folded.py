"""The canonical form: convolutions with bias, activations and sums; no statistics, no scalars. For fast inference.

W' = s W, b' = s b + t with s = gamma / sqrt(var + eps), t = beta - mean s. Before a ReLU (pre-activation networks)
|s| moves on into the next convolutions and a shift per channel stays; elsewhere a scale and shift stay. Nothing is
lost but the statistics, which the checkpoint keeps beside the weights (`--to unfold` brings them back).
Of LayerNorms the standardization stays; gamma and beta go into the linear layers that read it, where that is exact; a
LayerScale goes into the linear layer that it follows. Parallel branches whose sum one convolution computes become that
convolution (`steps/merged_branches.py`).
"""

from __future__ import annotations

from normswap.folding import norm_affine
from normswap.folding.canonical_form import fold_norms
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.schemes import Scheme


def plan(anatomy: Anatomy, *, branches: str = "merge") -> PlanBuilder:
    """Plan the canonical form; a step after this one merges the `branches`."""
    builder = fold_norms(anatomy)
    norm_affine.move(builder)
    norm_affine.move_layer_scales(builder)
    return builder


SCHEME = Scheme(
    plan,
    paper="Ioffe & Szegedy 2015, arXiv:1502.03167, section 3.1",
)
