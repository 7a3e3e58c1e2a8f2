"""Convolutions whose weight is standardized, that compute a given weight exactly: timm's ScaledStdConv2d, and the same
of one and of three dimensions, which timm does not have.

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


class Standardized(OwnLayer):
    """Scaled weight standardization of a convolution that timm has no class for; `mean` is None or a parameter."""

    ROLES = {"mean": "filter_mean"}

    def __init__(self, *args: Any, mean: bool = False, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        weight: Any = self.weight
        self.gain = nn.Parameter(weight.new_ones(len(weight), *(1,) * (weight.ndim - 1)))
        self.scale, self.eps = weight[0].numel() ** -0.5, eps
        self.register_parameter("mean", nn.Parameter(torch.zeros_like(self.gain)) if mean else None)

    def forward(self, x: Tensor) -> Tensor:
        """(N, I, ...) -> (N, O, ...)"""
        conv: Any = self
        return conv._conv_forward(x, self.effective_weight(), conv.bias)  # type: ignore[no-any-return]

    def effective_weight(self) -> Tensor:
        """The weight it computes with (`reparametrized` asks for it)."""
        return effective(self)


class ScaledStdConv1d(Standardized, nn.Conv1d):
    pass


class ScaledStdConv3d(Standardized, nn.Conv3d):
    pass


OTHERS: dict[type, type[Standardized]] = {nn.Conv1d: ScaledStdConv1d, nn.Conv3d: ScaledStdConv3d}
STANDARDIZED = (ScaledStdConv2d, ScaledStdConv2dSame, Standardized)


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


def keeps_mean(module: nn.Module) -> bool:
    """Whether its filters need not sum to zero."""
    return isinstance(module, STANDARDIZED) and getattr(module, "mean", None) is not None


def effective(conv: Any) -> Tensor:
    """The weight (O, I / groups, ...) that a standardized convolution uses."""
    flat, gain = conv.weight.reshape(1, conv.out_channels, -1), (conv.gain * conv.scale).view(-1)
    weight = F.batch_norm(flat, None, None, weight=gain, training=True, momentum=0.0, eps=conv.eps)
    weight = weight.reshape_as(conv.weight)
    return weight + conv.mean if keeps_mean(conv) else weight


@torch.no_grad()
def set_effective(conv: Any, weight: Tensor) -> None:
    """Let `effective` be `weight`, or, without `mean`, what is left of it without its filters' means."""
    weight = weight.double()
    every = tuple(range(1, weight.ndim))
    mean = weight.mean(every, keepdim=True)
    variance = (weight - mean).square().mean(every, keepdim=True)
    conv.weight.copy_(weight - mean)
    conv.gain.copy_((variance + conv.eps).sqrt() / conv.scale)
    if keeps_mean(conv):
        conv.mean.copy_(mean)


class StandardizedConv(Seat):
    """What `layers.Folded` computes, standardized; with `mean`, its filters need not sum to zero."""

    @classmethod
    def replacing(cls, old: Any, *reads: nn.Module, like: Tensor, mean: bool, **takes: Any) -> nn.Module:
        conv: Any = Folded.replacing(old, *reads, like=like, **takes)
        same = type(conv).__name__ == "Conv2dSame"
        args = (conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride)
        rest = {"dilation": conv.dilation, "groups": conv.groups, "bias": conv.bias is not None,
                "device": conv.weight.device, "dtype": conv.weight.dtype}  # fmt: skip
        other = next((made for kind, made in OTHERS.items() if isinstance(conv, kind)), None)
        if other:
            new: Any = other(*args, padding=conv.padding, mean=mean, **rest)
        elif mean:
            new = MeanStdConv2d(*args, padding=conv.padding, same_pad=same, **rest)
        elif same:
            new = ScaledStdConv2dSame(*args, **rest)
        else:
            new = ScaledStdConv2d(*args, padding=conv.padding, **rest)
        set_effective(new, conv.weight)
        new.weight.requires_grad_(conv.weight.requires_grad)
        if conv.bias is not None:
            new.bias = conv.bias
        return new
