"""A convolution, and after it a BatchNorm that is the identity at first: statistics measured on images come later."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from normswap.layers.known_norms import BatchNorm
from normswap.layers.placeholders import Chain
from normswap.layers.planned_layer import PlannedLayer
from normswap.layers.site_norm import SiteNorm, typed


class MeasuredNorm(PlannedLayer):
    """A convolution followed by a BatchNorm; its bias becomes beta, as a bias before a BatchNorm is never trained."""

    KEEPS_NORM = True
    NAMES: ClassVar[Mapping[str, str]] = {"weight": "inner.weight"}

    @classmethod
    def replacing(cls, old: _ConvNd, *, like: Tensor, eps: float, momentum: float) -> Chain:
        conv = copy.deepcopy(old)
        if isinstance(conv._parameters.get("bias"), nn.Parameter):
            conv.bias = None
        norm = SiteNorm(conv.out_channels, eps=eps, momentum=momentum, ghost=0, act=None).to(typed(old, like))
        chain = Chain(conv, norm)
        settle(old, conv, norm)
        return chain


@torch.no_grad()
def settle(source: _ConvNd, conv: _ConvNd, norm: SiteNorm) -> None:
    """Let gamma and beta of a norm after `conv` undo its statistics, so that both compute what `source` does.

    gamma = sqrt(var + eps), beta = mean + b, where b is the bias that `conv` no longer has (Ioffe & Szegedy 2015,
    arXiv:1502.03167, section 3: the transform can be the identity).
    """
    stored = cast(BatchNorm, norm)
    norm.weight.copy_((stored.running_var.double() + norm.eps).sqrt())
    moved = source.bias is not None and conv.bias is None
    bias = cast(Tensor, source.bias).detach().double() if moved else 0.0
    norm.bias.copy_(stored.running_mean.double() + bias)
