"""What `--for federated` adds to a conversion: see `purposes`."""

from __future__ import annotations

from normswap.folding.draft import Draft
from normswap.graph.inspection import Anatomy
from normswap.schemes import Scheme
from normswap.schemes.parts.without_batches import plan_federated


def plan(anatomy: Anatomy) -> Draft:
    return plan_federated(anatomy)


SCHEME = Scheme(
    plan,
    may_do_nothing=True,
)
