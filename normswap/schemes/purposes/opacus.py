"""The step that `--for opacus` adds to a conversion: see `purposes`."""

from __future__ import annotations

from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.schemes import Scheme
from normswap.schemes.parts.without_batches import plan_opacus


def plan(anatomy: Anatomy) -> PlanBuilder:
    """Plan what Opacus needs."""
    return plan_opacus(anatomy)


SCHEME = Scheme(
    plan,
    may_do_nothing=True,
)
