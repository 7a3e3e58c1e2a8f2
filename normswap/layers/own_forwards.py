"""Linear layers with a forward of their own: believed where they compute what their tensors say.

Libraries that follow TensorFlow write their own same padding: a subclass of `Conv2d` pads with
zeros, by widths from its constructor or from the input's size, and calls `F.conv2d` on its own
weight. It is a convolution if, in float64 with random weights, its weight, bias, stride, dilation
and groups give its output for the padded input. The call itself shows the padding.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from normswap.layers.known_norms import SCALES, is_near
from normswap.layers.reparametrized import CONVOLUTIONS

_CALLS = (torch.conv1d, torch.conv2d, torch.conv3d)
_ARGUMENTS = ("input", "weight", "bias", "stride", "padding")
# Inputs have an odd or an even number of positions beyond the kernel's reach.
_ROOM = (5, 8)


class _Reached(Exception):  # noqa: N818 - a signal, no error
    """A convolution was called."""


class _Watch(TorchFunctionMode):
    """Stops the first convolution, and records its input and padding."""

    def __init__(self) -> None:
        super().__init__()
        self.read: Tensor | None = None
        self.padding: Any = 0

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        if func not in _CALLS:
            return func(*args, **kwargs)
        arguments = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
        self.read = arguments["input"]
        self.padding = arguments.get("padding", 0)
        raise _Reached


def is_depthwise(layer: nn.Module) -> bool:
    """Whether each filter of a convolution reads one of several channels."""
    return 1 < getattr(layer, "groups", 1) == getattr(layer, "in_channels", 0)


def padded(layer: _ConvNd, x: Tensor) -> Tensor:
    """The values that a convolution reads from x (N, I, ...), padded with zeros."""
    maps, ends = read(layer, x)
    return F.pad(maps, [width for side in reversed(ends) for width in side])


def read(layer: _ConvNd, x: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
    """A convolution's input for x (N, I, ...), and the widths of zeros by side; raises TypeError:
    it calls none.
    """
    watch = _Watch()
    try:
        with watch, torch.no_grad():
            layer.forward(x)
    except _Reached:
        pass
    if watch.read is None:
        raise TypeError(f"a {type(layer).__name__} calls no convolution")
    kernel = layer.kernel_size
    dilation = layer.dilation
    padding = watch.padding
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return watch.read, [(total // 2, total - total // 2) for total in totals]
    if padding == "valid":
        padding = 0
    sides = torch.as_tensor(padding).expand(len(kernel)).tolist()
    return watch.read, [(side, side) for side in sides]


def is_own(layer: nn.Module) -> bool:
    """Whether the class or the instance of a linear layer has a forward that is not torch's."""
    return is_patched(layer) or not type(layer).forward.__module__.startswith("torch.nn.modules.")


def is_patched(layer: nn.Module) -> bool:
    """Whether the instance has a forward of its own, or a convolution overrides `_conv_forward`."""
    helper = getattr(layer, "_conv_forward", nn.Linear.forward)
    return "forward" in vars(layer) or not helper.__module__.startswith("torch.nn.modules.")


@torch.no_grad()
def computes(layer: nn.Module) -> bool:
    """Whether a layer with a forward of its own computes the convolution, or linear map, that its
    tensors say.
    """
    if isinstance(layer, torch.jit.ScriptModule) or not isinstance(
        layer, (nn.Linear, *CONVOLUTIONS)
    ):
        return False
    try:
        twin = copy.deepcopy(layer).double().cpu().eval()
        generator = torch.Generator().manual_seed(0)
        for parameter in twin.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        return all(_agrees(twin, room, scale, generator) for room in _ROOM for scale in SCALES)
    except Exception:
        return False


def _agrees(
    layer: nn.Linear | _ConvNd, room: int, scale: float, generator: torch.Generator
) -> bool:
    weight, bias = copy.deepcopy((layer.weight, layer.bias))
    if isinstance(layer, nn.Linear):
        x = scale * torch.randn(room, layer.in_features, generator=generator, dtype=torch.float64)
        return is_near(layer.forward(x.clone()), F.linear(x, weight, bias))
    sides = _sides(layer, room)
    x = scale * torch.randn(2, layer.in_channels, *sides, generator=generator, dtype=torch.float64)
    padded_x = padded(layer, x.clone())
    call = _CALLS[len(sides) - 1]
    expected = call(padded_x, weight, bias, layer.stride, 0, layer.dilation, layer.groups)
    only_padded = torch.equal(
        padded_x[tuple(slice(first, last + 1) for first, last in _ends(padded_x))], x
    )
    return only_padded and is_near(layer.forward(x.clone()), expected)


def pads(layer: _ConvNd) -> bool:
    """Whether a convolution that is believed pads its input, at one size or another."""
    if not is_own(layer):
        return layer.padding == "same" or (layer.padding != "valid" and any(layer.padding))
    return any(wide for widths in _at_sizes(layer) for side in widths for wide in side)


def even_padding(layer: _ConvNd) -> tuple[int, ...] | str | None:
    """The `padding` with which torch pads as this convolution does; None: uneven, or by the input's
    size.
    """
    if not is_own(layer):
        padding: tuple[int, ...] | str = layer.padding
        return padding
    first, *more = _at_sizes(layer)
    if any(begin != end for begin, end in first) or any(widths != first for widths in more):
        return None
    return tuple(begin for begin, _ in first)


def _at_sizes(layer: _ConvNd) -> Iterator[list[tuple[int, int]]]:
    """The widths of zeros before and after each side, for inputs of several sizes."""
    for room in _ROOM:
        read = padded(layer, layer.weight.new_ones(1, layer.in_channels, *_sides(layer, room)))[
            0, 0
        ]
        yield [
            (first, size - 1 - last)
            for (first, last), size in zip(_ends(read), read.shape, strict=True)
        ]


def _sides(layer: _ConvNd, room: int) -> list[int]:
    return [d * (k - 1) + room for k, d in zip(layer.kernel_size, layer.dilation, strict=True)]


def _ends(read: Tensor) -> list[tuple[int, int]]:
    return [(int(at.min()), int(at.max())) for at in read.nonzero().unbind(1)]
