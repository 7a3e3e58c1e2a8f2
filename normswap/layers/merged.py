"""A convolution that computes what several branches did, and the placeholders of those branches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import product
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from normswap.copying import doubled
from normswap.layers import affine
from normswap.layers.planned_layer import OwnLayer, PlannedLayer
from normswap.plan import AbsorbMode, Absorption


def offsets(conv: _ConvNd) -> list[range]:
    """By dimension, each tap's offset from the position that the convolution writes (with stride
    1).
    """
    sides = zip(conv.kernel_size, conv.dilation, cast("tuple[int, ...]", conv.padding), strict=True)
    return [range(-pad, (size - 1) * step - pad + 1, step) for size, step, pad in sides]


class Merged(PlannedLayer):
    """A convolution that absorbs others with the same input (`SUM`), then scales of the sum
    (`AFTER`).
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
        """W' = W + sum of the others' kernels at their taps, b' = b + sum of their biases, in
        float64.

        `skips`: how often the input itself is a term of the sum that an `AFTER` scales; each adds
        (s - 1) x by one tap.
        """
        weight = old.weight.detach().to(torch.float64, copy=True)
        bias = doubled(old.bias, weight.new_zeros(len(weight)))
        for read, absorption in zip(reads, takes, strict=True):
            if absorption.way is AbsorbMode.SUM:
                bias = bias + _add(weight, old, read)
                continue
            scale, shift = (
                value.to(weight.device).expand(len(weight)) for value in affine.read(read)
            )
            weight *= scale.reshape(-1, *(1,) * (weight.ndim - 1))
            _add_scale(weight, old, skips * (scale - 1))
            bias = scale * bias + shift
        dtype = like.dtype if like.dtype == torch.float64 else old.weight.dtype
        new = copy.deepcopy(old).to(dtype)
        new.weight.copy_(weight)
        new.bias = nn.Parameter(bias.to(dtype), requires_grad=old.weight.requires_grad)
        return new


def _add(weight: Tensor, main: _ConvNd, other: nn.Module) -> Tensor:
    if not isinstance(other, _ConvNd):
        scale, shift = (value.to(weight.device).expand(len(weight)) for value in affine.read(other))
        _add_scale(weight, main, scale)
        return shift
    places = [
        [side.index(tap) for tap in fewer]
        for side, fewer in zip(offsets(main), offsets(other), strict=True)
    ]
    kernel = other.weight.detach().double()
    for here, there in zip(product(*places), product(*map(range, other.kernel_size)), strict=True):
        _tap(weight, here).add_(_tap(kernel, there))
    return doubled(other.bias, weight.new_zeros(len(weight)))


def _tap(kernel: Tensor, place: Sequence[int]) -> Tensor:
    for index in reversed(place):
        kernel = kernel.select(-1, index)
    return kernel


def _add_scale(weight: Tensor, main: _ConvNd, scale: Tensor) -> None:
    """Add a scale per channel to the kernel, at the tap of offset 0."""
    channel = torch.arange(len(weight), device=weight.device)
    _tap(weight, [side.index(0) for side in offsets(main)])[channel, channel % weight.shape[1]] += (
        scale
    )


class Zero(PlannedLayer, OwnLayer):
    """In the place of a branch that another convolution computes now: the number 0."""

    OUTCOME = "gone"

    def forward(self, x: Tensor) -> float:
        """Map anything to 0.0, which a sum of tensors takes."""
        return 0.0

    @classmethod
    def replacing(cls, old: nn.Module, *, like: Tensor) -> Zero:
        return cls()
