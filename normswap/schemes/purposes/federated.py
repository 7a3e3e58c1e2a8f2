"""The step that `--for federated` adds to a conversion: see `purposes`."""

from __future__ import annotations

from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.schemes import Scheme
from normswap.schemes.parts.without_batches import plan_federated


def plan(anatomy: Anatomy) -> PlanBuilder:
    """Plan what federated training needs."""
    return plan_federated(anatomy)


SCHEME = Scheme(
    plan,
    may_do_nothing=True,
)
