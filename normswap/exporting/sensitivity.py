"""Which layers int8 costs most: each is rounded alone, its weights and what it reads, and the answers are compared."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from normswap.exporting.weight_grid import rounded
from normswap.graph.inspection import LINEAR
from normswap.models.network_input import answer

_STEPS = 255


@torch.no_grad()
def costs(
    network: nn.Module, x: Tensor, *, levels: Callable[[nn.Module], float], per_channel: bool
) -> dict[str, float]:
    """Relative L2 error of the answers to x (N, C, H, W), by the path of the layer that is rounded, largest first."""
    expected = answer(network(x))
    found = {}
    for path, module in network.named_modules():
        if not isinstance(module, LINEAR):
            continue
        weight = module.weight.data
        handle = module.register_forward_pre_hook(_round_input)
        try:
            module.weight.data = rounded(module, levels=levels(module), per_channel=per_channel)
            found[path] = float((answer(network(x)) - expected).norm() / expected.norm())
        finally:
            handle.remove()
            module.weight.data = weight
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _round_input(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """To 255 steps between the least value (or 0) and the largest."""
    x = args[0]
    low, high = x.amin().clamp(max=0), x.amax().clamp(min=0)
    step = ((high - low) / _STEPS).clamp_min(torch.finfo(x.dtype).tiny)
    return (((x - low) / step).round() * step + low, *args[1:])
