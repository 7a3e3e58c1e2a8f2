"""Convolutions whose weight is standardized: timm's ScaledStdConv2d, that compute a given weight exactly.

timm computes (w - mean w) / sqrt(var w + eps) * gain * gamma / sqrt(fan_in) per filter (Brock et al. 2021,
section 3.3). With gain = sqrt(var w + eps) * sqrt(fan_in) / gamma this is w - mean w: any filter that sums to zero,
exactly. A convolution whose filters do not sum to zero needs one more number per filter, its mean.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import ScaledStdConv2d, ScaledStdConv2dSame, pad_same
from torch import Tensor, nn

from normswap.layers.folded import Folded
from normswap.layers.own import OwnLayer
from normswap.layers.seat import Seat

STANDARDIZED = (ScaledStdConv2d, ScaledStdConv2dSame)


class MeanStdConv2d(OwnLayer, ScaledStdConv2d):
    """timm's module with one more parameter per filter, `mean` (O, 1, 1, 1), added to the standardized one."""

    ROLES = {"mean": "filter_mean"}

    def __init__(self, *args: Any, same_pad: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.same_pad = same_pad
        self.mean = nn.Parameter(torch.zeros_like(self.gain))

    def forward(self, x: Tensor) -> Tensor:
        """(N, I, H, W) -> (N, O, H', W')"""
        if self.same_pad:
            x = pad_same(x, list(self.kernel_size), list(self.stride), list(self.dilation))
        return F.conv2d(x, self.effective_weight(), self.bias, self.stride, self.padding, self.dilation, self.groups)

    def effective_weight(self) -> Tensor:
        """The weight it computes with (`reparametrized` asks for it)."""
        return effective(self)


def effective(conv: Any) -> Tensor:
    """The weight (O, I / groups, kh, kw) that a standardized convolution uses."""
    flat, gain = conv.weight.reshape(1, conv.out_channels, -1), (conv.gain * conv.scale).view(-1)
    weight = F.batch_norm(flat, None, None, weight=gain, training=True, momentum=0.0, eps=conv.eps)
    weight = weight.reshape_as(conv.weight)
    return weight + conv.mean if isinstance(conv, MeanStdConv2d) else weight


@torch.no_grad()
def set_effective(conv: Any, weight: Tensor) -> None:
    """Let `effective` be `weight`, or, without `mean`, what is left of it without its filters' means."""
    weight = weight.double()
    mean = weight.mean((1, 2, 3), keepdim=True)
    variance = (weight - mean).square().mean((1, 2, 3), keepdim=True)
    conv.weight.copy_(weight - mean)
    conv.gain.copy_((variance + conv.eps).sqrt() / conv.scale)
    if isinstance(conv, MeanStdConv2d):
        conv.mean.copy_(mean)


class StandardizedConv(Seat):
    """What `layers.Folded` computes, as timm's ScaledStdConv2d; with `mean`, its filters need not sum to zero."""

    @classmethod
    def replacing(cls, old: nn.Conv2d, *reads: nn.Module, like: Tensor, mean: bool, **takes: Any) -> ScaledStdConv2d:
        conv: Any = Folded.replacing(old, *reads, like=like, **takes)
        same = type(conv).__name__ == "Conv2dSame"
        args = (conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride)
        rest = {"dilation": conv.dilation, "groups": conv.groups, "bias": conv.bias is not None,
                "device": conv.weight.device, "dtype": conv.weight.dtype}  # fmt: skip
        if mean:
            new: Any = MeanStdConv2d(*args, padding=conv.padding, same_pad=same, **rest)
        elif same:
            new = ScaledStdConv2dSame(*args, **rest)
        else:
            new = ScaledStdConv2d(*args, padding=conv.padding, **rest)
        set_effective(new, conv.weight)
        new.weight.requires_grad_(conv.weight.requires_grad)
        if conv.bias is not None:
            new.bias = conv.bias
        return new
