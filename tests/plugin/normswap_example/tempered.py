"""A BatchNorm whose gamma is multiplied by a temperature; in eval mode an affine map."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import normswap


def read(norm: TemperedNorm) -> tuple[Tensor, Tensor]:
    """s and t of y = s x + t."""
    scale = (
        norm.temperature * norm.weight.double() * torch.rsqrt(norm.running_var.double() + norm.eps)
    )
    return scale, norm.bias.double() - norm.running_mean.double() * scale


class TemperedNorm(nn.BatchNorm2d):
    temperature = 2.0

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W)"""
        scale, shift = (value.to(input).view(1, -1, 1, 1) for value in read(self))
        return input * scale + shift


normswap.register_norm(TemperedNorm, affine=read)
