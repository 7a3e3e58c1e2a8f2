"""A BatchNorm put behind a convolution, set so that it undoes its own statistics."""

from __future__ import annotations

import copy
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from normswap.layers.placeholders import Chain
from normswap.layers.planned_layer import PlannedLayer
from normswap.layers.site_norm import SiteNorm, empty_like_norm


class MeasuredNorm(PlannedLayer):
    """A convolution followed by a BatchNorm. The convolution's bias becomes beta.

    A bias in front of a BatchNorm would never be trained, as the norm subtracts the mean.
    """

    KEEPS_NORM = True
    NAMES = {"weight": "inner.weight"}

    @classmethod
    def replacing(cls, old: _ConvNd, *, like: Tensor, eps: float, momentum: float) -> Chain:
        """Return the convolution and a norm (statistics 0 and 1) that compute what `old` does."""
        conv = copy.deepcopy(old)
        if isinstance(conv._parameters.get("bias"), nn.Parameter):
            conv.bias = None

        norm = SiteNorm(conv.out_channels, eps=eps, momentum=momentum, ghost=0, act=None)
        norm.to(empty_like_norm(old, like))
        chain = Chain(conv, norm)
        undo_after_conv(old, conv, norm)
        return chain


@torch.no_grad()
def undo_after_conv(source: _ConvNd, conv: _ConvNd, norm: SiteNorm) -> None:
    """Set gamma and beta of a norm so that `conv` and the norm compute what `source` does.

    Args:
        source: The convolution of the source network.
        conv: The copy of `source`. If the copy has lost its bias, beta takes the bias up.
        norm: The norm behind `conv`. Its statistics are kept.
    """
    shift = torch.zeros_like(norm.bias)
    if source.bias is not None and conv.bias is None:
        shift = source.bias
    undo_statistics(norm, shift.detach().double())


@torch.no_grad()
def undo_statistics(norm: nn.Module, shift: Tensor) -> None:
    """Set gamma and beta of a BatchNorm, in place, so that it computes x + shift.

    gamma = sqrt(var + eps) and beta = mean + shift, each (C,): the transform can be the identity
    (Ioffe & Szegedy 2015, arXiv:1502.03167, section 3).
    """
    batchnorm = cast(SiteNorm, norm)
    batchnorm.weight.copy_((batchnorm.running_var.double() + batchnorm.eps).sqrt())
    batchnorm.bias.copy_(batchnorm.running_mean.double() + shift)
