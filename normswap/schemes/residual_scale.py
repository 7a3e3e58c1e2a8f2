"""Residual scaling: y = a x + b f(x) with fixed a and b per block, by a published rule; no normalization.

Rules, for block l of L: `balduzzi` a = b = 1/sqrt(2); `szegedy` a = 1, b = 0.2; `hanin` a = 1, b = 0.9^l; `arpit`
a = 1, b = 1/L; `rescale` b^2 = 1/(l + L), a^2 = 1 - b^2. Any such sequence is a rescaling: with x~ = g x, the first
convolutions of f are divided by g and the last is multiplied by a g / b, so the function is kept. g is chosen so that
it is 1 at the end of every stage. b sits at the end of the branch. a needs a module on the sum: a ReLU module after it,
where relu(a z) = a relu(z), and b / a stays on the branch. Without one (pre-activation networks) the branches, which
write to the stream, hold it instead: with the stream divided by a_1 ... a_l, block l adds b / (a_1 ... a_l) f(x), where
the product starts anew with every projection.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.schemes import Scheme
from normswap.schemes.parts.fixed_factors import scale_sums

RULES: dict[str, Callable[[int, int], tuple[float, float]]] = {
    "balduzzi": lambda block, depth: (math.sqrt(0.5), math.sqrt(0.5)),
    "szegedy": lambda block, depth: (1.0, 0.2),
    "hanin": lambda block, depth: (1.0, 0.9**block),
    "arpit": lambda block, depth: (1.0, 1 / depth),
    "rescale": lambda block, depth: (math.sqrt(1 - 1 / (block + depth)), math.sqrt(1 / (block + depth))),
}


def plan(anatomy: Anatomy, *, rule: str) -> PlanBuilder:
    """Plan the two factors of each residual sum."""
    depth = len(anatomy.blocks)
    return scale_sums(anatomy, [RULES[rule](block, depth) for block in range(1, depth + 1)])


SCHEME = Scheme(
    plan,
    paper="Balduzzi et al. 2017, arXiv:1702.08591; Szegedy et al. 2016, arXiv:1602.07261, section 3.3; "
    "Hanin & Rolnick 2018, arXiv:1803.01719; Arpit et al. 2019, arXiv:1906.02341; Shao et al. 2020, arXiv:2001.07094",
    on_branches=True,
)
