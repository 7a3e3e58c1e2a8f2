"""A BatchNorm put behind a layer, whose gamma and beta undo its own normalization at first."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from normswap import copying
from normswap.layers.placeholders import Chain
from normswap.layers.planned_layer import NotNegative, PlannedLayer
from normswap.layers.site_norm import SiteNorm, empty_like_norm, torchs_own


class MeasuredNorm(PlannedLayer):
    """A convolution, or linear layer, followed by a BatchNorm. The layer's bias becomes beta.

    A bias in front of a BatchNorm would never be trained, as the norm subtracts the mean (Ioffe &
    Szegedy 2015, section 3.2).
    """

    KEEPS_NORM = True
    NAMES = {"weight": "inner.weight"}

    @classmethod
    def replacing(
        cls, old: _ConvNd | nn.Linear, *, like: Tensor, eps: NotNegative, momentum: float
    ) -> Chain:
        """Return the layer and a norm (statistics 0 and 1) that compute what `old` does.

        Args:
            old: The convolution or linear layer.
            like: An empty tensor with the model's dtype and device.
            eps: The norm's eps.
            momentum: The norm's momentum.
        """
        # The copy loses its bias, which beta takes up.
        conv = copying.duplicate(old, {})
        if isinstance(conv._parameters.get("bias"), nn.Parameter):
            conv.bias = None

        measured = SiteNorm(_outputs(conv), eps=eps, momentum=momentum, ghost=0, act=None)
        measured.to(empty_like_norm(old, like))
        # The norm's input has a dimension for the batch and one for the channels, and those of the
        # kernel.
        dims = 2 if isinstance(conv, nn.Linear) else 2 + len(conv.kernel_size)
        norm = torchs_own(measured, dims)
        chain = Chain(conv, norm)
        undo_after_conv(old, conv, norm)
        return chain


def _outputs(conv: _ConvNd | nn.Linear) -> int:
    """Return the number of output channels of a layer, read from the shape of its weight.

    The layer's own attribute is not read, because pruning by hand leaves it as it was.
    """
    if isinstance(conv, _ConvNd) and conv.transposed:
        return int(conv.weight.shape[1]) * conv.groups
    return len(conv.weight)


@torch.no_grad()
def undo_after_conv(
    source: _ConvNd | nn.Linear, conv: _ConvNd | nn.Linear, norm: _BatchNorm
) -> None:
    """Set gamma and beta of a norm so that `conv` and the norm compute what `source` does.

    Args:
        source: The convolution or linear layer of the source network.
        conv: The copy of `source`. If the copy has no bias, the bias of `source` becomes part of
            beta.
        norm: The norm behind `conv`. Its statistics are kept.
    """
    shift = torch.zeros_like(norm.bias)
    if source.bias is not None and conv.bias is None:
        shift = source.bias
    undo_statistics(norm, shift.detach().double())


@torch.no_grad()
def undo_statistics(norm: nn.Module, shift: Tensor, scale: Tensor | None = None) -> None:
    """Set gamma and beta of a BatchNorm, in place, so that it computes scale * x + shift.

    gamma = scale sqrt(var + eps) and beta = scale mean + shift, each (C,): the transform can be the
    identity (Ioffe & Szegedy 2015, arXiv:1502.03167, section 3).

    Args:
        norm: The norm, whose statistics are kept.
        shift: The number that is added to each channel (C,).
        scale: The factor of each channel (C,). None means 1.
    """
    batchnorm = cast(SiteNorm, norm)
    if scale is None:
        scale = torch.ones_like(shift)
    std = (batchnorm.running_var.double() + batchnorm.eps).sqrt()
    batchnorm.weight.copy_(scale * std)
    batchnorm.bias.copy_(scale * batchnorm.running_mean.double() + shift)
