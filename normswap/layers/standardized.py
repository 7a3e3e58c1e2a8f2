"""Convolutions with standardized weights that compute a given weight: timm's ScaledStdConv2d, and
1-D and 3-D ones.

timm computes (w - mean w) / sqrt(var w + eps) * gain * gamma / sqrt(fan_in) per filter (Brock et
al. 2021, arXiv:2101.08692). With gain = sqrt(var w + eps) * sqrt(fan_in) / gamma this is w - mean
w, exact for filters that sum to zero. Other filters need one more number each, their mean.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Conv2dSame, ScaledStdConv2d, ScaledStdConv2dSame, pad_same
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from normswap.layers.folded import folded
from normswap.layers.planned_layer import Linearity, PlannedLayer
from normswap.layers.reparametrized import Standardized, effective, keeps_mean


class Other(Standardized, _ConvNd):
    """A standardized convolution of dimensions that timm lacks."""

    def __init__(self, *args: Any, mean: bool = False, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(
            self.weight.new_ones(len(self.weight), *(1,) * (self.weight.ndim - 1))
        )
        self.scale = self.weight[0].numel() ** -0.5
        self.eps = eps
        self.register_parameter("mean", nn.Parameter(torch.zeros_like(self.gain)) if mean else None)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, I, ...) to (N, O, ...)."""
        return self._conv_forward(x, effective(self), self.bias)


class ScaledStdConv1d(Other, nn.Conv1d):
    """The `ScaledStdConv2d` of timm, in 1d."""


class ScaledStdConv3d(Other, nn.Conv3d):
    """The `ScaledStdConv2d` of timm, in 3d."""


OTHERS: dict[type, type[Other]] = {nn.Conv1d: ScaledStdConv1d, nn.Conv3d: ScaledStdConv3d}
STANDARDIZED = (ScaledStdConv2d, ScaledStdConv2dSame, Standardized)


class MeanStdConv2d(Standardized, ScaledStdConv2d):
    """timm's module with one more parameter per filter, `mean` (O, 1, 1, 1), added to the
    standardized one.
    """

    def __init__(self, *args: Any, same_pad: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.same_pad = same_pad
        self.mean = nn.Parameter(torch.zeros_like(self.gain))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, I, H, W) to (N, O, H', W')."""
        if self.same_pad:
            x = pad_same(x, list(self.kernel_size), list(self.stride), list(self.dilation))
        return F.conv2d(
            x, effective(self), self.bias, self.stride, self.padding, self.dilation, self.groups
        )


@torch.no_grad()
def set_effective(conv: Any, weight: Tensor) -> None:
    """Let a standardized convolution compute with `weight`, less the filters' means if it has no
    `mean`.
    """
    weight = weight.double()
    every = tuple(range(1, weight.ndim))
    mean = weight.mean(every, keepdim=True)
    variance = (weight - mean).square().mean(every, keepdim=True)
    conv.weight.copy_(weight - mean)
    conv.gain.copy_((variance + conv.eps).sqrt() / conv.scale)
    if keeps_mean(conv):
        conv.mean.copy_(mean)


def computed(layer: Linearity) -> Tensor:
    """The weight that a linear layer, standardized or not, computes with."""
    if isinstance(layer, STANDARDIZED):
        return effective(layer)
    return layer.weight


@torch.no_grad()
def compute(layer: Linearity, weight: Tensor) -> None:
    """Let a linear layer, standardized or not, compute with `weight` (`set_effective`)."""
    if isinstance(layer, STANDARDIZED):
        set_effective(layer, weight)
    else:
        layer.weight.copy_(weight)


@torch.no_grad()
def scale_filters(layer: Any, factor: Tensor) -> None:
    """Multiply each filter of a linear layer, standardized or not, by a factor (O,); a weight of 0
    stays 0.
    """
    standardized = isinstance(layer, STANDARDIZED)
    tensors: list[Tensor] = [layer.gain if standardized else layer.weight]
    if keeps_mean(layer):
        tensors.append(layer.mean)
    for tensor in tensors:
        tensor.copy_(tensor.double() * factor.to(tensor.device).view(-1, *(1,) * (tensor.ndim - 1)))


class StandardizedConv(PlannedLayer):
    """`Folded` with standardized filters and one mean each with `mean`; `padding`:
    `own_forwards.even_padding`.
    """

    @classmethod
    def replacing(
        cls,
        old: _ConvNd,
        *reads: nn.Module,
        like: Tensor,
        mean: bool,
        padding: Sequence[int] | None = None,
        **how: Any,
    ) -> nn.Module:
        conv = folded(old, reads, like=like, **how)
        if not isinstance(conv, _ConvNd):
            raise TypeError(f"a {type(conv).__name__} is no convolution")
        same = isinstance(conv, Conv2dSame)
        names = ("in_channels", "out_channels", "kernel_size", "stride", "dilation", "groups")
        args: dict[str, Any] = {name: getattr(conv, name) for name in names}
        args |= {
            "bias": conv.bias is not None,
            "device": conv.weight.device,
            "dtype": conv.weight.dtype,
        }
        padded = conv.padding if padding is None else tuple(padding)
        if not same:
            args["padding"] = padded
        other = next(
            (class_of_ours for kind, class_of_ours in OTHERS.items() if isinstance(conv, kind)),
            None,
        )
        if other:
            new: _ConvNd = other(mean=mean, **args)
        elif mean:
            new = MeanStdConv2d(same_pad=same, **{**args, "padding": padded})
        elif same:
            new = ScaledStdConv2dSame(**args)
        else:
            new = ScaledStdConv2d(**args)
        set_effective(new, conv.weight)
        new.weight.requires_grad_(conv.weight.requires_grad)
        if conv.bias is not None:
            new.bias = conv.bias
        return new
