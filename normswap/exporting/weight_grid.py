"""The weights that an int8 file has: integers times a step, one step for each output channel or one for all."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normswap.layers.planned_layer import Linearity


@dataclass(frozen=True)
class WeightGrid:
    """The grid that a file's tool rounds weights to.

    Args:
        levels: of a layer: so many steps from 0 the largest weight is; of 63.5 the file has 64 on one side and 63 on
            the other.
        per_channel: a step for each output channel, else one for all.
    """

    levels: Callable[[nn.Module], float]
    per_channel: bool

    def steps(self, layer: Linearity) -> Tensor:
        """(O, 1, ...), or (1, O, ...) of transposed convolutions."""
        weight = layer.weight.detach()
        over = 1 if getattr(layer, "transposed", False) else 0
        by_row = weight.transpose(0, over).flatten(1).abs()
        size = by_row.amax(1) if self.per_channel else by_row.amax().expand(len(by_row))
        shape = [1] * weight.ndim
        shape[over] = -1
        return (size / self.levels(layer)).clamp_min(torch.finfo(weight.dtype).tiny).view(shape)

    def rounded(self, layer: Linearity) -> Tensor:
        """The weights as the tool rounds them, each for itself."""
        levels, step = self.levels(layer), self.steps(layer)
        return (layer.weight.detach() / step + 0.5).floor().clamp(-math.floor(levels), math.ceil(levels)) * step
