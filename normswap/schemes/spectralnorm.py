"""Spectral normalization: W = alpha V / sigma(V), sigma the largest singular value, alpha one scalar per layer.

The network is folded first. alpha starts as sigma(W), so nothing is lost; the paper has alpha = 1 (a Lipschitz bound),
which would change the function. torch's `parametrizations.spectral_norm`; every convolution and linear layer.
"""

from __future__ import annotations

from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.schemes import Scheme
from normswap.schemes.parts.weight_parametrization import reparametrize


def plan(anatomy: Anatomy) -> PlanBuilder:
    """Plan a spectral norm for every linear layer."""
    return reparametrize(anatomy, "SpectralNorm")


SCHEME = Scheme(
    plan,
    paper="Miyato et al. 2018, arXiv:1802.05957, section 2.1",
)
