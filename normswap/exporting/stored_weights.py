"""The weights of a network that lie in a file, as bytes: for a file whose runtime gives no values from inside."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from normswap.graph.tracing import LINEAR
from normswap.models.calling import Example
from normswap.models.modes import hooked


def said(missing: str) -> str:
    """What `first_missing` found, as a clause."""
    if missing:
        return f"{missing} is nowhere in the file"
    return "the file holds the weights of all convolutions and linear layers"


@torch.no_grad()
def first_missing(network: nn.Module, example: Example, content: bytes, dtype: str) -> str:
    """The first weight or bias, in the order in which layers run, that is nowhere in a file; empty: all are there.

    Of int8 the weights alone: a bias is rounded by a step that depends on images.
    """
    layers = {module: path for path, module in network.named_modules() if isinstance(module, LINEAR)}
    run: list[nn.Module] = []
    with hooked([layer.register_forward_pre_hook(lambda layer, _: run.append(layer)) for layer in layers]):
        example.call(network)
    for layer in dict.fromkeys(run):
        for name, tensor in layer.named_parameters(recurse=False):
            stored = tensor.half() if dtype == "fp16" else tensor
            if dtype == "int8":
                if name == "bias":
                    continue
                step = tensor.flatten(1).abs().amax(1).reshape(-1, *[1] * (tensor.ndim - 1)) / 127
                stored = (tensor / step).round().char()
            if not any(layout in content for layout in _layouts(stored)):
                return f"{layers[layer]}.{name}"
    return ""


def _layouts(tensor: Tensor) -> Iterator[bytes]:
    """As it is, with its output channels last, and with its input channels last."""
    for dim in range(-1, min(tensor.ndim, 3) - 1):
        yield tensor.movedim(dim, -1).contiguous().numpy().tobytes()
