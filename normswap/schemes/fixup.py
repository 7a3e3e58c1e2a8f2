"""Fixup: no normalization; a scalar multiplier per residual branch, scalar biases before each layer and activation.

y = skip + alpha f(x) with alpha = 1, and a scalar bias, 0, before every convolution, linear layer and activation. The
network is folded first, and its convolutions keep their biases per channel, so the function is kept. `--init fixup`
applies the paper's reset, which is not exact: the last convolution of each branch and the classifier are 0, and the
other convolutions of a branch with m of them are scaled by L^(-1/(2m-2)), L the number of residual blocks.
"""

from __future__ import annotations

from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.schemes import Scheme
from normswap.schemes.parts.fixup_scalars import add_scalars


def plan(anatomy: Anatomy, *, init: str) -> PlanBuilder:
    """Plan Fixup's multipliers and biases."""
    return add_scalars(anatomy, fresh=init == "fixup")


SCHEME = Scheme(
    plan,
    paper="Zhang, Dauphin & Ma 2019, arXiv:1901.09321, section 3",
    exact=lambda options: bool(options["init"] == "keep"),
    on_branches=True,
    decay="all",  # Zhang et al. 2019 decay everything
)
