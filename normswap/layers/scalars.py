"""Scalars: fixed factors of residual sums, and the scalar biases of Fixup."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from normswap.layers import reparametrized
from normswap.layers.seats import Folded, Scale


class FixedScale(Scale):
    """One scalar that does not learn, y = alpha x: a residual-scaling rule's a or b."""

    def __init__(self, alpha: float, *, bias: bool = False, like: Tensor | None = None) -> None:
        super().__init__(alpha, bias=bias, like=like)
        value = self.alpha.detach()
        del self.alpha
        self.register_buffer("alpha", value)


class ScalarBias(nn.Module):
    """y = act(x + bias), with one learnable scalar: Fixup's bias before an activation."""

    def __init__(self, bias: Tensor, act: nn.Module | None = None) -> None:
        super().__init__()
        self.bias, self.act = nn.Parameter(bias), act

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, ...) -> (N, C, ...)"""
        x = x + self.bias
        return x if self.act is None else self.act(x)

    @classmethod
    def replacing(cls, old: nn.Module, *, like: Tensor) -> ScalarBias:
        from normswap.layers import affine

        return cls(torch.zeros(1).to(like), copy.deepcopy(affine.activation(old)))


class Shifted:
    """A linear layer, with what it has taken in, that adds one learnable scalar to its input; initially 0."""

    @staticmethod
    def replacing(old: Any, *reads: nn.Module, like: Tensor, **args: Any) -> nn.Module:
        new: Any = Folded.replacing(old, *reads, like=like, **args)
        if not isinstance(new, reparametrized.Shifted):
            new.__class__ = reparametrized.SHIFTED[type(new)]
            new.in_bias = nn.Parameter(torch.zeros(1).to(new.weight))
        return new


SEATED: dict[str, Any] = {cls.__name__: cls for cls in (FixedScale, ScalarBias, Shifted)}
