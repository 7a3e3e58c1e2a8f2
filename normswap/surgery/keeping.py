"""Source and result on held-out images: how often do they give the same answer?"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from normswap.models import calling
from normswap.surgery import comparison
from normswap.surgery.held_out import Kept, summed


def measured(source: nn.Module, result: nn.Module, held: Sequence[Tensor]) -> Kept | None:
    """How far both agree on these batches of images; None without any.

    Raises:
        VerificationError: one of them does not run.
    """
    like, parts = calling.anchor(source), []
    for images in held:
        report = comparison.compare(source, result, images.to(like.device, like.dtype), exact=False)
        (error,) = report.logits
        parts.append((len(images), error.relative_l2, error.agreement))
    return summed(parts)
