"""Weight normalization: W = g v / |v| per filter, with g the filter's norm; no normalization of activations.

The network is folded first; g and v then describe the same filters, so nothing is lost. Filters that were switched off
(gamma = 0) get g = 0 and keep a direction. torch's `parametrizations.weight_norm`; every convolution and linear layer.
"""

from __future__ import annotations

from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.schemes import Scheme
from normswap.schemes.parts.weight_parametrization import reparametrize


def plan(anatomy: Anatomy) -> PlanBuilder:
    """Plan a weight norm for every linear layer."""
    return reparametrize(anatomy, "WeightNorm")


SCHEME = Scheme(
    plan,
    paper="Salimans & Kingma 2016, arXiv:1602.07868, section 2",
)
