"""Layers that learn how far they normalize, put where a conversion has put its own: a GroupNorm
whose eps is a parameter, and SALU. Both begin at what the conversion computes.

They are measured in `after_training.py`, not shipped.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from normswap.layers.channelwise import ChannelAffine

# So many times faster does the logarithm of eps move than the other parameters of an AdamW, and its
# square times faster than those of an SGD; at 1 it stands nearly still in so few updates.
FASTER = 10.0


class LearnedEps(nn.Module):
    """A GroupNorm whose eps is learned, as the BasicNorm of icefall learns it: by its logarithm.

    Args:
        norm: The norm with which it begins.
    """

    def __init__(self, norm: nn.GroupNorm) -> None:
        super().__init__()
        self.groups = norm.num_groups
        self.weight = nn.Parameter(norm.weight.detach().clone())
        self.bias = nn.Parameter(norm.bias.detach().clone())
        self.log_eps = nn.Parameter(torch.tensor(math.log(norm.eps) / FASTER))
        # The mean variance of the source's channels: eps is 9 times it at the beginning.
        self.variance = norm.eps / 9

    def eps(self) -> Tensor:
        return (FASTER * self.log_eps).exp()

    def constant_share(self) -> float:
        """The share of variance + eps that is the same for every sample."""
        eps = float(self.eps().detach())
        return eps / (eps + self.variance)

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.unflatten(1, (self.groups, -1))
        variance, mean = torch.var_mean(grouped, (2, 3, 4), correction=0, keepdim=True)
        normed = ((grouped - mean) * (variance + self.eps()).rsqrt()).flatten(1, 2)
        return normed * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)


class Salu(nn.Module):
    """SALU per channel (SaluNet, arXiv 2606.02927, equation 1), a x / sqrt(1 + |a| b x^2), and a
    shift.

    With b = 0, where it begins, it is the scale and shift that `affine` leaves of a norm. The paper
    has positive a and no shift; the gammas of a trained network have both signs.

    Args:
        norm: The scale and shift with which it begins.
    """

    def __init__(self, norm: ChannelAffine) -> None:
        super().__init__()
        self.a = nn.Parameter(norm.weight.detach().clone())
        self.b = nn.Parameter(torch.zeros_like(self.a))
        self.shift = nn.Parameter(norm.bias.detach().clone())
        self.act = copy.deepcopy(norm.act) if norm.act is not None else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        a, b, shift = (tensor.view(-1, 1, 1) for tensor in (self.a, self.b, self.shift))
        # A b that an update has made negative counts as 0, and goes on learning.
        b = b - b.detach().clamp(max=0)
        salu = a * x * (1 + a.abs() * b * x.square()).rsqrt()
        answer: Tensor = self.act(salu + shift)
        return answer


def with_learned_eps(model: nn.Module) -> nn.Module:
    """The network with a learned eps in every GroupNorm."""
    return _replaced(model, nn.GroupNorm, LearnedEps)


def with_salu(model: nn.Module) -> nn.Module:
    """The network with SALU in the place of every scale and shift of a former norm."""
    return _replaced(model, ChannelAffine, Salu)


def constant_share(model: nn.Module) -> dict[str, float]:
    """The mean of `LearnedEps.constant_share` over a network, as `constant`; empty without one."""
    shares = [norm.constant_share() for norm in model.modules() if isinstance(norm, LearnedEps)]
    return {"constant": sum(shares) / len(shares)} if shares else {}


def _replaced(model: nn.Module, old: type[nn.Module], new: type[nn.Module]) -> nn.Module:
    for path, module in [*model.named_modules()]:
        if isinstance(module, old):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, new(module))
    return model
