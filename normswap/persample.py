"""Norms that take their statistics per sample (GroupNorm and its kin), in the seats of BatchNorms, by matched moments.

Per group, with the BatchNorm's running mean mu_c and variance var_c and s_c = gamma_c / sqrt(var_c + eps):

    m = mean mu_c,  v = mean(var_c + mu_c^2) - m^2;   gamma'_c = s_c sqrt(v + eps),  beta'_c = beta_c + s_c (m - mu_c)

so that on an average sample, whose statistics are the population's, the output is the BatchNorm's.
"""

from __future__ import annotations

import copy
from typing import Any

import torch.nn.functional as F
from timm.layers import GroupNormAct
from torch import Tensor, nn

from normswap import affine

PER_SAMPLE = (nn.GroupNorm,)


class GroupNorm:
    """A BatchNorm's seat is taken by torch's GroupNorm, or, where it carried an activation, by timm's GroupNormAct."""

    @staticmethod
    def replacing(old: Any, *, like: Tensor, groups: int, steady: float = 0.0, copied: bool = False) -> nn.GroupNorm:
        """Args:
        groups: a divisor of the number of channels.
        steady: see `offsets`; the convolution before, a `Steadied`, adds them.
        copied: take gamma and beta as they are, the naive way, to compare with.
        """
        mean, var = old.running_mean.double(), old.running_var.double()
        scale, shift = affine.read(old)
        channels = mean.numel()
        act = affine.activation(old)
        settings: Any = {"eps": old.eps, "dtype": old.running_mean.dtype, "device": old.running_mean.device}
        if act is None:
            new: Any = nn.GroupNorm(groups, channels, **settings)
        else:
            new = GroupNormAct(channels, groups, apply_act=False, **settings)
            new.act = copy.deepcopy(act)
        offset = offsets(mean, var, groups, steady)
        m, v = (value.repeat_interleave(channels // groups) for value in group_moments(mean + offset, var, groups))
        new.weight.copy_(scale * (v + old.eps).sqrt())
        new.bias.copy_(shift + scale * (m - offset))
        if copied:
            new.weight.copy_(old.weight)
            new.bias.copy_(old.bias)
        for name in ("weight", "bias"):
            own = getattr(old, name, None)
            if isinstance(own, nn.Parameter):
                getattr(new, name).requires_grad_(own.requires_grad)
        return new


class Steadied:
    """The convolution before a per-sample norm, with constants of alternating sign in its bias: see `offsets`."""

    @staticmethod
    def replacing(old: Any, norm: Any, *, like: Tensor, groups: int, steady: float) -> Any:
        new = copy.deepcopy(old)
        offset = offsets(norm.running_mean.double(), norm.running_var.double(), groups, steady)
        bias = offset if old.bias is None else offset + old.bias.double()
        new.bias = nn.Parameter(bias.to(old.weight), requires_grad=old.weight.requires_grad)
        return new


class Recentred:
    """The BatchNorm behind a `Steadied` convolution, its running mean moved along: together they compute the same."""

    @staticmethod
    def replacing(old: Any, *, like: Tensor, groups: int, steady: float = 0.0) -> Any:
        new = copy.deepcopy(old)
        new.running_mean += offsets(old.running_mean.double(), old.running_var.double(), groups, steady).to(like)
        return new


def offsets(mean: Tensor, var: Tensor, groups: int, steady: float) -> Tensor:
    """What to add to each channel (C,), so that a share `steady` of its group's variance is the same in every sample.

    The channels' means are free before a norm that subtracts and divides: a + x with a known a says what x says. With
    +a and -a in turn, a^2 = v steady / (1 - steady), the variance a sample is divided by fluctuates less by the factor
    1 - steady, and every channel has the same part in it: no channel can dominate its group.
    """
    size = mean.numel() // groups
    if not steady or size < 2:
        return mean.new_zeros(mean.shape)
    _, v = group_moments(mean, var, groups)
    sign = mean.new_ones(size)
    sign[1::2] = -1
    if size % 2:
        sign = sign - sign.mean()
    return ((v * steady / (1 - steady)).sqrt()[:, None] * sign).flatten()


def group_moments(mean: Tensor, var: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Mean and variance (groups,) of the channels of each group taken together, from those per channel (C,)."""
    mean, var = mean.view(groups, -1), var.view(groups, -1)
    m = mean.mean(1)
    return m, (var + mean.square()).mean(1) - m.square()


def normalized(norm: nn.GroupNorm, x: Tensor) -> Tensor:
    """What the norm multiplies by gamma, (N, C, ...)."""
    return F.group_norm(x, norm.num_groups, eps=norm.eps)


SEATED: dict[str, Any] = {"GroupNorm": GroupNorm, "Recentred": Recentred, "Steadied": Steadied}
