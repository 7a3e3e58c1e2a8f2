"""Layers that reparametrize a weight: a convolution that has taken in its neighbours (`Folded`), then dressed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from normswap.layers import reparametrized
from normswap.layers.folded import Folded
from normswap.layers.seat import Linearity, Seat


class WeightNorm(Seat):
    """W = g v / |v| per filter, by torch's parametrization; g is the filter's norm, so the function is kept.

    A filter of zeros gets g = 0 and the direction it had before it was scaled, so that it can live again.
    """

    NAMES = {"weight": "parametrizations.weight.original1"}

    @classmethod
    def replacing(cls, old: Any, *reads: nn.Module, like: Tensor, **args: Any) -> nn.Module:
        new: Any = Folded.replacing(old, *reads, like=like, **args)
        dim = 1 if getattr(new, "transposed", False) else 0
        weight = new.weight.detach().clone()
        norm = torch.norm_except_dim(weight.double(), 2, dim)
        direction = _direction(old, weight, norm == 0, dim)
        parametrizations.weight_norm(new, dim=dim)
        made = new.parametrizations.weight
        made.original0.copy_(norm)
        made.original1.copy_(direction)
        return new


class SpectralNorm(Seat):
    """W = alpha V / sigma(V), by torch's parametrization and a learnable scalar alpha, at first sigma(W).

    The power iteration starts from fixed numbers, not from the user's generator, so that a plan replays.
    """

    NAMES = {"weight": "parametrizations.weight.original"}

    @classmethod
    def replacing(cls, old: Any, *reads: nn.Module, like: Tensor, **args: Any) -> nn.Module:
        new: Any = Folded.replacing(old, *reads, like=like, **args)
        dim = 1 if getattr(new, "transposed", False) else 0
        weight = new.weight.detach().clone()
        dead = (weight == 0).all()
        new.weight.copy_(_direction(old, weight, dead, dim))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            parametrizations.spectral_norm(new, dim=dim)
        spectral = new.parametrizations.weight[0].eval()
        flat = spectral._reshape_weight_to_matrix(new.parametrizations.weight.original)
        sigma = torch.vdot(spectral._u, torch.mv(flat, spectral._v))
        gain = reparametrized.Gain(torch.where(dead, torch.zeros_like(sigma), sigma))
        parametrize.register_parametrization(new, "weight", gain)
        return new


def _direction(old: Linearity, weight: Tensor, dead: Tensor, dim: int) -> Tensor:
    """`weight`, but where it is dead what stood there before, or ones."""
    before = old.weight.detach().to(weight)
    norm = torch.norm_except_dim(before, 2, dim)
    before = torch.where(norm == 0, torch.ones_like(before), before)
    return torch.where(dead, before, weight)
