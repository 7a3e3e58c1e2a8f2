"""Norms that take their statistics per sample (GroupNorm and its kin), in the seats of BatchNorms, by matched moments.

Per group, with the BatchNorm's running mean mu_c and variance var_c and s_c = gamma_c / sqrt(var_c + eps):

    m = mean mu_c,  v = mean(var_c + mu_c^2) - m^2;   gamma'_c = s_c sqrt(v + eps),  beta'_c = beta_c + s_c (m - mu_c)

so that on an average sample, whose statistics are the population's, the output is the BatchNorm's.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import GroupNormAct
from torch import Tensor, nn

from normswap.layers import affine, site_norm
from normswap.layers.channelwise import ChannelAffine
from normswap.layers.own import OwnLayer
from normswap.layers.placeholders import Chain
from normswap.layers.seat import Seat


class GroupNorm(Seat):
    """A BatchNorm's seat is taken by torch's GroupNorm, or, where it carried an activation, by timm's GroupNormAct."""

    @classmethod
    def replacing(
        cls,
        old: Any,
        *,
        like: Tensor,
        groups: int,
        steady: float = 0.0,
        flips: str = "",
        leans: str = "",
        lead: bool = False,
    ) -> nn.Module:
        """Args:
        groups: a divisor of the number of channels.
        steady, flips, leans: see `Gauge`; the convolution before, a `Steadied`, brings the channels into it.
        lead: a `ChannelAffine` in front of the norm does.
        """
        mean, var = affine.statistics(old)
        scale, shift = affine.read(old)
        channels = mean.numel()
        act = affine.copied_activation(old)
        eps = affine.epsilon(old)
        own = site_norm.typed(old, like)
        settings: Any = {"eps": eps, "dtype": own.dtype, "device": own.device}
        if act is None:
            new: Any = nn.GroupNorm(groups, channels, **settings)
        else:
            new = GroupNormAct(channels, groups, apply_act=False, **settings)
            new.act = act
        gauge = Gauge.of(old, groups, steady, flips, leans)
        mean = gauge.sign * mean + gauge.offset
        m, v = (value.repeat_interleave(channels // groups) for value in group_moments(mean, var, groups))
        new.weight.copy_(gauge.sign * scale * (v + eps).sqrt())
        new.bias.copy_(shift + gauge.sign * scale * (m - gauge.offset))
        for name in ("weight", "bias"):
            value = getattr(old, name, None)
            if isinstance(value, nn.Parameter):
                getattr(new, name).requires_grad_(value.requires_grad)
        return led(gauge.sign, gauge.offset, new) if lead else new


class Steadied(Seat):
    """The convolution before a per-sample norm, whose output is brought into the norm's `Gauge`."""

    @classmethod
    def replacing(cls, old: Any, norm: nn.Module, *, like: Tensor, **gauge: Any) -> Any:
        into = Gauge.of(norm, **gauge)
        return rescaled(old, into.sign, into.offset)


class Recentred(Seat):
    """The BatchNorm behind a `Steadied` convolution, or a lead, moved along: together they compute the same."""

    @classmethod
    def replacing(cls, old: Any, *, like: Tensor, groups: int, lead: bool = False, **rest: Any) -> nn.Module:
        new = site_norm.as_batchnorm(old, like)
        if not rest:
            return new
        gauge = Gauge.of(old, groups, **rest)
        new.running_mean.copy_(gauge.sign * affine.statistics(old)[0] + gauge.offset)
        if new.weight is None:
            new.affine, ones = True, torch.ones_like(new.running_var)
            new.weight, new.bias = nn.Parameter(ones, requires_grad=False), nn.Parameter(0 * ones, requires_grad=False)
        new.weight.mul_(gauge.sign)
        return led(gauge.sign, gauge.offset, new) if lead else new


@dataclass(frozen=True)
class Gauge:
    """sign * x + offset, what a channel becomes before the norm: free, since what follows makes up for it.

    All means are taken off. Then a constant of either sign, of the same size a in every channel of a group, is added:
    of the variance that a sample is divided by, the share `steady` is the constants', the same in every sample, with
    a^2 = v steady / (1 - steady). Every channel has the same part in it: none can dominate its group.
    """

    sign: Tensor
    offset: Tensor

    @classmethod
    def of(cls, norm: Any, groups: int, steady: float = 0.0, flips: str = "", leans: str = "") -> Gauge:
        """Args:
        norm: the BatchNorm.
        flips, leans: a '+' or '-' per channel: its sign, and its constant's. Empty: as it is.
        """
        mean, var = affine.statistics(norm)
        if not leans:
            return cls(torch.ones_like(mean), torch.zeros_like(mean))
        sign, lean = (_numbers(signs).to(mean) for signs in (flips, leans))
        lean = (lean.view(groups, -1) - lean.view(groups, -1).mean(1, keepdim=True)).flatten()
        size = (var.view(groups, -1).mean(1) * steady / (1 - steady)).sqrt()
        return cls(sign, size.repeat_interleave(mean.numel() // groups) * lean - sign * mean)


def rescaled(conv: Any, scale: Tensor, offset: Tensor) -> Any:
    """A copy of the convolution that computes scale * y + offset, (C,) each, where it computed y."""
    new = copy.deepcopy(conv)
    new.weight.copy_(conv.weight.double() * per_filter(conv, scale))
    bias = offset if conv.bias is None else scale * conv.bias.double() + offset
    new.bias = nn.Parameter(bias.to(conv.weight), requires_grad=conv.weight.requires_grad)
    return new


def led(scale: Tensor, offset: Tensor, norm: Any) -> Chain:
    """The norm behind a scale and an offset, (C,) each."""
    like = norm.weight.detach()
    return Chain(ChannelAffine(scale.to(like), offset.to(like)), norm)


def per_filter(conv: nn.modules.conv._ConvNd, sign: Tensor) -> Tensor:
    """A value per output channel in a shape that goes with the weight."""
    rest = (1,) * (conv.weight.ndim - 2)
    if not getattr(conv, "transposed", False):
        return sign.view(-1, 1, *rest)
    sign = sign.view(conv.groups, 1, -1)  # transposed convolutions store (in, out / groups, *kernel)
    return sign.expand(-1, conv.in_channels // conv.groups, -1).reshape(conv.in_channels, -1, *rest)


def _numbers(signs: str) -> Tensor:
    return torch.tensor([1.0 if sign == "+" else -1.0 for sign in signs], dtype=torch.float64)


def group_moments(mean: Tensor, var: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Mean and variance (groups,) of the channels of each group taken together, from those per channel (C,)."""
    mean, var = mean.view(groups, -1), var.view(groups, -1)
    m = mean.mean(1)
    return m, (var + mean.square()).mean(1) - m.square()


def normalizes(module: nn.Module | None) -> bool:
    """Whether it is one of the layers that a BatchNorm's seat was taken by, whose gamma and beta can be fitted."""
    return isinstance(module, nn.GroupNorm) or (isinstance(module, OwnLayer) and module.NORMALIZES)


def normalized(norm: Any, x: Tensor) -> Tensor:
    """What the layer multiplies by gamma, (N, C, ...)."""
    return norm.normalized(x) if isinstance(norm, OwnLayer) else F.group_norm(x, norm.num_groups, eps=norm.eps)
