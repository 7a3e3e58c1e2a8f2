"""What a layer reads and should give, as rows: its input patches, at places drawn at random, never all of them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from timm.layers import pad_same
from torch import Tensor, nn

from normswap.layers.reparametrized import CONVOLUTIONS
from normswap.layers.seat import Linearity


def fits(module: nn.Module) -> bool:
    """Whether `patches` knows the layer: convolutions that pad with zeros, and linear maps."""
    if isinstance(module, CONVOLUTIONS):
        return module.padding_mode == "zeros"
    return isinstance(module, nn.Linear)


def patches(layer: Linearity, x: Tensor, y: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """At most `count` places, the same for all images: what the layer reads there, and the target.

    Args:
        layer: a convolution or Linear.
        x: its input, (N, C, ...) or (N, ..., f).
        y: the target, of the shape of its output.

    Returns:
        (N, G, p, f) and (N, G, p, o), G the layer's groups; f runs as in its weight.
    """
    if isinstance(layer, nn.Linear):
        x, y = x.reshape(len(x), -1, x.shape[-1]), y.reshape(len(y), -1, y.shape[-1])
        places = _draw(x.shape[1], count, generator).to(x.device)
        return x[:, None, places], y[:, None, places]
    sides = y.shape[2:]
    at = torch.unravel_index(_draw(math.prod(sides), count, generator).to(x.device), sides)
    taps = [torch.arange(k, device=x.device) * d for k, d in zip(layer.kernel_size, layer.dilation, strict=True)]
    read = [  # along each side, (p, 1 .. k .. 1)
        place.view(-1, *(1,) * len(sides)) * stride + tap.view(-1, *(1,) * (len(sides) - 1 - side))
        for side, (place, stride, tap) in enumerate(zip(at, layer.stride, taps, strict=True))
    ]
    every = (slice(None), slice(None))
    seen = _pad(layer, x)[every + tuple(read)]  # (N, C, p, *kernel)
    groups = layer.groups
    seen = seen.unflatten(1, (groups, -1)).transpose(2, 3).flatten(3)
    wanted = y[every + tuple(at)].unflatten(1, (groups, -1)).transpose(2, 3)
    return seen, wanted


def _draw(places: int, count: int, generator: torch.Generator) -> Tensor:
    if places <= count:
        return torch.arange(places)
    return torch.randperm(places, generator=generator)[:count]


def _pad(conv: nn.modules.conv._ConvNd, x: Tensor) -> Tensor:
    if conv.padding == "same":
        totals = [d * (k - 1) for k, d in zip(conv.kernel_size, conv.dilation, strict=True)]
        return F.pad(x, [part for total in reversed(totals) for part in (total // 2, total - total // 2)])
    if getattr(conv, "same_pad", type(conv).__name__ == "Conv2dSame"):
        return pad_same(x, list(conv.kernel_size), list(conv.stride), list(conv.dilation))
    if isinstance(conv.padding, str):
        return x
    return F.pad(x, [padding for padding in reversed(conv.padding) for _ in range(2)])
