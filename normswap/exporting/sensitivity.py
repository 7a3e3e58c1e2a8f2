"""The cost of int8 for a network, or its layers alone.

Weights and what they read are rounded, and the answers compared.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from normswap.exporting.weight_grid import WeightGrid
from normswap.graph.node_reader import LINEAR
from normswap.models.network_input import answer

_STEPS = 255


@torch.no_grad()
def error(network: nn.Module, x: Tensor, layers: Collection[str], grid: WeightGrid) -> float:
    """Relative L2 error of the answers to x (N, C, H, W) with these layers rounded, weights and what they read."""
    expected = answer(network(x))
    modules = [module for path, module in network.named_modules() if path in layers and isinstance(module, LINEAR)]
    weights = [module.weight.data for module in modules]
    handles = [module.register_forward_pre_hook(_round_input) for module in modules]
    try:
        for module in modules:
            module.weight.data = grid.rounded(module)
        return float((answer(network(x)) - expected).norm() / expected.norm())
    finally:
        for module, weight, handle in zip(modules, weights, handles, strict=True):
            module.weight.data = weight
            handle.remove()


def costs(network: nn.Module, x: Tensor, layers: Collection[str], grid: WeightGrid) -> dict[str, float]:
    """The same of each layer alone, by path, largest first."""
    errors = {path: error(network, x, [path], grid) for path in layers}
    return dict(sorted(errors.items(), key=lambda item: -item[1]))


def _round_input(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """To 255 steps between the least value (or 0) and the largest."""
    x = args[0]
    low, high = x.amin().clamp(max=0), x.amax().clamp(min=0)
    step = ((high - low) / _STEPS).clamp_min(torch.finfo(x.dtype).tiny)
    return (((x - low) / step).round() * step + low, *args[1:])
