"""Bias correction.

The mean that rounding the weights adds to each channel, taken off its bias (Nagel et al. 2019, section 4.2).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from normswap.graph.node_reader import LINEAR
from normswap.models.modes import hooked


@torch.no_grad()
def correct(network: nn.Module, images: Iterable[Tensor], rounded: Mapping[str, Tensor]) -> None:
    """Change the biases of `network`, in place: b' = b + E[(W - rounded W) x], over the images and all places.

    The network's own x is taken, not that of the rounded network: errors of one layer are not the next one's to repair.

    Args:
        rounded: the weights that the file will have, by the layer's path.
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
    for path, weight in rounded.items():
        module = layers[path]
        lost = copy.deepcopy(module)
        lost.weight.copy_(module.weight - weight)
        lost.bias = None
        handles.append(module.register_forward_pre_hook(watch(path, lost)))
    with hooked(handles):
        for x in images:
            network(x)
    for path, total in sums.items():
        module = layers[path]
        more = (total / counts[path]).to(module.weight.dtype)
        module.bias = nn.Parameter(more if module.bias is None else module.bias + more, requires_grad=False)
