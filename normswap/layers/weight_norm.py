"""A convolution that has absorbed its neighbours (`Folded`), with weight norm or spectral norm."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from normswap.layers import reparametrized
from normswap.layers.folded import folded
from normswap.layers.planned_layer import Linearity, PlannedLayer
from normswap.layers.seeding import seeded


class WeightNorm(PlannedLayer):
    """W = g v / |v| per filter, by torch's parametrization; g is the filter's norm, so the function
    is kept.

    A filter of zeros gets g = 0 and the direction that it had before folding, so that it can learn.
    """

    NAMES = {"weight": "parametrizations.weight.original1"}

    @classmethod
    def replacing(cls, old: Linearity, *reads: nn.Module, like: Tensor, **how: Any) -> nn.Module:
        new = folded(old, reads, like=like, **how)
        dim = int(getattr(new, "transposed", False))
        weight = new.weight.detach().clone()
        norm = torch.norm_except_dim(weight.double(), 2, dim)
        direction = _direction(old, weight, norm == 0, dim)
        parametrizations.weight_norm(new, dim=dim)
        new.get_parameter("parametrizations.weight.original0").copy_(norm)
        new.get_parameter("parametrizations.weight.original1").copy_(direction)
        return new


class SpectralNorm(PlannedLayer):
    """W = alpha V / sigma(V), by torch's parametrization and a learnable scalar alpha, at first
    sigma(W).

    The power iteration starts from fixed numbers, not from the user's generator, so that a plan
    replays.
    """

    NAMES = {"weight": "parametrizations.weight.original"}

    @classmethod
    def replacing(cls, old: Linearity, *reads: nn.Module, like: Tensor, **how: Any) -> nn.Module:
        new = folded(old, reads, like=like, **how)
        dim = int(getattr(new, "transposed", False))
        weight = new.weight.detach().clone()
        dead = (weight == 0).all()
        new.weight.copy_(_direction(old, weight, dead, dim))
        with seeded(weight.device):
            parametrizations.spectral_norm(new, dim=dim)
        spectral = new.get_submodule("parametrizations.weight.0").eval()
        assert isinstance(spectral, parametrizations._SpectralNorm)
        flat = spectral._reshape_weight_to_matrix(
            new.get_parameter("parametrizations.weight.original")
        )
        sigma = torch.vdot(spectral._u, torch.mv(flat, spectral._v))
        gain = reparametrized.Gain(torch.where(dead, torch.zeros_like(sigma), sigma))
        parametrize.register_parametrization(new, "weight", gain)
        return new


def _direction(old: Linearity, weight: Tensor, dead: Tensor, dim: int) -> Tensor:
    """`weight`, and where it is dead the weight before folding, or ones."""
    before = old.weight.detach().to(weight)
    norm = torch.norm_except_dim(before, 2, dim)
    before = torch.where(norm == 0, torch.ones_like(before), before)
    return torch.where(dead, before, weight)
