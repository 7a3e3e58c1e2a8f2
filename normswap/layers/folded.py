"""A linear layer that has absorbed its neighbours' affine maps: the algebra of folding, and its
inverse.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normswap import copying
from normswap.errors import RefusedError
from normswap.layers import affine, reparametrized
from normswap.layers.planned_layer import Linearity, PlannedLayer
from normswap.plan import AbsorbMode, Absorption


def folded(
    old: Linearity,
    reads: Sequence[nn.Module],
    *,
    like: Tensor,
    takes: Sequence[Absorption] = (),
    gain: float = 1.0,
    in_gain: float = 1.0,
    bake: bool = False,
    centred: bool = False,
) -> Linearity:
    """A copy of `old` with weight W' and bias b', computed in float64.

    Args:
        reads: the modules that are absorbed.
        takes: how, for each of them (`plan.AbsorbMode`).
        gain: multiplies the output; `in_gain`: multiplies the input.
        bake: first make `old` a plain layer (`reparametrized`).
        centred: at the end subtract the mean over output channels: W' = (I - 11'/C) W, b' = b -
            mean(b).
    """
    if next(old.parameters(), None) is None:
        raise TypeError(f"a {type(old).__name__} has no weight to fold into")
    old_dtype = next(old.parameters()).dtype
    dtype = like.dtype if like.dtype == torch.float64 else old_dtype
    if bake:
        old = reparametrized.plain(old)
    weight, restore = _by_group(old, old.weight.detach().to(torch.float64, copy=True))
    bias = copying.doubled(old.bias, weight.new_zeros(weight.shape[0] * weight.shape[1]))
    if in_gain != 1:
        weight *= in_gain
    for module, absorption in zip(reads, takes, strict=True):
        bias = _absorb(weight, bias, module, absorption, like.dtype)
    if gain != 1:
        weight *= gain
    if centred:
        weight -= weight.mean((0, 1), keepdim=True)
        bias = bias - bias.mean()
    # A gate's first linear map is only rescaled, so it gets no new bias.
    if not reads and gain == 1 and old.bias is None:
        return _with(old, restore(weight), None, dtype)
    return _with(old, restore(weight), bias * gain, dtype)


class Folded(PlannedLayer):
    """It keeps its class and its name."""

    CASTS = True

    @classmethod
    def replacing(cls, old: Linearity, *reads: nn.Module, like: Tensor, **how: Any) -> Linearity:
        return folded(old, reads, like=like, **how)

    @classmethod
    def invert(
        cls, old: Linearity, now: Linearity, reads: tuple[nn.Module, ...], **how: Any
    ) -> None:
        takes: Sequence[Absorption] = how.get("takes", ())
        absorbed = zip(reads, takes, strict=True)
        after = [
            (norm, absorption.channels)
            for norm, absorption in absorbed
            if absorption.way is AbsorbMode.AFTER
        ]
        if len(after) > 1 or any(absorption.way is AbsorbMode.BEFORE for absorption in takes):
            raise RefusedError("cannot unfold", "it took in more than one norm")
        # Folding a weight of ones gives the factor of each weight.
        fresh = old.weight.clone()
        old.weight.fill_(1)
        factor = folded(copy.deepcopy(old).double(), reads, like=old.weight, **how).weight
        dead = factor == 0
        weight = now.weight.double() / torch.where(dead, torch.ones_like(factor), factor)
        old.weight.copy_(torch.where(dead, fresh.double(), weight))
        for norm, channels in after:
            scale, shift = (value[channels] for value in affine.read(norm))
            offset = scale * copying.doubled(old.bias, torch.zeros_like(scale))
            assert now.bias is not None, "it absorbed a shift"
            if not torch.equal((offset + shift).to(now.bias), now.bias):
                affine.set_shift(norm, now.bias.double() - offset, channels)


def _absorb(
    weight: Tensor, bias: Tensor, module: nn.Module, absorption: Absorption, dtype: torch.dtype
) -> Tensor:
    """Scale `weight` (groups, out, in, *kernel) by `module`'s map, in place; returns the new bias
    (groups * out).
    """
    groups, out, inner, *kernel = weight.shape
    kernel_ones = (1,) * len(kernel)
    if absorption.way is AbsorbMode.BEFORE_MAGNITUDE:
        magnitude, _, _ = affine.split(module, dtype)
        weight *= magnitude.reshape(groups, 1, -1, *kernel_ones)
        return bias
    scale, shift = affine.read(module, unit_gamma=absorption.way is AbsorbMode.AFTER_UNIT)
    if not absorption.way.precedes:
        scale = scale[absorption.channels]
        shift = shift[absorption.channels]
        weight *= scale.expand(bias.numel()).reshape(groups, out, 1, *kernel_ones)
        return scale * bias + shift
    scale, shift = (
        value.expand(groups * inner).reshape(groups, 1, -1, *kernel_ones)
        for value in (scale, shift)
    )
    bias = bias + (weight * shift).flatten(2).sum(2).flatten()
    if absorption.way is AbsorbMode.BEFORE:
        weight *= scale
    return bias


def _by_group(old: Linearity, weight: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The weight as (groups, out / groups, in / groups, *kernel), and a function back to its own
    layout.
    """
    groups = getattr(old, "groups", 1)
    grouped = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    # Transposed convolutions store (in, out / groups, *kernel).
    if getattr(old, "transposed", False):
        return grouped.transpose(1, 2), lambda w: w.transpose(1, 2).reshape(weight.shape)
    return grouped, lambda w: w.reshape(weight.shape)


def _with(old: Linearity, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Linearity:
    grad = old.weight.requires_grad
    # In the old one's memory format, such as channels_last.
    values = torch.empty_like(old.weight, dtype=dtype).copy_(weight)
    memo: copying.Memo = {id(old.weight): nn.Parameter(values, requires_grad=grad)}
    if old.bias is not None and bias is not None:
        memo[id(old.bias)] = nn.Parameter(bias.to(dtype), requires_grad=old.bias.requires_grad)
    new = copying.duplicate(old, memo)
    if old.bias is None and bias is not None:
        new.bias = nn.Parameter(bias.to(dtype), requires_grad=grad)
    return new.to(dtype)
