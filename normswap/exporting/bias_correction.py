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
    shifts: dict[nn.Module, Tensor] = {}
    rows: dict[nn.Module, int] = {}

    def watch(layer: nn.Module) -> RemovableHandle:
        losing = copy.deepcopy(layer)
        losing.get_parameter("weight").sub_(_rounded(layer, how.levels))
        losing.register_parameter("bias", None)

        def add_loss(_layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            channels = losing(*args).movedim(-1 if isinstance(layer, nn.Linear) else 1, 0).flatten(1).double()
            shifts[layer] = shifts.get(layer, 0) + channels.sum(1)
            rows[layer] = rows.get(layer, 0) + channels.shape[1]

        return layer.register_forward_pre_hook(add_loss)

    layers = [module for module in network.modules() if isinstance(module, LINEAR) and _is_plain(module)]
    with hooked([watch(layer) for layer in layers]):
        for images in how.images:
            network(images)
    for layer, shift in shifts.items():
        bias = (shift / rows[layer]).float() + (0 if layer.bias is None else layer.get_parameter("bias"))
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
