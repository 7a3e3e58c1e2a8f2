"""The inputs and targets of a layer as rows, at output positions that are drawn at random."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from normswap.layers.planned_layer import Linearity
from normswap.layers.reparametrized import is_reparametrized
from normswap.sites import own_forwards
from normswap.sites.own_forwards import CONVOLUTIONS


def fits(module: nn.Module) -> bool:
    """Whether `patches` can read a layer's inputs.

    It can for linear maps, and for convolutions that pad with zeros. A layer whose class overrides
    torch's forward is read only if that forward is known.
    """
    if isinstance(module, CONVOLUTIONS) and module.padding_mode != "zeros":
        return False
    if not isinstance(module, (nn.Linear, *CONVOLUTIONS)):
        return False
    # The class may override torch's forward (`is_own`). Then a trial run decides whether it
    # computes the same map (`computes`).
    return (
        is_reparametrized(module)
        or not own_forwards.is_own(module)
        or own_forwards.computes(module)
    )


def patches(
    layer: Linearity, x: Tensor, y: Tensor, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a layer at p random positions, the same in all images.

    The inputs at a position are the numbers that the layer multiplies by its weight: for a
    convolution, the input under the kernel.

    Args:
        layer: A convolution or a linear map.
        x: The input of a convolution, (N, C, ...), or of a linear map, (N, ..., f).
        y: The target, of the shape of the layer's output.
        count: The largest number of positions p.
        generator: Draws the positions.

    Returns:
        Patches (N, G, p, f) and targets (N, G, p, o). G counts the layer's groups. The f inputs
        have the order of the layer's weight.
    """
    if isinstance(layer, nn.Linear):
        x = x.reshape(len(x), -1, x.shape[-1])
        y = y.reshape(len(y), -1, y.shape[-1])
        places = draw(x.shape[1], count, generator).to(x.device)
        # A linear map has one group.
        return x[:, None, places], y[:, None, places]

    # Positions are drawn in the flattened output. `_read` takes an index for each side of it.
    sides = y.shape[2:]
    places = draw(math.prod(sides), count, generator)
    read = _read(layer, x, np.unravel_index(places.numpy(), tuple(sides)))
    targets = _at(y.flatten(2), places)

    # Part the channels into groups: (N, C, p, taps) becomes (N, G, p, f), and (N, O, p) becomes
    # (N, G, p, o).
    read = read.unflatten(1, (layer.groups, -1)).transpose(2, 3).flatten(3)
    targets = targets.unflatten(1, (layer.groups, -1)).transpose(2, 3)
    return read, targets


def columns(maps: Tensor, places: Tensor) -> Tensor:
    """Return the values of maps at the same p places of each sample, as (C, N p) in float64.

    Args:
        maps: The maps, (N, C, ...).
        places: The indices of the places in a flattened map, (p,).
    """
    values = _at(maps.reshape(*maps.shape[:2], -1), places).transpose(0, 1)
    # The copy in float64 is laid out by channel, so that it need not be copied again.
    return values.to(torch.float64, memory_format=torch.contiguous_format).flatten(1)


def _at(flat: Tensor, places: Tensor) -> Tensor:
    """Return the values of flattened maps (N, C, n) at some places, (N, C, p)."""
    # If there are as many places as the map has, they are all places, in order (`draw`).
    if flat.shape[2] == len(places):
        return flat
    return flat[:, :, places.to(flat.device)]


def _read(conv: nn.modules.conv._ConvNd, x: Tensor, at: Sequence[npt.NDArray[np.intp]]) -> Tensor:
    """Return the inputs of a convolution at some positions of its output, (N, C, p, taps).

    Taps are the positions of the kernel. No padded copy of the input is made: the values of taps
    that lie in the padding are multiplied by 0.

    Args:
        conv: The convolution.
        x: The input, (N, C, ...).
        at: The indices of the positions in the output, an array (p,) for each of its sides.
    """
    maps, padding = own_forwards.input_and_padding(conv, x)
    sides = maps.shape[2:]

    # Dimension by dimension, find each tap's index in the flattened map, and whether it is inside.
    flat = np.zeros(1, dtype=np.intp)
    inside = np.ones(1, dtype=np.bool_)
    for side, positions in enumerate(at):
        tap = np.arange(conv.kernel_size[side]) * conv.dilation[side]
        padding_before, _ = padding[side]
        # The arrays have a dimension for the positions, then one for each side of the kernel.
        index = positions.reshape(-1, *(1,) * len(at)) * conv.stride[side] - padding_before
        index = index + tap.reshape(-1, *(1,) * (len(at) - 1 - side))
        inside = inside & (index >= 0) & (index < sides[side])
        flat = flat * sides[side] + index.clip(0, sides[side] - 1)

    by_position = (len(at[0]), -1)
    read = maps.flatten(2)[:, :, torch.from_numpy(flat.reshape(by_position)).to(maps.device)]
    if inside.all():
        return read

    return read * torch.from_numpy(inside.reshape(by_position)).to(read.device)


def draw(size: int, count: int, generator: torch.Generator) -> Tensor:
    """Return the indices of at most `count` of `size` positions, drawn at random.

    All indices are returned, in order, where there are no more than `count`.

    Args:
        size: The number of positions.
        count: The largest number of indices.
        generator: The source of the random numbers.
    """
    if size <= count:
        return torch.from_numpy(np.arange(size))
    return torch.randperm(size, generator=generator)[:count]
