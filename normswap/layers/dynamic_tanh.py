"""Dynamic Tanh in place of BatchNorm: y = gamma tanh(alpha x) + beta (Zhu et al. 2025).

Source: arXiv:2503.10622. One alpha fits all channels if they are standardized, so the convolution
before the layer absorbs mean and deviation:

    x^ = (x - mean) / sqrt(var + eps),   y' = gamma' tanh(alpha x^) + beta,
    gamma' = gamma E[u tanh(alpha u)] / E[tanh(alpha u)^2].

This gamma' is the least-squares fit to the BatchNorm's output for x^ and u of N(0, 1). A channel
with long tails may be scaled by a factor f < 1. Then the layer reads f x^ in place of x^, and
gamma' is computed with f alpha in place of alpha.
"""

import functools

import torch
from torch import Tensor, nn

from normswap.layers.channelwise import ChannelAffine
from normswap.layers.per_sample import rescaled, with_lead
from normswap.layers.planned_layer import GAMMA, Linearity, OwnLayer, PlannedLayer, per_channel
from normswap.sites import affine
from normswap.sites.known_norms import KINDS, NormKind, Statistics


class DynamicTanh(PlannedLayer, OwnLayer):
    """Dynamic Tanh, in place of a norm: y = act(weight * tanh(alpha * x) + bias).

    The layer has a single alpha, and a weight and bias for each channel. `act` is the activation
    that the norm applied, or the identity if it applied none.
    """

    NORMALIZES = True
    PARTNER = "Whitened"
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
        """Return tanh(alpha x), the values that are multiplied by gamma."""
        return torch.tanh(self.alpha.to(x) * x)

    @classmethod
    def replacing(
        cls, old: nn.Module, *, like: Tensor, alpha: float, lead: bool = False
    ) -> nn.Module:
        """Return the Dynamic Tanh that fits a BatchNorm best, as a layer for standardized input.

        It has the BatchNorm's beta. Its weight is the BatchNorm's gamma times the factor with which
        a tanh of standardized input is closest to that input (`gain`).

        Args:
            old: The BatchNorm.
            like: An empty tensor with the dtype and device of the new tensors.
            alpha: The factor inside the tanh.
            lead: Whether a `ChannelAffine` in front of the layer standardizes its input. Otherwise
                the convolution in front of the layer is changed to do so (`Whitened`).
        """
        scale, offset, gamma, beta = _standardization(old)
        gamma = gain(alpha) * gamma
        new = cls(gamma.to(like), beta.to(like), alpha, affine.copied_activation(old))
        return with_lead(scale, offset, new, lead=lead)


KINDS[DynamicTanh] = NormKind(Statistics.SAMPLE)


class Whitened(PlannedLayer):
    """The convolution before a BatchNorm, which absorbs the norm's statistics.

    Each channel of its output has mean 0 and deviation 1.
    """

    @classmethod
    def replacing(cls, old: Linearity, norm: nn.Module, *, like: Tensor) -> nn.Module:
        """Return a copy of a convolution whose output is standardized by a norm's statistics.

        Args:
            old: The convolution.
            norm: The BatchNorm behind it, which has the mean and variance of its output.
            like: Not used.
        """
        scale, offset, _, _ = _standardization(norm)
        return rescaled(old, scale, offset)


class Straight(PlannedLayer):
    """A `DynamicTanh` without the tanh: y = act(gamma x^ + beta).

    x^ is the input, which the layer in front standardizes. So y equals the output of the BatchNorm
    that was replaced.
    """

    @classmethod
    def replacing(
        cls, old: nn.Module, *, like: Tensor, alpha: float, lead: bool = False
    ) -> nn.Module:
        """Return a scale and shift that compute what the BatchNorm does behind `Whitened`.

        Args:
            old: The BatchNorm.
            like: An empty tensor with the dtype and device of the new tensors.
            alpha: Not used. The edit of a `DynamicTanh` has it.
            lead: Whether a `ChannelAffine` in front standardizes the input, as in
                `DynamicTanh.replacing`.
        """
        scale, offset, gamma, beta = _standardization(old)
        new = ChannelAffine(gamma.to(like), beta.to(like), affine.copied_activation(old))
        return with_lead(scale, offset, new, lead=lead)


@functools.cache
def gain(alpha: float) -> float:
    """Return the factor g with which g tanh(alpha u) fits u of N(0, 1) best, in mean square.

    g = E[u tanh(alpha u)] / E[tanh(alpha u)^2]. Both integrals are computed by the trapezoidal
    rule.
    """
    # The density needs no constant in front, because the quotient cancels it. Outside of [-12, 12]
    # it is negligible.
    u = torch.linspace(-12, 12, 4801, dtype=torch.float64)
    density = (-u.square() / 2).exp()
    bent = (alpha * u).tanh()
    return float((density * u * bent).sum() / (density * bent.square()).sum())


def gains(alpha: float, factors: Tensor) -> Tensor:
    """Return for each channel the factor g with which g tanh(alpha f u) fits u best (`gain`).

    Args:
        alpha: The factor inside the tanh.
        factors: The factor f of each channel, (C,), by which the input of its tanh is multiplied as
            well.
    """
    by_channel = [gain(alpha * factor) for factor in factors.tolist()]
    return torch.tensor(by_channel, dtype=torch.float64).to(factors)


def _standardization(norm: nn.Module) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (scale, offset, gamma, beta) of a BatchNorm, each (C,) in float64.

    The norm is y = gamma x^ + beta with x^ = scale x + offset = (x - mean) / sqrt(var + eps).
    """
    slope, shift = affine.read_map(norm)
    mean, var = affine.statistics(norm)
    std = (var + affine.epsilon(norm)).sqrt()
    return 1 / std, -mean / std, slope * std, shift + slope * mean
