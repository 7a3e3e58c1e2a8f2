"""Source and result on held-out images: how often do they give the same answer?"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from normswap.models.calling import Example
from normswap.surgery import comparison
from normswap.surgery.held_out import Kept, summed


def measured(source: nn.Module, result: nn.Module, held: Sequence[Example]) -> Kept | None:
    """How far both agree on these batches of images; None without any.

    Raises:
        VerificationError: one of them does not run.
    """
    parts = []
    for example in held:
        report = comparison.compare(source, result, example.like(source), exact=False)
        (error,) = report.logits
        parts.append((example.count, error.relative_l2, error.agreement))
    return summed(parts)
