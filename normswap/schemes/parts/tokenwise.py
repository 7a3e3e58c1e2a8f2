"""LayerNorms take statistics of each token: why no layer without statistics is put in their place."""

from __future__ import annotations

from torch import nn

from normswap.errors import RefusedError, spelled
from normswap.graph.inspection import Anatomy


def require_no_tokenwise_norms(anatomy: Anatomy, wanted: str) -> None:
    """Refuse a network whose norms are LayerNorms, for a target that needs BatchNorms.

    Raises:
        RefusedError: with `wanted`, what cannot be done.
    """
    if any(isinstance(module, nn.LayerNorm) for module in anatomy.traced.modules.values()):
        raise RefusedError(
            wanted,
            "its LayerNorms take statistics of each token, and without these too much is lost",
            f"'{spelled('to', 'rmsnorm')}' is exact, where it can be had",
        )
