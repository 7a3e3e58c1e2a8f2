"""LayerNorm over all channels and positions of a sample: GroupNorm with one group, which see.

gamma and beta stay per channel, as in GroupNorm (`torch.nn.GroupNorm(1, C)`). Approximate; of the norms with statistics
per sample the one that keeps most of the accuracy.
"""

from __future__ import annotations

from typing import Any

from normswap.folding.draft import Draft
from normswap.graph.inspection import Anatomy
from normswap.schemes.groupnorm import fit, pattern
from normswap.schemes.parts.per_sample_norms import dress_per_sample

PAPER = "Ba et al. 2016, arXiv:1607.06450, section 3"
SOURCE = "batchnorm"
__all__ = ["PAPER", "SOURCE", "exact", "fit", "pattern", "plan"]


def exact(options: dict[str, Any]) -> bool:
    return False


def plan(anatomy: Anatomy, *, steady: float = 0.5) -> Draft:
    """Args:
    steady: as in `groupnorm`.
    """
    return dress_per_sample(anatomy, 1, steady)
