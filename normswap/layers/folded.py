"""Folding: a linear layer absorbs the affine maps of its neighbours. `Folded.invert` undoes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict

import torch
from torch import Tensor, nn

from normswap import copying
from normswap.errors import RefusedError
from normswap.layers import reparametrized
from normswap.layers.planned_layer import Linearity, PlannedLayer
from normswap.plan import AbsorbMode, Absorption
from normswap.sites import affine

if TYPE_CHECKING:
    from typing_extensions import Unpack


# What becomes of the bias that folding makes: `keep` leaves it as it is, also if there is none;
# `add` adds a bias of 0 if there is none; `drop` removes it.
BiasChange: TypeAlias = Literal["keep", "add", "drop"]


class FoldFactors(TypedDict, total=False):
    """The options of `folded` that concern the layer alone.

    Args:
        gain: The number by which the layer's output is multiplied.
        in_gain: The number by which the layer's input is multiplied.
        bake: Whether a weight that each forward computes anew becomes a plain parameter.
        centred: Whether the mean over the output channels is subtracted from weight and bias.
    """

    gain: float
    in_gain: float
    bake: bool
    centred: bool


class Absorptions(FoldFactors, total=False):
    """The options of `folded` that say what the layer computes.

    Args:
        takes: How each of the absorbed modules is absorbed, in their order.
    """

    takes: Sequence[Absorption]


class FoldOptions(Absorptions, total=False):
    """All options of `folded`. Every planned layer that folds passes them on to `folded`.

    Args:
        bias: Whether a bias of 0 is added, or any bias is dropped.
    """

    bias: BiasChange


def folded(
    old: Linearity,
    reads: Sequence[nn.Module],
    *,
    like: Tensor,
    bias: BiasChange = "keep",
    **absorptions: Unpack[Absorptions],
) -> Linearity:
    """Return a copy of a linear layer that has absorbed its neighbours, computed in float64.

    Args:
        old: The linear layer or convolution, y = W x + b.
        reads: The neighbours. Each is a layer s x + t before or after `old`, such as a BatchNorm,
            whose s and t go into W and b.
        like: An empty tensor of the model's dtype. The copy is in float64 if the model is, and
            else in the dtype of `old`.
        bias: `add` adds a bias of 0 to a copy that would have none, `drop` removes any bias, and
            `keep` does neither.
        absorptions: `takes` says for each neighbour whether it stands before or after the layer.
            `gain`, `in_gain`, `bake` and `centred` are documented at `FoldFactors`.
    """
    new = _absorbing(old, reads, like=like, **absorptions)
    if bias == "drop":
        new.bias = None
    if bias == "add" and new.bias is None:
        # By group the weight is (groups, O / groups, ...), also for a transposed convolution.
        by_group, _ = _by_group(new, new.weight.detach())
        zeros = by_group.new_zeros(by_group.shape[0] * by_group.shape[1])
        new.bias = nn.Parameter(zeros, requires_grad=new.weight.requires_grad)
    return new


def _absorbing(
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
    """Return a copy of a linear layer that has absorbed its neighbours (`folded`).

    Args:
        old: The linear layer or convolution, y = W x + b.
        reads: The modules that are absorbed.
        like: An empty tensor of the model's dtype. The copy is in float64 if the model is, and
            else in the dtype of `old`.
        takes: The way in which each of `reads` is absorbed (`plan.AbsorbMode`), in their order.
        gain: The number by which the output is multiplied.
        in_gain: The number by which the input is multiplied.
        bake: Whether a weight that `old` computes in each forward, such as that of weight
            normalization, is first replaced by a plain parameter (`reparametrized.plain`).
        centred: Whether the mean over the output channels is subtracted at the end:
            W' = (I - 11'/C) W, b' = b - mean(b).
    """
    if next(nn.Module.parameters(old), None) is None:
        raise TypeError(f"a {type(old).__name__} has no weight to fold into")

    # The copy has the dtype of the parameters, unless everything is in float64.
    dtype = next(nn.Module.parameters(old)).dtype
    if like.dtype == torch.float64:
        dtype = like.dtype
    if bake:
        old = reparametrized.plain(old)

    weight, restore = _by_group(old, old.weight.detach().to(torch.float64, copy=True))
    out_channels = weight.shape[0] * weight.shape[1]
    bias = copying.doubled(old.bias, weight.new_zeros(out_channels))

    if in_gain != 1:
        weight *= in_gain
    for module, absorption in zip(reads, takes, strict=True):
        bias = _absorb(weight, bias, module, absorption, like.dtype)
    if gain != 1:
        weight *= gain
    if centred:
        weight -= weight.mean((0, 1), keepdim=True)
        bias = bias - bias.mean()

    # Without neighbours the bias stays 0, so a layer without a bias gets none. The first linear
    # layer of a gate, which is only rescaled, is an example.
    if not reads and gain == 1 and old.bias is None:
        return _with_tensors(old, restore(weight), None, dtype)
    return _with_tensors(old, restore(weight), bias * gain, dtype)


class Folded(PlannedLayer):
    """A linear layer that has absorbed its neighbours: norms, scales and shifts beside it.

    It keeps its class and its name.
    """

    CASTS = True

    @classmethod
    def replacing(
        cls,
        old: Linearity,
        *reads: nn.Module,
        like: Tensor,
        **fold_options: Unpack[FoldOptions],
    ) -> Linearity:
        """Return a copy of the layer that has absorbed its neighbours.

        Args:
            old: The linear layer or convolution, y = W x + b.
            reads: The neighbours, such as a BatchNorm behind the layer.
            like: An empty tensor of the model's dtype. If that is float64, so is the result.
            fold_options: The options of `folded`.
        """
        return folded(old, reads, like=like, **fold_options)

    @classmethod
    def invert(
        cls,
        old: Linearity,
        now: Linearity,
        reads: tuple[nn.Module, ...],
        **fold_options: Unpack[FoldOptions],
    ) -> None:
        """Set the weight of `old` and beta of the norm behind it so that folding gives `now`.

        A channel whose gamma is 0 gets gamma 1 if its present filter is another than 0.

        Args:
            old: The layer of the source.
            now: The layer that took its place, after training.
            reads: The modules of the source that were absorbed.
            fold_options: The options of `folded` that the plan states.

        Raises:
            RefusedError: The layer absorbed two norms behind it, or one before it. Or no weight of
                `old` gives what `now` computes, whatever gamma is.
        """
        # Only one norm, behind the layer, can take up the trained bias, by its beta.
        takes = fold_options.get("takes", ())
        norms_after: list[tuple[nn.Module, slice]] = []
        takes_before = False
        for module, absorption in zip(reads, takes, strict=True):
            if absorption.way is AbsorbMode.AFTER:
                norms_after.append((module, absorption.channels))
            elif absorption.way is AbsorbMode.BEFORE:
                takes_before = True
        if takes_before:
            raise RefusedError("cannot unfold", "it took in a norm before it")
        if len(norms_after) > 1:
            raise RefusedError("cannot unfold", "it took in more than one norm")

        factor = _factor(old, reads, **fold_options)
        unreachable = _unreachable(old, now, factor)
        if unreachable.any():
            # A gamma of 0 lets no weight give what its filter has learned, so it becomes 1.
            for norm, channels in norms_after:
                affine.set_gamma_to_one(norm, channels, unreachable)
            factor = _factor(old, reads, **fold_options)
            _check_reachable(old, now, factor)

        # A weight whose factor is 0 says nothing about the source: it keeps its original value.
        # Ones stand in for the factors of 0, so that nothing is divided by 0.
        dead = factor == 0
        weight = now.weight.double() / torch.where(dead, torch.ones_like(factor), factor)
        old.weight.copy_(torch.where(dead, old.weight.double(), weight))

        # For a norm s x + t behind the layer, folding made the bias s b + t. So t is set to the
        # trained bias minus s b, by beta. If the bias did not change, beta stays exactly as it is.
        for norm, channels in norms_after:
            scale, shift = (value[channels] for value in affine.read_map(norm))
            offset = scale * copying.doubled(old.bias, torch.zeros_like(scale))
            assert now.bias is not None, "it absorbed a shift"
            if not torch.equal((offset + shift).to(now.bias), now.bias):
                affine.set_shift(norm, now.bias.double() - offset, channels)


def _factor(
    old: Linearity, reads: Sequence[nn.Module], **fold_options: Unpack[FoldOptions]
) -> Tensor:
    """Return the factor by which folding multiplies each weight of a layer, in float64."""
    # Folding a weight of ones gives the factors.
    ones = copying.duplicate(old, {}).double()
    ones.weight.fill_(1)
    return folded(ones, reads, like=old.weight, **fold_options).weight


def _unreachable(old: Linearity, now: Linearity, factor: Tensor) -> Tensor:
    """Return which channels of a layer, (O,), no finite weight brings to their present filters.

    These are channels whose factor is 0, or nearly 0, and whose present filter is another than 0.

    Args:
        old: The layer of the source, whose dtype the weight must fit into.
        now: The layer that took its place, after training.
        factor: The factor by which folding multiplies each weight of `old`.
    """
    needed = (now.weight.double() / factor).to(old.weight.dtype)
    by_group, _ = _by_group(old, needed.isinf())
    return by_group.flatten(2).any(2).flatten()


def _check_reachable(old: Linearity, now: Linearity, factor: Tensor) -> None:
    """Raise RefusedError if no weight of `old` gives the filters of `now` (`_unreachable`)."""
    if _unreachable(old, now, factor).any():
        why = f"no weight of a {type(old).__name__} gives what it computes now"
        raise RefusedError("cannot unfold", why)


def _absorb(
    weight: Tensor, bias: Tensor, module: nn.Module, absorption: Absorption, dtype: torch.dtype
) -> Tensor:
    """Absorb s x + t of a module: scale the weight in place, and return the new bias (O,).

    Args:
        weight: The weight (groups, O / groups, I / groups, *kernel), in float64.
        bias: The bias (O,), in float64.
        module: The neighbour, whose s and t are read.
        absorption: Whether the neighbour stands before or after the layer, and its channels.
        dtype: The model's dtype, which limits the magnitudes of `affine.split`.
    """
    groups, out, inner, *kernel = weight.shape
    kernel_ones = (1,) * len(kernel)

    # W act(s x) = (W |s|) act(x') with an activation that |s| passes. Signs and shifts stay in the
    # neighbour, in front of the activation.
    if absorption.way is AbsorbMode.BEFORE_MAGNITUDE:
        magnitude, _, _ = affine.split(module, dtype)
        weight *= magnitude.reshape(groups, 1, -1, *kernel_ones)
        return bias

    # AFTER_UNIT reads a BatchNorm as if gamma were 1 and beta 0.
    # The map of a norm without tensors is on the CPU.
    scale, shift = affine.read_map(module, unit_gamma=absorption.way is AbsorbMode.AFTER_UNIT)
    scale, shift = scale.to(weight.device), shift.to(weight.device)

    # Behind the layer: s (W x + b) + t = (s W) x + (s b + t).
    if not absorption.way.precedes:
        scale = scale[absorption.channels]
        shift = shift[absorption.channels]
        weight *= scale.expand(bias.numel()).reshape(groups, out, 1, *kernel_ones)
        return scale * bias + shift

    # Before the layer: W (s x + t) + b = (W s) x + (W t + b). BEFORE_SHIFT takes t alone.
    scale = scale.expand(groups * inner).reshape(groups, 1, -1, *kernel_ones)
    shift = shift.expand(groups * inner).reshape(groups, 1, -1, *kernel_ones)
    bias = bias + (weight * shift).flatten(2).sum(2).flatten()
    if absorption.way is AbsorbMode.BEFORE:
        weight *= scale
    return bias


def _by_group(old: Linearity, weight: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the weight by group, and a function that brings it back to its own layout.

    The weight by group is (groups, O / groups, I / groups, *kernel) for every class of layer.
    """
    groups = getattr(old, "groups", 1)
    grouped = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])

    # Transposed convolutions store (I, O / groups, *kernel).
    if getattr(old, "transposed", False):
        return grouped.transpose(1, 2), lambda w: w.transpose(1, 2).reshape(weight.shape)
    return grouped, lambda w: w.reshape(weight.shape)


def _with_tensors(
    old: Linearity, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Linearity:
    """Return a copy of a layer with another weight and bias.

    Each new tensor learns if the old one did. A bias that is new learns if the old weight did.

    Args:
        old: The layer.
        weight: The new weight, of the old one's shape.
        bias: The new bias, (out channels,). None only for a layer without a bias.
        dtype: The dtype of the copy.
    """
    learns = old.weight.requires_grad

    # Each tensor in `memo` takes the place of the old tensor with that id in the copy. The new
    # weight keeps the memory format of the old one, such as channels_last.
    values = torch.empty_like(old.weight, dtype=dtype).copy_(weight)
    memo: copying.Memo = {id(old.weight): nn.Parameter(values, requires_grad=learns)}
    if old.bias is not None and bias is not None:
        memo[id(old.bias)] = nn.Parameter(bias.to(dtype), requires_grad=old.bias.requires_grad)

    new = copying.duplicate(old, memo)
    if old.bias is None and bias is not None:
        new.bias = nn.Parameter(bias.to(dtype), requires_grad=learns)
    return new.to(dtype)
