"""LayerNorms and RMSNorms whose means are linear layers, for runtimes that split their graph at a mean.

The mean over C channels is a linear layer with C weights of 1 / C, and eps is its bias: y = gamma (x - m) r + beta,
with m = mean(x) and r = (mean((x - m)^2) + eps)^(-1/2). These are the same sums, exact but for their order.
"""

from __future__ import annotations

import copy
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from normswap.layers import channel_norm
from normswap.layers.known_norms import kind_of

T = TypeVar("T", bound=nn.Module)


def with_linear_means(network: T) -> T:
    """A copy whose norms over the last dimension take their means by linear layers; it computes the same."""
    twin = copy.deepcopy(network)
    dtype = next((tensor.dtype for tensor in twin.parameters() if tensor.is_floating_point()), torch.float32)
    for path, module in list(twin.named_modules()):
        if channel_norm.channel_dim(module) == -1 and channel_norm.refusal(module) is None:
            twin.set_submodule(path, _LinearMeans(module, dtype))
    return twin


class _LinearMeans(nn.Module):
    """The norm over the last dimension that `norm` is, with its gamma and beta."""

    def __init__(self, norm: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        kind, eps = kind_of(norm), getattr(norm, "eps", None)
        gamma, beta = getattr(norm, "weight", None), getattr(norm, "bias", None)
        (channels,) = cast(channel_norm.PositionNorm, norm).normalized_shape
        eps = torch.finfo(dtype).eps if eps is None else eps
        self.mean = _mean(channels, None, dtype) if kind is not None and kind.centres else None
        self.square = _mean(channels, eps, dtype)
        self.weight, self.bias = gamma, beta

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., C) to the same shape."""
        if self.mean is not None:
            x = x - self.mean(x)
        y = x * self.square(x * x).rsqrt()
        y = y if self.weight is None else y * self.weight
        return y if self.bias is None else y + self.bias


def _mean(channels: int, more: float | None, dtype: torch.dtype) -> nn.Linear:
    """From (..., C) to (..., 1): the mean, and `more`."""
    layer = nn.Linear(channels, 1, bias=more is not None, dtype=dtype).requires_grad_(False)
    layer.weight.fill_(1 / channels)
    if more is not None:
        layer.bias.fill_(more)
    return layer
