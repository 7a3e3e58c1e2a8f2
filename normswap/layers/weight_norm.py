"""A convolution that has absorbed its neighbours (`Folded`), with weight norm or spectral norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from normswap.layers import reparametrized
from normswap.layers.folded import FoldOptions, folded
from normswap.layers.planned_layer import Linearity, PlannedLayer
from normswap.layers.seeding import seeded

if TYPE_CHECKING:
    from typing_extensions import Unpack


class WeightNorm(PlannedLayer):
    """W = g v / |v| per filter, by torch's parametrization. g is |W|, so the function is kept.

    A gamma of 0 leaves a filter of zeros, whose v has no direction. Such a filter gets g = 0, and
    for v the filter from before folding, so that g can learn.
    """

    NAMES = {"weight": "parametrizations.weight.original1"}

    @classmethod
    def replacing(
        cls, old: Linearity, *reads: nn.Module, like: Tensor, **fold_options: Unpack[FoldOptions]
    ) -> nn.Module:
        """Return a copy that has absorbed its neighbours, with a weight norm of its weight.

        Args:
            old: The linear layer or convolution.
            reads: The modules that are absorbed.
            like: An empty tensor of the model's dtype. If that is float64, so is the result.
            fold_options: The options of `folded`.
        """
        # The 2-norm of each filter, and the filter itself or a direction in place of zeros.
        new = folded(old, reads, like=like, **fold_options)
        filter_dim = _filter_dim(new)
        weight = new.weight.detach().clone()
        norm = torch.norm_except_dim(weight.double(), 2, filter_dim)
        direction = _direction(old, weight, norm == 0, filter_dim)

        # torch stores g as `original0` and v as `original1`.
        parametrizations.weight_norm(new, dim=filter_dim)
        new.get_parameter("parametrizations.weight.original0").copy_(norm)
        new.get_parameter("parametrizations.weight.original1").copy_(direction)
        return new


class SpectralNorm(PlannedLayer):
    """W = alpha V / sigma(V), by torch's parametrization. At first the learnable alpha is sigma(W).

    The power iteration starts from fixed numbers, not from the user's generator, so that a plan
    replays.
    """

    NAMES = {"weight": "parametrizations.weight.original"}

    @classmethod
    def replacing(
        cls, old: Linearity, *reads: nn.Module, like: Tensor, **fold_options: Unpack[FoldOptions]
    ) -> nn.Module:
        """Return a copy that has absorbed its neighbours, with a spectral norm of its weight.

        The weight W of the copy is computed from two parameters: W = alpha V / sigma(V). V has the
        shape of W, and sigma(V) is its largest singular value. V begins as W, and the number alpha
        as sigma(V).

        Args:
            old: The linear layer or convolution.
            reads: The modules that are absorbed.
            like: An empty tensor of the model's dtype. If that is float64, so is the result.
            fold_options: The options of `folded`.
        """
        new = folded(old, reads, like=like, **fold_options)
        weight = new.weight.detach().clone()

        # A weight of zeros would make V and sigma(V) zero, and V / sigma(V) undefined. V then gets
        # nonzero filters (`_direction`), and alpha = 0 keeps W zero.
        is_zero = (weight == 0).all()
        new.weight.copy_(_direction(old, weight, is_zero, _filter_dim(new)))
        # torch draws vectors. The user's random numbers stay as they are.
        with seeded(weight.device):
            parametrizations.spectral_norm(new)

        # sigma(V) = u' V v, with the left and right singular vectors u and v. torch's few steps of
        # the power iteration come near them, and go on in each forward of a training. Then the
        # weight would change without an update, so the vectors themselves are put in their place.
        # alpha = sigma(V) makes alpha V / sigma(V) equal to W.
        spectral = new.get_submodule("parametrizations.weight.0").eval()
        assert isinstance(spectral, parametrizations._SpectralNorm)
        original = new.get_parameter("parametrizations.weight.original")
        flat = spectral._reshape_weight_to_matrix(original)
        left, _, right = torch.linalg.svd(flat.detach().double(), full_matrices=False)
        spectral._u.copy_(left[:, 0])
        spectral._v.copy_(right[0])
        sigma = torch.vdot(spectral._u, torch.mv(flat, spectral._v))

        gain = reparametrized.Gain(torch.where(is_zero, torch.zeros_like(sigma), sigma))
        parametrize.register_parametrization(new, "weight", gain)
        return new


def _filter_dim(layer: nn.Module) -> int:
    """Return the dimension of a linear layer's weight along which its filters lie.

    It is 1 for a transposed convolution, and 0 for any other layer.
    """
    return int(getattr(layer, "transposed", False))


def _direction(old: Linearity, weight: Tensor, dead: Tensor, filter_dim: int) -> Tensor:
    """Return the weight with a nonzero filter in place of each filter of zeros.

    The filter is the one before folding, or ones if that was zero, too.

    Args:
        old: The layer before folding.
        weight: The folded weight.
        dead: Which filters of the folded weight are zero, in a shape that broadcasts.
        filter_dim: The dimension of the weight that counts its filters.
    """
    before = old.weight.detach().to(weight)
    norm = torch.norm_except_dim(before, 2, filter_dim)
    before = torch.where(norm == 0, torch.ones_like(before), before)
    return torch.where(dead, before, weight)
