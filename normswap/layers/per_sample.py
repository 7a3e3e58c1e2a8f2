"""Norms that take their statistics per sample (GroupNorm and its kin), in place of BatchNorms, by
matched moments.

Per group, with the BatchNorm's running mean mu_c and variance var_c and s_c = gamma_c / sqrt(var_c
+ eps):

    m = mean mu_c,  v = mean(var_c + mu_c^2) - m^2;   gamma'_c = s_c sqrt(v + eps),  beta'_c =
    beta_c + s_c (m - mu_c)

so that on an average sample, whose statistics are the population's, the output is the BatchNorm's.
"""

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from timm.layers import GroupNormAct
from torch import Tensor, nn

from normswap.copying import doubled
from normswap.layers import affine, site_norm
from normswap.layers.channelwise import ChannelAffine
from normswap.layers.known_norms import Pair
from normswap.layers.placeholders import Chain
from normswap.layers.planned_layer import Linearity, OwnLayer, PlannedLayer


class GroupNorm(PlannedLayer):
    """torch's GroupNorm stands for a BatchNorm, or, where it carried an activation, timm's
    GroupNormAct.
    """

    @classmethod
    def replacing(
        cls, old: Any, *, like: Tensor, groups: int, eps: float | None = None, lead: bool = False
    ) -> nn.Module:
        """The norm per sample that on an average sample computes what the BatchNorm does.

        Args:
            groups: a divisor of the number of channels.
            eps: by default the BatchNorm's; with another, all groups are brought to one variance
                before the norm.
            lead: a `ChannelAffine` in front of the norm does that, not the convolution before
                (`Rescaled`).
        """
        mean, var = affine.statistics(old)
        scale, shift = affine.read(old)
        channels = mean.numel()
        act = affine.copied_activation(old)
        scale_in = torch.ones_like(mean)
        offset = torch.zeros_like(mean)
        if eps is None:
            eps = affine.epsilon(old)
        else:
            scale_in, offset = leveled(old, groups)
        typed = site_norm.typed(old, like)
        settings: Any = {"eps": eps, "dtype": typed.dtype, "device": typed.device}
        if act is None:
            new: Any = nn.GroupNorm(groups, channels, **settings)
        else:
            new = GroupNormAct(channels, groups, apply_act=False, **settings)
            new.act = act
        scale = scale / scale_in
        match(
            new, (scale, shift - scale * offset), scale_in * mean + offset, scale_in.square() * var
        )
        for name in ("weight", "bias"):
            value = getattr(old, name, None)
            if isinstance(value, nn.Parameter):
                getattr(new, name).requires_grad_(value.requires_grad)
        return led(scale_in, offset, new, lead=lead)


class Rescaled(PlannedLayer):
    """The convolution before a per-sample norm; all groups of its output channels have one mean
    variance.
    """

    @classmethod
    def replacing(cls, old: Any, norm: nn.Module, *, like: Tensor, groups: int) -> Any:
        return rescaled(old, *leveled(norm, groups))


class Recentred(PlannedLayer):
    """The BatchNorm behind a `Rescaled` convolution, or a lead, with statistics scaled likewise:
    the map is kept.
    """

    @classmethod
    def replacing(
        cls, old: Any, *, like: Tensor, groups: int, eps: float | None = None, lead: bool = False
    ) -> nn.Module:
        # Of a norm that somebody registered, the BatchNorm that computes what it does.
        new: Any = (
            site_norm.SiteNorm.replacing(old, like=like)
            if affine.is_registered(old)
            else copy.deepcopy(old)
        )
        if eps is None:
            return cast(nn.Module, new)
        scale, offset = leveled(old, groups)
        if new.weight is None:
            new.affine = True
            ones = torch.ones_like(new.running_var)
            new.weight = nn.Parameter(ones, requires_grad=False)
            new.bias = nn.Parameter(0 * ones, requires_grad=False)
        moved(new, scale, offset)
        return led(scale, offset, new, lead=lead)


def match(norm: Any, affine_map: Pair, mean: Tensor, var: Tensor) -> None:
    """Set gamma and beta of a GroupNorm, in place: it computes s x + t for a sample with these
    moments, (C,) each.
    """
    scale, shift = affine_map
    moments = group_moments(mean, var, norm.num_groups)
    m, v = (value.repeat_interleave(len(scale) // norm.num_groups) for value in moments)
    norm.weight.copy_(scale * (v + norm.eps).sqrt())
    norm.bias.copy_(shift + scale * m)


def moved(norm: Any, scale: Tensor, offset: Tensor) -> None:
    """Let a BatchNorm, in place, compute of scale * x + offset what it computes of x."""
    mean, var = (value.clone() for value in affine.statistics(norm))
    norm.running_mean.copy_(scale * mean + offset)
    norm.running_var.copy_(scale.square() * var)
    # The stored variance is rounded, so it is read back for an exact gamma.
    eps = affine.epsilon(norm)
    norm.weight.mul_((norm.running_var.double() + eps).sqrt() / (scale * (var + eps).sqrt()))


def leveled(norm: Any, groups: int) -> tuple[Tensor, Tensor]:
    """Scale and offset (C,), float64: each group gets the mean variance of all channels, each
    channel the mean 0.
    """
    mean, var = affine.statistics(norm)
    group_var = var.view(groups, -1).mean(1)
    scale = (
        torch.where(group_var > 0, var.mean() / group_var, 1.0)
        .sqrt()
        .repeat_interleave(len(var) // groups)
    )
    return scale, -scale * mean


def rescaled(conv: Linearity, scale: Tensor, offset: Tensor) -> Linearity:
    """A copy of the convolution that computes scale * y + offset, (C,) each, where it computed y."""
    new = copy.deepcopy(conv)
    new.weight.copy_(conv.weight.double() * per_filter(conv, scale))
    bias = scale * doubled(conv.bias, torch.zeros_like(scale)) + offset
    new.bias = nn.Parameter(bias.to(conv.weight), requires_grad=conv.weight.requires_grad)
    return new


def move(layer: Any, scale: Tensor, shift: Tensor | float = 0.0) -> None:
    """Let a convolution, or a scale and shift, compute in place scale * y + shift, (C,) each, where
    it computed y.
    """
    weight = scale if layer.weight.ndim == 1 else per_filter(layer, scale)
    layer.weight.copy_(layer.weight.double() * weight)
    layer.bias.copy_(scale * layer.bias.double() + shift)


def before(network: nn.Module, path: str, holders: Mapping[str, str]) -> nn.Module:
    """The layer that holds the rescaling before the norm at a path: its lead, or the one that
    `holders` names.
    """
    norm = network.get_submodule(path)
    if isinstance(norm, Chain):
        return norm.inner
    return network.get_submodule(holders[path])


def last(norm: nn.Module) -> Any:
    """The norm at a path, without its lead."""
    if isinstance(norm, Chain):
        return norm.then
    return norm


def led(scale: Tensor, offset: Tensor, norm: Any, *, lead: bool) -> nn.Module:
    """The norm itself, or (`lead`) behind a `ChannelAffine` with a scale and an offset, (C,) each."""
    if not lead:
        return cast(nn.Module, norm)
    like = norm.weight.detach()
    return Chain(ChannelAffine(scale.to(like), offset.to(like)), norm)


def per_filter(conv: Linearity, sign: Tensor) -> Tensor:
    """A value per output channel in a shape that goes with the weight."""
    kernel_ones = (1,) * (conv.weight.ndim - 2)
    if isinstance(conv, nn.Linear) or not conv.transposed:
        return sign.view(-1, 1, *kernel_ones)
    # Transposed convolutions store (in, out / groups, *kernel).
    sign = sign.view(conv.groups, 1, -1)
    return sign.expand(-1, conv.in_channels // conv.groups, -1).reshape(
        conv.in_channels, -1, *kernel_ones
    )


def group_moments(mean: Tensor, var: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Mean and variance (groups,) of the channels of each group taken together, from those per
    channel (C,).
    """
    mean = mean.view(groups, -1)
    var = var.view(groups, -1)
    m = mean.mean(1)
    return m, (var + mean.square()).mean(1) - m.square()


def normalizes(module: nn.Module | None) -> bool:
    """Whether it is one of the layers that stand for a BatchNorm, whose gamma and beta can be
    fitted.
    """
    return isinstance(module, nn.GroupNorm) or (isinstance(module, OwnLayer) and module.NORMALIZES)


def normalized(norm: Any, x: Tensor) -> Tensor:
    """The values that the layer multiplies by gamma, (N, C, ...)."""
    if isinstance(norm, OwnLayer):
        return norm.normalized(x)
    return F.group_norm(x, norm.num_groups, eps=norm.eps)
