"""Dynamic Tanh in place of BatchNorms: y = gamma tanh(alpha x) + beta (Zhu et al. 2025,
arXiv:2503.10622).

One alpha fits all channels if they are standardized: the convolution before absorbs mean and
deviation, and

    x^ = (x - mean) / sqrt(var + eps),   y' = gamma' tanh(alpha x^) + beta,
    gamma' = gamma E[u tanh(alpha u)] / E[tanh(alpha u)^2]

is the least-squares fit to the BatchNorm's output for x^ and u of N(0, 1). A channel with long
tails may be scaled by f < 1: f x^ in place of x^, and f alpha in place of alpha in gamma'.
"""

import functools

import torch
from torch import Tensor, nn

from normswap.layers import affine
from normswap.layers.channelwise import ChannelAffine
from normswap.layers.known_norms import KINDS, NormKind, Statistics
from normswap.layers.per_sample import led, rescaled
from normswap.layers.planned_layer import GAMMA, Linearity, OwnLayer, PlannedLayer, per_channel


class DynamicTanh(PlannedLayer, OwnLayer):
    """y = act(weight * tanh(alpha * x) + bias), alpha one number, weight and bias per channel; all
    of them learn.
    """

    NORMALIZES = True
    ROLES = {"alpha": "tanh_alpha", "weight": GAMMA, "bias": "beta"}

    def __init__(
        self, weight: Tensor, bias: Tensor, alpha: float, act: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.alpha = nn.Parameter(weight.new_full((1,), alpha))
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(bias)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        x = self.normalized(x) * per_channel(self.weight, x) + per_channel(self.bias, x)
        return self.activated(x)

    def normalized(self, x: Tensor) -> Tensor:
        return torch.tanh(self.alpha.to(x) * x)

    @classmethod
    def replacing(
        cls, old: nn.Module, *, like: Tensor, alpha: float, lead: bool = False
    ) -> nn.Module:
        """The layer with the norm's gamma and beta, behind its statistics: a `ChannelAffine`
        (`lead`) or `Whitened`.
        """
        scale, offset, gamma, beta = _whitening(old)
        gamma = gain(alpha) * gamma
        new = cls(gamma.to(like), beta.to(like), alpha, affine.copied_activation(old))
        return led(scale, offset, new, lead=lead)


KINDS[DynamicTanh] = NormKind(Statistics.SAMPLE)


class Whitened(PlannedLayer):
    """The convolution before a norm, with the norm's statistics: each channel of mean 0 and
    deviation 1.
    """

    @classmethod
    def replacing(cls, old: Linearity, norm: nn.Module, *, like: Tensor) -> nn.Module:
        scale, offset, _, _ = _whitening(norm)
        return rescaled(old, scale, offset)


class Straight(PlannedLayer):
    """A `DynamicTanh` without the tanh: the BatchNorm less the statistics that are absorbed before
    it.
    """

    @classmethod
    def replacing(
        cls, old: nn.Module, *, like: Tensor, alpha: float, lead: bool = False
    ) -> nn.Module:
        scale, offset, gamma, beta = _whitening(old)
        new = ChannelAffine(gamma.to(like), beta.to(like), affine.copied_activation(old))
        return led(scale, offset, new, lead=lead)


@functools.cache
def gain(alpha: float) -> float:
    """E[u tanh(alpha u)] / E[tanh(alpha u)^2] for u of N(0, 1), by the trapezoidal rule."""
    u = torch.linspace(-12, 12, 4801, dtype=torch.float64)
    density = (-u.square() / 2).exp()
    bent = (alpha * u).tanh()
    return float((density * u * bent).sum() / (density * bent.square()).sum())


def gains(alpha: float, factors: Tensor) -> Tensor:
    """The gain of each channel whose input is multiplied by a factor."""
    return torch.tensor(
        [gain(alpha * factor) for factor in factors.tolist()], dtype=torch.float64
    ).to(factors)


def _whitening(norm: nn.Module) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scale and offset from x to x^, gamma and beta of a BatchNorm, each (C,) float64."""
    slope, shift = affine.read(norm)
    mean, var = affine.statistics(norm)
    std = (var + affine.epsilon(norm)).sqrt()
    return 1 / std, -mean / std, slope * std, shift + slope * mean
