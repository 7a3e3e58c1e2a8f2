"""The weights that an int8 file has: integers times a step, one step for each output channel or one for all."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normswap.layers.seat import Linearity


def rounded(module: Linearity, *, levels: float, per_channel: bool) -> Tensor:
    """The weights as the file's tool rounds them, each for itself.

    Args:
        levels: so many steps from 0 the largest weight is; of 63.5 the file has 64 on one side and 63 on the other.
    """
    weight = module.weight.detach()
    step = steps(module, levels=levels, per_channel=per_channel)
    return (weight / step + 0.5).floor().clamp(-math.floor(levels), math.ceil(levels)) * step


def steps(module: Linearity, *, levels: float, per_channel: bool) -> Tensor:
    """(O, 1, ...), or (1, O, ...) of transposed convolutions."""
    weight = module.weight.detach()
    over = 1 if getattr(module, "transposed", False) else 0
    by_row = weight.transpose(0, over).flatten(1).abs()
    size = by_row.amax(1) if per_channel else by_row.amax().expand(len(by_row))
    shape = [1] * weight.ndim
    shape[over] = -1
    return (size / levels).clamp_min(torch.finfo(weight.dtype).tiny).view(shape)
