"""ReLU6 and its kin with a bound per channel: so a factor per channel passes them, too."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normswap.layers.own import per_channel


class BoundedReLU(nn.Module):
    """y = min(max(x, 0), bound) per channel; c y is the same with c x and c bound.

    Args:
        bound: (C,), positive.
    """

    bound: Tensor

    def __init__(self, bound: Tensor) -> None:
        super().__init__()
        self.register_buffer("bound", bound)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, ...) to (N, C, ...)."""
        return torch.minimum(x.relu(), per_channel(self.bound, x))
