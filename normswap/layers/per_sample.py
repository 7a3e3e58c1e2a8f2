"""Norms that take their statistics per sample (GroupNorm and its kin), in place of BatchNorms, by matched moments.

Per group, with the BatchNorm's running mean mu_c and variance var_c and s_c = gamma_c / sqrt(var_c + eps):

    m = mean mu_c,  v = mean(var_c + mu_c^2) - m^2;   gamma'_c = s_c sqrt(v + eps),  beta'_c = beta_c + s_c (m - mu_c)

so that on an average sample, whose statistics are the population's, the output is the BatchNorm's.
"""

from __future__ import annotations

import copy
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from timm.layers import GroupNormAct
from torch import Tensor, nn

from normswap.layers import affine, site_norm
from normswap.layers.channelwise import ChannelAffine
from normswap.layers.own import OwnLayer
from normswap.layers.placeholders import Chain
from normswap.layers.planned_layer import Linearity, PlannedLayer


class GroupNorm(PlannedLayer):
    """torch's GroupNorm stands for a BatchNorm, or, where it carried an activation, timm's GroupNormAct."""

    @classmethod
    def replacing(
        cls, old: Any, *, like: Tensor, groups: int, eps: float | None = None, lead: bool = False, **rescaling: Any
    ) -> nn.Module:
        """The norm per sample that on an average sample computes what the BatchNorm does.

        Args:
            groups: a divisor of the number of channels.
            eps: by default the BatchNorm's.
            lead: a `ChannelAffine` in front of the norm brings the channels into the rescaling; else the convolution
                before, a `Steadied`, does.
            rescaling: see `ChannelRescaling`.
        """
        mean, var = affine.statistics(old)
        scale, shift = affine.read(old)
        channels = mean.numel()
        act = affine.copied_activation(old)
        eps = affine.epsilon(old) if eps is None else eps
        typed = site_norm.typed(old, like)
        settings: Any = {"eps": eps, "dtype": typed.dtype, "device": typed.device}
        if act is None:
            new: Any = nn.GroupNorm(groups, channels, **settings)
        else:
            new = GroupNormAct(channels, groups, apply_act=False, **settings)
            new.act = act
        into = ChannelRescaling.of(old, groups, **rescaling)
        mean, var = into.scale * mean + into.offset, into.scale.square() * var
        m, v = (value.repeat_interleave(channels // groups) for value in group_moments(mean, var, groups))
        scale = scale / into.scale
        new.weight.copy_(scale * (v + eps).sqrt())
        new.bias.copy_(shift + scale * (m - into.offset))
        for name in ("weight", "bias"):
            value = getattr(old, name, None)
            if isinstance(value, nn.Parameter):
                getattr(new, name).requires_grad_(value.requires_grad)
        return led(into.scale, into.offset, new) if lead else new


class Steadied(PlannedLayer):
    """The convolution before a per-sample norm, whose output is brought into the norm's `ChannelRescaling`."""

    @classmethod
    def replacing(cls, old: Any, norm: nn.Module, *, like: Tensor, **rescaling: Any) -> Any:
        into = ChannelRescaling.of(norm, **rescaling)
        return rescaled(old, into.scale, into.offset)


class Recentred(PlannedLayer):
    """The BatchNorm behind a `Steadied` convolution, or a lead, moved along: together they compute the same."""

    @classmethod
    def replacing(cls, old: Any, *, like: Tensor, groups: int, lead: bool = False, **rest: Any) -> nn.Module:
        new = site_norm.as_batchnorm(old, like)
        rest.pop("eps", None)  # that of the norm per sample
        if not rest:
            return cast(nn.Module, new)
        rescaling = ChannelRescaling.of(old, groups, **rest)
        if new.weight is None:
            new.affine, ones = True, torch.ones_like(new.running_var)
            new.weight, new.bias = nn.Parameter(ones, requires_grad=False), nn.Parameter(0 * ones, requires_grad=False)
        moved(new, rescaling.scale, rescaling.offset)
        return led(rescaling.scale, rescaling.offset, new) if lead else new


def moved(norm: Any, scale: Tensor, offset: Tensor) -> None:
    """Let a BatchNorm, in place, compute of scale * x + offset what it computes of x."""
    mean, var = (value.clone() for value in affine.statistics(norm))
    norm.running_mean.copy_(scale * mean + offset)
    norm.running_var.copy_(scale.square() * var)
    # of the variance as it was stored: what eps adds to it is made up for exactly
    eps = affine.epsilon(norm)
    norm.weight.mul_((norm.running_var.double() + eps).sqrt() / (scale * (var + eps).sqrt()))


@dataclass(frozen=True)
class ChannelRescaling:
    """scale * x + offset, what a channel becomes before the norm: free, since what follows makes up for it.

    The scale is a sign and a factor, with which all groups have the variance of the channels' mean, so that one eps is
    as much to each. All means are taken off.
    """

    scale: Tensor
    offset: Tensor

    @classmethod
    def of(cls, norm: Any, groups: int, flips: str = "", factors: str = "", **constants: Any) -> ChannelRescaling:
        """The rescaling before a norm of so many groups.

        Args:
            norm: the BatchNorm.
            flips: a '+' or '-' per channel: its sign. Empty: as it is.
            factors: a letter per channel (`letters_of`): its factor, but for one that its group has. Empty: 1.
            constants: of plans that were saved when constants, and not eps, made a sample's deviation steady.
        """
        mean, var = affine.statistics(norm)
        if not flips:
            return cls(torch.ones_like(mean), torch.zeros_like(mean))
        scale = _signed(flips, factors).to(mean)
        variance = (scale.square() * var).view(groups, -1).mean(1, keepdim=True)
        if constants:
            return cls(scale, _constants(variance, **constants) - scale * mean)
        level = torch.where(variance > 0, var.mean() / variance, 1.0).sqrt()
        scale = (scale.view(groups, -1) * level).flatten()
        return cls(scale, -scale * mean)


def _constants(variance: Tensor, steady: float, leans: str, sizes: str = "") -> Tensor:
    """The share `steady` of a group's variance, (G, 1) without them; the sign and size of each channel's."""
    lean = _signed(leans, sizes).to(variance).view(len(variance), -1)
    lean = lean - lean.mean(1, keepdim=True)
    if sizes:
        lean = lean / lean.square().mean(1, keepdim=True).sqrt().clamp_min(1e-30)  # 0 where the group is silent
    return ((variance * steady / (1 - steady)).sqrt() * lean).flatten()


LETTERS, STEPS = string.digits + string.ascii_uppercase + string.ascii_lowercase, 4  # to an octave
_ONE = len(LETTERS) // 2


def letters_of(numbers: Tensor) -> str:
    """A letter for each positive number, in quarters of an octave; what is too far from 1 for that comes nearer."""
    steps = (STEPS * numbers.log2()).round().clamp(-_ONE, len(LETTERS) - 1 - _ONE).long()
    return "".join(LETTERS[_ONE + step] for step in steps.tolist())


def numbers_of(letters: str) -> list[float]:
    """The numbers that letters stand for (`letters_of`)."""
    return [2 ** ((LETTERS.index(letter) - _ONE) / STEPS) for letter in letters]


def _signed(signs: str, letters: str) -> Tensor:
    """Numbers from a '+' or '-' for each, and their sizes' letters; without letters of size 1."""
    sizes = numbers_of(letters) or [1.0] * len(signs)
    signed = [size if sign == "+" else -size for sign, size in zip(signs, sizes, strict=True)]
    return torch.tensor(signed, dtype=torch.float64)


def rescaled(conv: Linearity, scale: Tensor, offset: Tensor) -> Linearity:
    """A copy of the convolution that computes scale * y + offset, (C,) each, where it computed y."""
    new = copy.deepcopy(conv)
    new.weight.copy_(conv.weight.double() * per_filter(conv, scale))
    bias = offset if conv.bias is None else scale * conv.bias.double() + offset
    new.bias = nn.Parameter(bias.to(conv.weight), requires_grad=conv.weight.requires_grad)
    return new


def move(layer: Any, scale: Tensor, shift: Tensor | float = 0.0) -> None:
    """Let a convolution, or a scale and shift, compute in place scale * y + shift, (C,) each, where it computed y."""
    weight = scale if layer.weight.ndim == 1 else per_filter(layer, scale)
    layer.weight.copy_(layer.weight.double() * weight)
    layer.bias.copy_(scale * layer.bias.double() + shift)


def before(network: nn.Module, path: str, holders: Mapping[str, str]) -> nn.Module:
    """The layer that holds the rescaling before the norm at a path: its lead, or the one that `holders` names."""
    norm = network.get_submodule(path)
    return norm.inner if isinstance(norm, Chain) else network.get_submodule(holders[path])


def last(norm: nn.Module) -> Any:
    """The norm itself, where it may stand behind a lead."""
    return norm.then if isinstance(norm, Chain) else norm


def led(scale: Tensor, offset: Tensor, norm: Any) -> Chain:
    """The norm behind a scale and an offset, (C,) each."""
    like = norm.weight.detach()
    return Chain(ChannelAffine(scale.to(like), offset.to(like)), norm)


def per_filter(conv: Linearity, sign: Tensor) -> Tensor:
    """A value per output channel in a shape that goes with the weight."""
    rest = (1,) * (conv.weight.ndim - 2)
    if isinstance(conv, nn.Linear) or not conv.transposed:
        return sign.view(-1, 1, *rest)
    sign = sign.view(conv.groups, 1, -1)  # transposed convolutions store (in, out / groups, *kernel)
    return sign.expand(-1, conv.in_channels // conv.groups, -1).reshape(conv.in_channels, -1, *rest)


def group_moments(mean: Tensor, var: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Mean and variance (groups,) of the channels of each group taken together, from those per channel (C,)."""
    mean, var = mean.view(groups, -1), var.view(groups, -1)
    m = mean.mean(1)
    return m, (var + mean.square()).mean(1) - m.square()


def normalizes(module: nn.Module | None) -> bool:
    """Whether it is one of the layers that stand for a BatchNorm, whose gamma and beta can be fitted."""
    return isinstance(module, nn.GroupNorm) or (isinstance(module, OwnLayer) and module.NORMALIZES)


def normalized(norm: Any, x: Tensor) -> Tensor:
    """The values that the layer multiplies by gamma, (N, C, ...)."""
    return norm.normalized(x) if isinstance(norm, OwnLayer) else F.group_norm(x, norm.num_groups, eps=norm.eps)
