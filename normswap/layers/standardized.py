"""Convolutions with standardized filters that compute a given weight: timm's, and 1-D and 3-D ones.

timm's ScaledStdConv2d computes (w - mean w) / sqrt(var w + eps) * gain * gamma / sqrt(fan_in) per
filter (Brock et al. 2021, arXiv:2101.08692). With gain = sqrt(var w + eps) * sqrt(fan_in) / gamma
this is w - mean w, which equals w for filters that sum to zero. Other filters need one more number
each, their mean. It is stored times sqrt(fan_in): the gradient of a number that is added to all
weights of a filter is sqrt(fan_in) times as large as what they need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from timm.layers import Conv2dSame, ScaledStdConv2d, ScaledStdConv2dSame, pad_same
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from normswap.layers.folded import FoldOptions, folded
from normswap.layers.planned_layer import Linearity, PlannedLayer
from normswap.layers.reparametrized import (
    Standardized,
    StandardizedTensors,
    effective,
    keeps_mean,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Other(Standardized, _ConvNd):
    """Base of the standardized convolutions in 1-D and 3-D, which timm lacks."""

    def __init__(
        self,
        *args: Any,
        mean: bool = False,
        gamma: float = 1.0,
        eps: float = 1e-6,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        # As in timm, each filter has a gain that learns, and all have one fixed scale:
        # gamma / sqrt(fan-in).
        filters = len(self.weight)
        self.gain = nn.Parameter(self.weight.new_ones(filters, *(1,) * (self.weight.ndim - 1)))
        self.scale = gamma * self.weight[0].numel() ** -0.5
        self.eps = eps

        # If `mean` is true, the filters have means that learn. Otherwise all means are 0.
        filter_mean = nn.Parameter(self.weight.new_zeros(filters)) if mean else None
        self.register_parameter("mean", filter_mean)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, I, ...) to (N, O, ...)."""
        return self._conv_forward(x, effective(self), self.bias)


class ScaledStdConv1d(Other, nn.Conv1d):
    """A 1-D convolution with the standardized filters of timm's `ScaledStdConv2d`."""


class ScaledStdConv3d(Other, nn.Conv3d):
    """A 3-D convolution with the standardized filters of timm's `ScaledStdConv2d`."""


OTHERS: dict[type, type[Other]] = {nn.Conv1d: ScaledStdConv1d, nn.Conv3d: ScaledStdConv3d}
_SETTINGS = ("in_channels", "out_channels", "kernel_size", "stride", "dilation", "groups")
STANDARDIZED = (ScaledStdConv2d, ScaledStdConv2dSame, Standardized)


class MeanStdConv2d(Standardized, ScaledStdConv2d):
    """timm's `ScaledStdConv2d` with one more parameter: `mean` (O,), which is added to its filters.

    It is stored times sqrt(fan_in).
    """

    def __init__(self, *args: Any, same_pad: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.same_pad = same_pad
        self.mean = nn.Parameter(self.weight.new_zeros(len(self.weight)))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, I, H, W) to (N, O, H', W')."""
        if self.same_pad:
            x = pad_same(x, list(self.kernel_size), list(self.stride), list(self.dilation))
        return F.conv2d(
            x, effective(self), self.bias, self.stride, self.padding, self.dilation, self.groups
        )


@torch.no_grad()
def set_effective(conv: nn.Module, weight: Tensor) -> None:
    """Set the tensors of a standardized convolution, in place, so that it computes with `weight`.

    A convolution without the parameter `mean` computes with `weight` minus the mean of each filter.
    """
    # The layer computes with gain scale (w - mean w) / sqrt(var w + eps) per filter, plus the
    # parameter `mean` times scale.
    layer = cast(StandardizedTensors, conv)
    weight = weight.double()
    within_filter = tuple(range(1, weight.ndim))
    mean = weight.mean(within_filter, keepdim=True)
    variance = (weight - mean).square().mean(within_filter, keepdim=True)

    # The gain times scale is the filter's standard deviation, by which the layer divides.
    layer.weight.copy_(weight - mean)
    layer.gain.copy_((variance + layer.eps).sqrt() / layer.scale)
    if keeps_mean(layer):
        layer.mean.copy_(mean.flatten() / layer.scale)


def effective_weight(layer: Linearity) -> Tensor:
    """Return the weight that a linear layer, standardized or not, computes with."""
    if isinstance(layer, STANDARDIZED):
        return effective(layer)
    return layer.weight


@torch.no_grad()
def set_effective_weight(layer: Linearity, weight: Tensor) -> None:
    """Set the tensors of a linear layer, in place, so that it computes with `weight`.

    A standardized layer is set by `set_effective`. Any other layer gets `weight` itself.
    """
    if isinstance(layer, STANDARDIZED):
        set_effective(layer, weight)
    else:
        layer.weight.copy_(weight)


@torch.no_grad()
def scale_filters(layer: nn.Module, factor: Tensor) -> None:
    """Multiply each filter of a linear layer, in place, by its factor (O,)."""
    # A standardized filter ignores the scale of its weight, so its gain is multiplied instead.
    names = ["gain" if isinstance(layer, STANDARDIZED) else "weight"]
    if keeps_mean(layer):
        names.append("mean")

    for name in names:
        tensor: Tensor = getattr(layer, name)
        shape = (-1, *(1,) * (tensor.ndim - 1))
        tensor.copy_(tensor.double() * factor.to(tensor.device).view(shape))


class StandardizedConv(PlannedLayer):
    """A convolution that has absorbed its neighbours, such as norms, with standardized filters.

    Each filter is gain scale (v - mean v) / sqrt(var v + eps), plus perhaps a mean. `scale` and
    `eps` are constants. v, the gain and the mean are parameters.
    """

    @classmethod
    def replacing(
        cls,
        old: _ConvNd,
        *reads: nn.Module,
        like: Tensor,
        mean: bool,
        padding: Sequence[int] | None = None,
        gamma: float | None = None,
        **fold_options: Unpack[FoldOptions],
    ) -> nn.Module:
        """Return the standardized convolution.

        Args:
            old: The convolution.
            reads: The neighbours that are absorbed.
            like: An empty tensor of the model's dtype. If that is float64, so is the result.
            mean: Whether each filter keeps its mean as one more parameter.
            padding: The padding of a convolution with a forward of its own
                (`own_forwards.even_padding`). None means the padding that `old` states.
            gamma: None sets gains and means so that the function is kept. A number is for a fresh
                network: the weight is the folded one as it is, the gains are 1, and every filter is
                multiplied by the number, which is the gamma of the activation in front.
            fold_options: Options of `folded`.
        """
        conv = folded(old, reads, like=like, **fold_options)
        if not isinstance(conv, _ConvNd):
            raise TypeError(f"a {type(conv).__name__} is no convolution")

        fixed_gamma = 1.0 if gamma is None else gamma
        new = _empty(conv, mean=mean, padding=padding, gamma=fixed_gamma).to(conv.weight.device)
        if gamma is None:
            set_effective(new, conv.weight)
        else:
            new.weight.copy_(conv.weight)
        new.weight.requires_grad_(conv.weight.requires_grad)
        if conv.bias is not None:
            new.bias = conv.bias
        return new


def _empty(conv: _ConvNd, *, mean: bool, padding: Sequence[int] | None, gamma: float) -> _ConvNd:
    """Return a standardized convolution with the settings of `conv`, but without its values.

    It is on the CPU.

    Args:
        conv: The convolution.
        mean: Whether the new layer has a parameter for the mean of its filters.
        padding: The new layer's padding. None keeps the padding of `conv`.
        gamma: A fixed factor of all filters.
    """
    settings: dict[str, Any] = {name: getattr(conv, name) for name in _SETTINGS}
    # Somebody may have pruned the weight by hand, and left `out_channels` and `in_channels` as they
    # were. So both are read from the weight's shape.
    settings["out_channels"] = conv.weight.shape[0]
    settings["in_channels"] = conv.weight.shape[1] * conv.groups
    settings["bias"] = conv.bias is not None
    settings["gamma"] = gamma
    settings["dtype"] = conv.weight.dtype
    padding_here: Any = conv.padding if padding is None else tuple(padding)
    pads_to_same = isinstance(conv, Conv2dSame)

    # A constructor draws weights, which are not needed. It draws them on the CPU, whose random
    # numbers are put back, so that the user's stay as they are.
    with torch.random.fork_rng(devices=[]):
        for torch_class, other_class in OTHERS.items():
            if isinstance(conv, torch_class):
                return other_class(mean=mean, padding=padding_here, **settings)
        if mean:
            return MeanStdConv2d(same_pad=pads_to_same, padding=padding_here, **settings)
        # timm's class computes its padding from the input's size, so it gets none here.
        if pads_to_same:
            return ScaledStdConv2dSame(**settings)
        return ScaledStdConv2d(padding=padding_here, **settings)
