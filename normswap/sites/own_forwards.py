"""Linear layers with a forward of their own, believed where they compute what their tensors say.

Libraries that follow TensorFlow write their own same padding: a subclass of `Conv2d` pads with
zeros, by widths from its constructor or from the input's size, and calls `F.conv2d` on its own
weight. It is a convolution if, in float64 with random weights, its weight, bias, stride, dilation
and groups give its output for the padded input. The padding is read from the call of `F.conv2d`.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from normswap import copying
from normswap.sites.known_norms import SCALES, is_near

Linearity: TypeAlias = nn.Linear | nn.modules.conv._ConvNd
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Zeros before and after the values of one dimension.
Widths: TypeAlias = tuple[int, int]
_CONV_FUNCTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
_CONV_ARGUMENTS = ("input", "weight", "bias", "stride", "padding")
# Test inputs have an odd and an even number of positions beyond the kernel's reach.
_EXTRA_POSITIONS = (5, 8)


class _ConvolutionCalled(Exception):  # noqa: N818 - a signal, no error
    """Ends the forward of a layer at its first call of a convolution, when the call is recorded."""


class _FirstConvolution(TorchFunctionMode):
    """Stops the forward at its first convolution, and records that call's input and padding."""

    def __init__(self) -> None:
        super().__init__()
        self.input: Tensor | None = None
        self.padding: str | int | Sequence[int] = 0

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Run a function, or record the call and stop the forward if it is a convolution.

        Args:
            func: The function of torch that the forward calls.
            types: Classes of tensors, which nothing here depends on.
            args: The call's positional arguments.
            kwargs: The call's keyword arguments.
        """
        kwargs = kwargs or {}
        if func not in _CONV_FUNCTIONS:
            return func(*args, **kwargs)

        arguments = {**dict(zip(_CONV_ARGUMENTS, args, strict=False)), **kwargs}
        self.input = arguments["input"]
        self.padding = arguments.get("padding", 0)
        raise _ConvolutionCalled


def is_depthwise(layer: nn.Module) -> bool:
    """Whether a convolution has several input channels and each filter reads one of them."""
    return 1 < getattr(layer, "groups", 1) == getattr(layer, "in_channels", 0)


def padded(layer: _ConvNd, x: Tensor) -> Tensor:
    """Return the values that a convolution reads from x (N, I, ...), with its zeros around them."""
    conv_input, widths = input_and_padding(layer, x)
    # F.pad takes the widths of the last dimension first.
    return F.pad(conv_input, [*itertools.chain.from_iterable(reversed(widths))])


def input_and_padding(layer: _ConvNd, x: Tensor) -> tuple[Tensor, list[Widths]]:
    """Return what a layer passes to torch's convolution for x (N, I, ...).

    Returns:
        The input of the call, and the widths of the zeros that the call adds around each dimension.

    Raises:
        TypeError: The layer calls no convolution.
    """
    # The exception ends the forward once the call of the convolution is recorded.
    watch = _FirstConvolution()
    try:
        with watch, torch.no_grad():
            layer.forward(x)
    except _ConvolutionCalled:
        pass
    if watch.input is None:
        raise TypeError(f"a {type(layer).__name__} calls no convolution")

    padding = watch.padding
    if padding == "same":
        # torch puts the odd zero of an even kernel at the end.
        reaches = [
            step * (size - 1) for size, step in zip(layer.kernel_size, layer.dilation, strict=True)
        ]
        return watch.input, [(reach // 2, reach - reach // 2) for reach in reaches]
    if padding == "valid":
        padding = 0

    # The padding is one number for all dimensions, or one for each.
    sides = torch.as_tensor(padding).expand(len(layer.kernel_size)).tolist()
    return watch.input, [(side, side) for side in sides]


def is_own(layer: nn.Module) -> bool:
    """Whether the class or the instance of a linear layer has a forward that is not torch's."""
    return is_patched(layer) or not type(layer).forward.__module__.startswith("torch.nn.modules.")


def is_patched(layer: nn.Module) -> bool:
    """Whether a linear layer has its own `forward` on the instance, or its own `_conv_forward`."""
    # A linear layer has no `_conv_forward`: a function of torch stands in for it.
    helper = getattr(layer, "_conv_forward", nn.Linear.forward)
    return "forward" in vars(layer) or not helper.__module__.startswith("torch.nn.modules.")


@torch.no_grad()
def computes(layer: nn.Module) -> bool:
    """Whether a layer with its own forward computes what its weight, bias and settings say.

    That is a convolution, perhaps with other padding than stated, or a linear map. A trial run
    decides.
    """
    if isinstance(layer, torch.jit.ScriptModule):
        return False
    if not isinstance(layer, (nn.Linear, *CONVOLUTIONS)):
        return False

    # On a float64 copy with random weights, no other computation gives the same output by chance.
    try:
        twin = copying.duplicate(layer, {}).double().cpu().eval()
        generator = torch.Generator().manual_seed(0)
        for parameter in nn.Module.parameters(twin):
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))

        for extra in _EXTRA_POSITIONS:
            for scale in SCALES:
                if not _is_as_stated(twin, extra, scale, generator):
                    return False
        return True
    # A foreign forward may refuse to be copied, or an input of this shape.
    except Exception:
        return False


def _is_as_stated(
    layer: nn.Linear | _ConvNd, extra: int, scale: float, generator: torch.Generator
) -> bool:
    """Whether a float64 layer, on one random input, computes what its tensors and settings say.

    Args:
        layer: The layer, with random weights.
        extra: How many positions the input has beyond the kernel's reach. For a linear layer it is
            the number of rows.
        scale: The factor of the input's values.
        generator: Where the random values come from.
    """
    # A forward may change its own weight, so the weight is copied before the layer runs.
    weight, bias = copy.deepcopy((layer.weight, layer.bias))
    if isinstance(layer, nn.Linear):
        x = scale * torch.randn(extra, layer.in_features, generator=generator, dtype=torch.float64)
        return is_near(layer.forward(x.clone()), F.linear(x, weight, bias))

    sides = _input_sides(layer, extra)
    x = scale * torch.randn(2, layer.in_channels, *sides, generator=generator, dtype=torch.float64)
    padded_x = padded(layer, x.clone())
    convolve = _CONV_FUNCTIONS[len(sides) - 1]
    expected = convolve(padded_x, weight, bias, layer.stride, 0, layer.dilation, layer.groups)

    # The layer may only pad x with zeros: the values inside the zeros must be x itself.
    inside = tuple(slice(first, last + 1) for first, last in _nonzero_range(padded_x))
    only_padded = torch.equal(padded_x[inside], x)
    return only_padded and is_near(layer.forward(x.clone()), expected)


def pads(layer: _ConvNd) -> bool:
    """Whether a convolution pads its input, for some size of the input.

    Args:
        layer: A convolution that runs torch's forward, or that `computes` has accepted.
    """
    if not is_own(layer):
        return layer.padding == "same" or (layer.padding != "valid" and any(layer.padding))

    return any(_has_zeros(widths) for widths in _widths_by_size(layer))


def _has_zeros(widths: Sequence[Widths]) -> bool:
    """Whether a padding adds zeros at any side of any dimension.

    Args:
        widths: The width before and after each dimension.
    """
    return any(begin or end for begin, end in widths)


def even_padding(layer: _ConvNd) -> tuple[int, ...] | str | None:
    """Return the value of torch's argument `padding` that pads as this convolution does.

    None says that there is no such value: the padding is uneven, or depends on the input's size.
    """
    if not is_own(layer):
        padding: tuple[int, ...] | str = layer.padding
        return padding

    # torch pads evenly, and equally for inputs of every size.
    first, *others = _widths_by_size(layer)
    is_uneven = any(begin != end for begin, end in first)
    if is_uneven or any(widths != first for widths in others):
        return None
    return tuple(begin for begin, _ in first)


def _widths_by_size(layer: _ConvNd) -> Iterator[list[Widths]]:
    """Yield how many zeros a convolution adds before and after each dimension of its input.

    The convolution runs on inputs of several sizes. Each gives one list.
    """
    for extra in _EXTRA_POSITIONS:
        ones = layer.weight.new_ones(1, layer.in_channels, *_input_sides(layer, extra))
        padded_ones = padded(layer, ones)[0, 0]

        widths: list[Widths] = []
        for (first, last), size in zip(_nonzero_range(padded_ones), padded_ones.shape, strict=True):
            widths.append((first, size - 1 - last))
        yield widths


def _input_sides(layer: _ConvNd, extra: int) -> list[int]:
    """Return the size of each spatial dimension of a test input for a convolution.

    The input is `extra` positions longer than the distance from the kernel's first tap to its last.
    """
    sides = zip(layer.kernel_size, layer.dilation, strict=True)
    return [step * (size - 1) + extra for size, step in sides]


def _nonzero_range(values: Tensor) -> list[tuple[int, int]]:
    """Return for each dimension of a tensor the first and last index at which a value is not 0."""
    by_dimension = values.nonzero().unbind(1)
    return [(int(index.min()), int(index.max())) for index in by_dimension]
