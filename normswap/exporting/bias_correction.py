"""What rounding the weights adds to each channel in the mean, taken off its bias (Nagel et al. 2019, section 4.2)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor, nn

from normswap.graph.inspection import LINEAR
from normswap.layers.seat import Linearity


def rounded(module: Linearity, *, levels: float, per_channel: bool) -> Tensor:
    """The weights as integers times a step give them, one step for each output channel or one for all: the largest
    weight is `levels` steps from 0 (64; of 63.5 the file has 64 on one side and 63 on the other).
    """
    weight = module.weight.detach()
    by_row = weight.transpose(0, 1) if getattr(module, "transposed", False) else weight
    size = by_row.abs().flatten(1).amax(1) if per_channel else by_row.abs().amax().expand(len(by_row))
    step = (size / levels).clamp_min(torch.finfo(weight.dtype).tiny)
    shape = [1] * weight.ndim
    shape[1 if by_row is not weight else 0] = -1
    step = step.view(shape)
    return (weight / step + 0.5).floor().clamp(-math.floor(levels), math.ceil(levels)) * step


@torch.no_grad()
def correct(
    network: nn.Module,
    images: Iterable[Tensor],
    *,
    levels: Callable[[nn.Module], float],
    per_channel: bool,
    keep: Collection[str] = (),
) -> None:
    """Change the biases of `network`, in place: b' = b + E[(W - rounded W) x], over the images and all places.

    The network's own x is taken, not that of the rounded network: errors of one layer are not the next one's to repair.

    Args:
        levels: of each layer (`rounded`).
        keep: the paths of layers that stay as they are.
    """
    layers = {path: module for path, module in network.named_modules() if isinstance(module, LINEAR)}
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def watch(path: str, lost: nn.Module) -> Callable[..., None]:
        def look(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            out = lost(args[0])
            rows = out.flatten(0, -2) if isinstance(lost, nn.Linear) else out.transpose(0, 1).flatten(1).T
            sums[path] = sums.get(path, 0) + rows.double().sum(0)
            counts[path] = counts.get(path, 0) + len(rows)

        return look

    handles = []
    for path, module in layers.items():
        if path in keep:
            continue
        lost = copy.deepcopy(module)
        lost.weight.copy_(module.weight - rounded(module, levels=levels(module), per_channel=per_channel))
        lost.bias = None
        handles.append(module.register_forward_pre_hook(watch(path, lost)))
    for x in images:
        network(x)
    for handle in handles:
        handle.remove()
    for path, total in sums.items():
        module = layers[path]
        more = (total / counts[path]).to(module.weight.dtype)
        module.bias = nn.Parameter(more if module.bias is None else module.bias + more, requires_grad=False)
