"""Norms with per-sample statistics, such as GroupNorm, that stand for a BatchNorm.

Per group, with the BatchNorm's running mean mu_c and variance var_c, and
s_c = gamma_c / sqrt(var_c + eps):

    m = mean mu_c,                     v = mean(var_c + mu_c^2) - m^2,
    gamma'_c = s_c sqrt(v + eps),      beta'_c = beta_c + s_c (m - mu_c).

An average sample has the population's statistics. For an average sample the GroupNorm's output is
the BatchNorm's.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from timm.layers import GroupNormAct
from torch import Tensor, nn

from normswap import copying
from normswap.copying import doubled
from normswap.layers.channelwise import ChannelAffine
from normswap.layers.placeholders import Chain
from normswap.layers.planned_layer import (
    Count,
    Linearity,
    NotNegative,
    OwnLayer,
    PlannedLayer,
)
from normswap.layers.site_norm import SiteNorm, empty_like_norm
from normswap.sites import affine
from normswap.sites.known_norms import Pair


class GroupNorm(PlannedLayer):
    """torch's GroupNorm in place of a BatchNorm, or timm's GroupNormAct if it had an activation."""

    PARTNER = "Rescaled"

    @classmethod
    def replacing(
        cls,
        old: nn.Module,
        *,
        like: Tensor,
        groups: Count,
        eps: NotNegative | None = None,
        lead: bool = False,
    ) -> nn.Module:
        """Return the GroupNorm that on an average sample computes what the BatchNorm does.

        Args:
            old: The BatchNorm.
            like: An empty tensor with the model's dtype and device.
            groups: The number of groups, a divisor of the number of channels.
            eps: The epsilon of the GroupNorm. None means the BatchNorm's. With a given epsilon, all
                groups are brought to one variance before the norm (`leveling`).
            lead: Whether a `ChannelAffine` in front of the norm brings the groups to one variance.
                Otherwise the convolution in front of the norm does so (`Rescaled`).
        """
        mean, var = affine.statistics(old)
        _check_groups(len(mean), groups)
        scale, shift = affine.read_map(old)
        input_scale = torch.ones_like(mean)
        input_offset = torch.zeros_like(mean)
        if eps is None:
            eps = affine.epsilon(old)
        else:
            input_scale, input_offset = leveling(old, groups)

        new = _empty_group_norm(old, like=like, groups=groups, eps=eps)

        # The norm reads a x + b in place of x, with a = `input_scale` and b = `input_offset`. So
        # its own map is s / a and t - b s / a.
        scale = scale / input_scale
        affine_map = (scale, shift - scale * input_offset)
        set_average_map(
            new, affine_map, input_scale * mean + input_offset, input_scale.square() * var
        )

        # A gamma or beta that was frozen stays frozen.
        for name in ("weight", "bias"):
            parameter = getattr(old, name, None)
            if isinstance(parameter, nn.Parameter):
                new.get_parameter(name).requires_grad_(parameter.requires_grad)
        return with_lead(input_scale, input_offset, new, lead=lead)


def _check_groups(channels: int, groups: int) -> None:
    """Raise ValueError if the channels cannot be divided into `groups` groups of equal size."""
    if channels % groups:
        raise ValueError(f"{channels} channels have no {groups} groups of one size")


def _empty_group_norm(old: nn.Module, *, like: Tensor, groups: int, eps: float) -> nn.Module:
    """Return a GroupNorm with the channels and activation of a norm, but without its values.

    Args:
        old: The norm.
        like: An empty tensor with the dtype and device, for a norm that has no tensors.
        groups: The number of groups.
        eps: The eps of the GroupNorm.
    """
    mean, _ = affine.statistics(old)
    channels = mean.numel()
    act = affine.copied_activation(old)
    typed_like = empty_like_norm(old, like)
    if act is None:
        return nn.GroupNorm(
            groups, channels, eps=eps, dtype=typed_like.dtype, device=typed_like.device
        )

    new = GroupNormAct(
        channels, groups, apply_act=False, eps=eps, dtype=typed_like.dtype, device=typed_like.device
    )
    # The old norm's own activation takes the place of timm's.
    new.act = act
    return cast(nn.Module, new)


class Rescaled(PlannedLayer):
    """The convolution before a GroupNorm, whose outputs are scaled and shifted per channel.

    Each channel then has mean 0, and all groups of channels have the same mean variance.
    """

    @classmethod
    def replacing(
        cls, old: Linearity, norm: nn.Module, *, like: Tensor, groups: Count
    ) -> Linearity:
        """Return a copy of the convolution whose output is rescaled for the norm behind it.

        Args:
            old: The convolution.
            norm: The BatchNorm behind it, whose statistics give the scales (`leveling`).
            like: Not used.
            groups: The number of groups of the GroupNorm that takes the place of `norm`.
        """
        return rescaled(old, *leveling(norm, groups))


class Recentred(PlannedLayer):
    """A BatchNorm whose statistics and gamma undo a rescaling of its input.

    The layer in front of the norm rescales the input. It is a convolution (`Rescaled`), or a lead:
    a `ChannelAffine` that was put in front of the norm. The output is what it was before.
    """

    @classmethod
    def replacing(
        cls,
        old: nn.Module,
        *,
        like: Tensor,
        groups: Count,
        eps: NotNegative | None = None,
        lead: bool = False,
    ) -> nn.Module:
        """Return a copy of the BatchNorm that reads a rescaled input and returns what `old` did.

        The input is scaled and shifted per channel, so that each channel has mean 0 and all groups
        of channels have the same mean variance (`leveling`). The arguments are those of
        `GroupNorm.replacing`, so that one edit of a plan can place either norm.

        Args:
            old: The BatchNorm.
            like: An empty tensor with the model's dtype and device.
            groups: The number of groups of channels.
            eps: The epsilon of the GroupNorm. With None the input is not rescaled. The BatchNorm
                keeps its own epsilon, so the number itself is not needed.
            lead: Whether a `ChannelAffine` in front of the norm rescales the input. Otherwise the
                convolution in front of the norm does so (`Rescaled`).
        """
        # A registered norm may lack a BatchNorm's tensors, so a BatchNorm takes its place.
        if affine.is_registered(old):
            new: Any = SiteNorm.replacing(old, like=like)
        else:
            new = copying.duplicate(old, {})
        # Without an eps, nothing in front of the norm is rescaled (`GroupNorm.replacing`).
        if eps is None:
            return cast(nn.Module, new)

        scale, offset = leveling(old, groups)
        # A norm without gamma and beta gets constants, since its gamma has to undo the rescaling.
        if new.weight is None:
            new.affine = True
            ones = torch.ones_like(new.running_var)
            new.weight = nn.Parameter(ones, requires_grad=False)
            new.bias = nn.Parameter(0 * ones, requires_grad=False)
        follow_rescaling(new, scale, offset)
        return with_lead(scale, offset, new, lead=lead)


def set_average_map(norm: nn.Module, affine_map: Pair, mean: Tensor, var: Tensor) -> None:
    """Set gamma and beta of a GroupNorm, in place, so that it is s x + t for an average sample.

    Args:
        norm: The GroupNorm.
        affine_map: The factors s and shifts t, each (C,).
        mean: The mean per channel (C,) of the average sample.
        var: The variance per channel (C,) of the average sample.
    """
    # The norm computes gamma (x - m) / sqrt(v + eps) + beta, where m and v are mean and variance of
    # a channel's group. So gamma = s sqrt(v + eps) and beta = t + s m.
    layer = cast(nn.GroupNorm, norm)
    scale, shift = affine_map
    group_size = len(scale) // layer.num_groups
    m, v = (
        moment.repeat_interleave(group_size)
        for moment in group_moments(mean, var, layer.num_groups)
    )
    layer.weight.copy_(scale * (v + layer.eps).sqrt())
    layer.bias.copy_(shift + scale * m)


def follow_rescaling(norm: nn.Module, scale: Tensor, offset: Tensor) -> None:
    """Set statistics and gamma of a BatchNorm, in place, to undo a rescaling of its input.

    The norm then returns for the input scale * x + offset what it returned for x.

    Args:
        norm: The BatchNorm.
        scale: The factor of each channel of the input (C,).
        offset: The number that is added to each channel of the input (C,).
    """
    layer: Any = norm
    eps = affine.epsilon(layer)
    old_mean, old_var = affine.statistics(layer)
    old_std = (old_var + eps).sqrt()
    layer.running_mean.copy_(scale * old_mean + offset)
    layer.running_var.copy_(scale.square() * old_var)

    # The stored variance is rounded, so it is read back for an exact gamma.
    new_std = (layer.running_var.double() + eps).sqrt()
    layer.weight.mul_(new_std / (scale * old_std))


def leveling(norm: nn.Module, groups: int) -> tuple[Tensor, Tensor]:
    """Return the scale and offset of a norm's input that bring its groups to one variance.

    The input scale * x + offset has mean 0 in each channel, and the mean variance of all channels
    in each group. A group of variance 0 is not scaled. Both tensors are (C,), in float64.
    """
    mean, var = affine.statistics(norm)
    _check_groups(len(mean), groups)
    group_var = var.view(groups, -1).mean(1)
    group_scale = torch.where(group_var > 0, var.mean() / group_var, 1.0).sqrt()
    scale = group_scale.repeat_interleave(len(var) // groups)
    return scale, -scale * mean


def rescaled(conv: Linearity, scale: Tensor, offset: Tensor) -> Linearity:
    """Return a copy of a convolution that computes scale * y + offset, (C,) each, in place of y."""
    new = copying.duplicate(conv, {})
    # A product with float64 is computed in float64, and rounded once.
    new.weight.mul_(per_filter(conv, scale))
    bias = scale * doubled(conv.bias, torch.zeros_like(scale)) + offset
    new.bias = nn.Parameter(bias.to(conv.weight), requires_grad=conv.weight.requires_grad)
    return new


def rescale_output(
    layer: Linearity | ChannelAffine, scale: Tensor, shift: Tensor | float = 0.0
) -> None:
    """Change a layer, in place, so that it computes scale * y + shift, (C,) each, in place of y.

    Args:
        layer: A convolution with a bias, or a scale and shift per channel.
        scale: The factor of each channel.
        shift: The number that is added to each channel.
    """
    assert layer.bias is not None, "`rescaled` gave it one"
    weight_factor = scale if isinstance(layer, ChannelAffine) else per_filter(layer, scale)
    # Products with float64 are computed in float64, and rounded once.
    layer.weight.mul_(weight_factor)
    layer.bias.copy_(scale * layer.bias + shift)


def rescaling_layer(
    network: nn.Module, path: str, holders: Mapping[str, str]
) -> Linearity | ChannelAffine:
    """Return the layer that rescales the input of a norm: its lead, or the convolution before it.

    A lead is a `ChannelAffine` in front of the norm, in one `Chain` with it (`with_lead`).

    Args:
        network: The converted network.
        path: The path of the norm.
        holders: The path of the convolution by the path of the norm, for norms without a lead.
    """
    norm = network.get_submodule(path)
    if isinstance(norm, Chain):
        return cast(ChannelAffine, norm.inner)
    return cast(Linearity, network.get_submodule(holders[path]))


def without_lead(norm: nn.Module) -> Any:
    """Return a norm without the `ChannelAffine` that `with_lead` has put in front of it.

    A norm that has none in front is returned as it is.
    """
    if isinstance(norm, Chain):
        return norm.then
    return norm


def with_lead(scale: Tensor, offset: Tensor, norm: nn.Module, *, lead: bool) -> nn.Module:
    """Return the norm itself, or the norm with a lead: a `ChannelAffine` in front of it.

    Args:
        scale: The scale (C,) of the lead.
        offset: The shift (C,) of the lead.
        norm: The norm.
        lead: Whether the norm gets a lead. Otherwise scale and offset are not used.
    """
    if not lead:
        return norm
    like = cast(Tensor, norm.weight).detach()
    return Chain(ChannelAffine(scale.to(like), offset.to(like)), norm)


def per_filter(conv: Linearity, value: Tensor) -> Tensor:
    """Return a value per output channel (O,) in a shape that broadcasts to the layer's weight.

    Args:
        conv: The layer.
        value: The values, (O,).
    """
    kernel_ones = (1,) * (conv.weight.ndim - 2)
    if isinstance(conv, nn.Linear) or not conv.transposed:
        return value.view(-1, 1, *kernel_ones)

    # Transposed convolutions store (I, O / groups, *kernel).
    by_group = value.view(conv.groups, 1, -1)
    by_input = by_group.expand(-1, conv.in_channels // conv.groups, -1)
    return by_input.reshape(conv.in_channels, -1, *kernel_ones)


def group_moments(mean: Tensor, var: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return m and v (groups,): mean and variance of all values of each group taken together.

    Args:
        mean: The mean of each channel (C,).
        var: The variance of each channel (C,).
        groups: The number of groups.
    """
    mean = mean.view(groups, -1)
    var = var.view(groups, -1)
    m = mean.mean(1)
    return m, (var + mean.square()).mean(1) - m.square()


def normalizes(module: nn.Module | None) -> bool:
    """Whether a module normalizes what it reads, then multiplies by a gamma and adds a beta.

    These are GroupNorms, and the layers of normswap that take a BatchNorm's place.
    """
    return isinstance(module, nn.GroupNorm) or (isinstance(module, OwnLayer) and module.NORMALIZES)


def normalized(norm: nn.Module, x: Tensor) -> Tensor:
    """Return the values (N, C, ...) that a layer multiplies by gamma.

    Args:
        norm: A layer for which `normalizes` is true.
        x: The layer's input (N, C, ...).
    """
    if isinstance(norm, OwnLayer):
        return norm.normalized(x)
    group_norm = cast(nn.GroupNorm, norm)
    return F.group_norm(x, group_norm.num_groups, eps=group_norm.eps)
