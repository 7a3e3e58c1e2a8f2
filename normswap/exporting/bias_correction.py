"""Bias correction (Nagel et al. 2019, section 4.2): rounding the weights shifts the mean of no channel."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normswap.exporting.exported_module import Shipped
from normswap.exporting.settings import Quantization
from normswap.graph.node_reader import LINEAR
from normswap.layers import own_forwards
from normswap.models.modes import hooked


@torch.no_grad()
def correct_biases(network: Shipped, how: Quantization) -> None:
    """Add E[(W - rounded W) x] to each bias, in place: the mean over the images and all places, x in float32.

    A layer that does not compute what its weight says keeps its bias.
    """
    # Batches are of one size, so that the mean of their means is that of all.
    shifts: dict[nn.Module, list[Tensor]] = {}

    def watch(layer: nn.Module) -> RemovableHandle:
        losing = copy.deepcopy(layer)
        losing.get_parameter("weight").sub_(_rounded(layer, how.levels))
        losing.register_parameter("bias", None)

        def add_loss(_layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            channels = losing(*args).movedim(-1 if isinstance(layer, nn.Linear) else 1, 0).flatten(1)
            shifts.setdefault(layer, []).append(channels.double().mean(1))

        return layer.register_forward_pre_hook(add_loss)

    with hooked([watch(module) for module in network.modules() if isinstance(module, LINEAR) and _is_plain(module)]):
        for images in how.images:
            network(images)
    for layer, means in shifts.items():
        bias = torch.stack(means).mean(0).float()
        if layer.bias is not None:
            bias += layer.get_parameter("bias")
        layer.bias = nn.Parameter(bias, requires_grad=False)


def _is_plain(layer: nn.Module) -> bool:
    return "weight" in layer._parameters and (not own_forwards.is_own(layer) or own_forwards.computes(layer))


def _rounded(layer: nn.Module, levels: int) -> Tensor:
    """The weight as a quantizer stores it: a step for each output channel, each number to the nearest multiple."""
    weight = layer.get_parameter("weight")
    by_channel = 1 if getattr(layer, "transposed", False) else 0
    others = [dim for dim in range(weight.ndim) if dim != by_channel]
    step = (weight.abs().amax(others, keepdim=True) / levels).clamp_min(torch.finfo(weight.dtype).tiny)
    return (weight / step).round() * step
