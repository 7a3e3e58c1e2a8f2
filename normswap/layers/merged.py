"""A convolution that computes what several branches did, and the placeholders of those branches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from normswap import copying
from normswap.copying import doubled
from normswap.layers.planned_layer import OwnLayer, PlannedLayer
from normswap.plan import AbsorbMode, Absorption
from normswap.sites import affine


def tap_offsets(conv: _ConvNd) -> list[range]:
    """Return the offsets of a kernel's taps in each dimension, for a convolution of stride 1.

    To write position p, a tap with offset d reads position p + d.
    """
    padding = cast("tuple[int, ...]", conv.padding)
    sides = zip(conv.kernel_size, conv.dilation, padding, strict=True)
    return [range(-pad, (size - 1) * step - pad + 1, step) for size, step, pad in sides]


class Merged(PlannedLayer):
    """A convolution that has absorbed parallel branches: its output is the sum of all of them.

    The branches are convolutions, or scales and shifts, that read the same input. A scale and shift
    of the sum is absorbed, too.
    """

    @classmethod
    def replacing(
        cls,
        old: _ConvNd,
        *reads: nn.Module,
        like: Tensor,
        takes: Sequence[Absorption],
        skips: int = 0,
    ) -> _ConvNd:
        """Return the convolution with W' = W + sum of the other kernels, b' = b + sum of biases.

        Each kernel is added at the taps that read the same positions. All is computed in float64.

        Args:
            old: The convolution with the largest kernel.
            reads: The other terms of the sum, and the affine maps behind it.
            like: An empty tensor of the model's dtype. If that is float64, so is the result.
            takes: `SUM` or `AFTER` for each of `reads`.
            skips: The number k of skip connections: terms of the sum that are the input x itself.
                The network goes on adding k x behind the convolution. If a map s x + t follows the
                sum, the convolution therefore computes k (s - 1) x as well.
        """
        weight = old.weight.detach().to(torch.float64, copy=True)
        bias = doubled(old.bias, weight.new_zeros(len(weight)))

        for module, absorption in zip(reads, takes, strict=True):
            if absorption.way is AbsorbMode.SUM:
                bias = bias + _add_term(weight, old, module)
                continue

            # With k skips: s (W x + b + k x) + t = (s W + k (s - 1)) x + (s b + t) + k x.
            scale, shift = _map_by_channel(module, weight)
            weight *= scale.reshape(-1, *(1,) * (weight.ndim - 1))
            _add_scale(weight, old, skips * (scale - 1))
            bias = scale * bias + shift

        dtype = like.dtype if like.dtype == torch.float64 else old.weight.dtype
        new = copying.duplicate(old, {}).to(dtype)
        new.weight.copy_(weight)
        new.bias = nn.Parameter(bias.to(dtype), requires_grad=old.weight.requires_grad)
        return new


def _map_by_channel(module: nn.Module, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return s and t of a module y = s x + t, one number each for every filter of a convolution.

    Args:
        module: The module, such as a BatchNorm or a `ChannelAffine`.
        weight: The weight (O, ...) of the convolution, on whose device both are returned.
    """
    scale, shift = affine.read_map(module)
    channels = len(weight)
    return scale.to(weight.device).expand(channels), shift.to(weight.device).expand(channels)


def _add_term(weight: Tensor, main: _ConvNd, other: nn.Module) -> Tensor:
    """Add a term of the sum to the weight of `main`, in place, and return the term's bias (O,).

    Args:
        weight: The weight of `main`, in float64.
        main: The convolution that absorbs the term. Its kernel has a tap at every position that
            the term reads.
        other: The term: a convolution, or an affine map of the input.
    """
    if not isinstance(other, _ConvNd):
        scale, shift = _map_by_channel(other, weight)
        _add_scale(weight, main, scale)
        return shift

    # In each dimension, find the taps of `main` that read the same positions as those of `other`.
    shared_taps: list[list[int]] = []
    for main_side, other_side in zip(tap_offsets(main), tap_offsets(other), strict=True):
        shared_taps.append([main_side.index(offset) for offset in other_side])

    kernel = other.weight.detach().double()
    main_taps = product(*shared_taps)
    other_taps = product(*map(range, other.kernel_size))
    for main_tap, other_tap in zip(main_taps, other_taps, strict=True):
        _at_tap(weight, main_tap).add_(_at_tap(kernel, other_tap))
    return doubled(other.bias, weight.new_zeros(len(weight)))


def _at_tap(kernel: Tensor, tap: Sequence[int]) -> Tensor:
    """Return a view (O, I) of the kernel (O, I, ...) at one tap.

    Each `select` drops the last dimension, so the last index of the tap is used first.
    """
    for index in reversed(tap):
        kernel = kernel.select(-1, index)
    return kernel


def _add_scale(weight: Tensor, main: _ConvNd, scale: Tensor) -> None:
    """Change a kernel, in place, so that the convolution adds scale * x to its output.

    Args:
        weight: The kernel of `main`, (O, I / groups, ...), in float64.
        main: The convolution. One tap of its kernel reads x at offset 0 (`tap_offsets`).
        scale: The factor of each channel, (O,).
    """
    channel = torch.arange(len(weight), device=weight.device)
    center_tap = [side.index(0) for side in tap_offsets(main)]

    # With groups, input channel c stands at index c modulo I / groups of its filters.
    _at_tap(weight, center_tap)[channel, channel % weight.shape[1]] += scale


class Zero(PlannedLayer, OwnLayer):
    """The number 0, in place of a branch that another convolution computes now."""

    OUTCOME = "gone"

    def forward(self, x: Tensor) -> float:
        """Map anything to 0.0, which a sum of tensors takes."""
        return 0.0

    @classmethod
    def replacing(cls, old: nn.Module, *, like: Tensor) -> Zero:
        return cls()
