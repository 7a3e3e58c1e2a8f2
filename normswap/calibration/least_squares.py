"""Streamed least squares: from the moments of a layer's input patches and of its targets to its best weights.

What is kept of the data is a covariance per layer, in float64, whatever the number of images: patches are sampled,
never the whole layer unrolled. The images are dealt to two folds, so that the ridge can be chosen by what the weights
fitted on one fold make of the other. See `regress` for the algebra.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import pad_same
from torch import Tensor, nn

from normswap.errors import SourceError

Covariances = tuple[Tensor, Tensor, Tensor]
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)


@dataclass
class Moments:
    """Sums of inputs x (G, n, f) and targets y (G, n, o) and of their products, about a point near their means.

    Args:
        count: rows seen.
        x, y: sums, (G, f) and (G, o).
        xx, xy, yy: sums of products, (G, f, f), (G, o, f) and (G, o).
        x0, y0: the point; the first batch's means.
    """

    count: int
    x: Tensor
    y: Tensor
    xx: Tensor
    xy: Tensor
    yy: Tensor
    x0: Tensor
    y0: Tensor

    @classmethod
    def like(cls, x: Tensor, y: Tensor) -> Moments:
        """Empty moments about the means of a first batch."""
        x, y = x.double(), y.double()
        (groups, _, fan), out = x.shape, y.shape[2]
        shapes = ((groups, fan), (groups, out), (groups, fan, fan), (groups, out, fan), (groups, out))
        sums: list[Any] = [x.new_zeros(shape) for shape in shapes]
        xs, ys, xx, xy, yy = sums
        return cls(0, xs, ys, xx, xy, yy, x.mean(1), y.mean(1))

    def add(self, x: Tensor, y: Tensor) -> None:
        """Take in a batch of rows."""
        self.count += x.shape[1]
        x = x.double() - self.x0[:, None]
        self.x += x.sum(1)
        self.xx += x.transpose(1, 2) @ x
        self._aim(x, y)

    def aim(self, x: Tensor, y: Tensor) -> None:
        """Take in targets of rows whose inputs were taken in before."""
        self._aim(x.double() - self.x0[:, None], y)

    def aimless(self) -> Moments:
        """The same inputs, and no targets yet."""
        return replace(self, y=torch.zeros_like(self.y), xy=torch.zeros_like(self.xy), yy=torch.zeros_like(self.yy))

    def _aim(self, x: Tensor, y: Tensor) -> None:
        y = y.double() - self.y0[:, None]
        self.y += y.sum(1)
        self.xy += y.transpose(1, 2) @ x
        self.yy += y.square().sum(1)

    def __add__(self, other: Moments) -> Moments:
        names = ("count", "x", "y", "xx", "xy", "yy")
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})

    def means(self) -> tuple[Tensor, Tensor]:
        """Of x (G, f) and of y (G, o)."""
        return self.x0 + self.x / self.count, self.y0 + self.y / self.count

    def covariances(self) -> Covariances:
        """C of x (G, f, f), B of y with x (G, o, f), and the variances of y (G, o)."""
        x, y = self.x / self.count, self.y / self.count
        return (
            self.xx / self.count - x[:, :, None] * x[:, None, :],
            self.xy / self.count - y[:, :, None] * x[:, None, :],
            self.yy / self.count - y.square(),
        )


@dataclass
class Folds:
    """Moments of the even and of the odd images."""

    halves: list[Moments] = field(default_factory=list)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Rows x (N, G, p, f) and y (N, G, p, o) of N images in turn."""
        if not self.halves:
            self.halves = [Moments.like(*(rows.transpose(0, 1).flatten(1, 2) for rows in (x, y))) for _ in range(2)]
        for half, own, target in self._dealt(x, y):
            half.add(own, target)

    def retargeted(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Folds:
        """Folds of the same inputs, given again batch by batch, with other targets."""
        other = Folds([half.aimless() for half in self.halves])
        for x, y in batches:
            for half, own, target in other._dealt(x, y):
                half.aim(own, target)
        return other

    def _dealt(self, x: Tensor, y: Tensor) -> Iterator[tuple[Moments, Tensor, Tensor]]:
        for i, half in enumerate(self.halves):
            if x[i::2].numel():
                yield half, x[i::2].transpose(0, 1).flatten(1, 2), y[i::2].transpose(0, 1).flatten(1, 2)

    def total(self) -> Moments:
        return self.halves[0] + self.halves[1]


@dataclass(frozen=True)
class Fit:
    """The weights V (G, o, f) and biases (G, o) that were found, and the ridge they were found with."""

    weight: Tensor
    bias: Tensor
    ridge: float


def regress(folds: Folds, prior: Tensor, *, zero_sum: bool = False, ridge: float | None = None) -> Fit:
    """The V nearest to y = V x + b in the least-squares sense, drawn towards `prior` where the data say little:

        V = argmin E |y - b - V x|^2 + ridge * m |V - prior|^2,   m the mean diagonal of C

        V = (B + ridge m prior) K^-1,  K = C + ridge m;   with zero_sum:  V -= (V 1) / (1' K^-1 1) (K^-1 1)'

    Args:
        prior: (G, o, f).
        ridge: by default the one of `RIDGES` whose V, fitted on one half of the images, errs least on the other.
        zero_sum: every filter sums to zero (weight standardization, arXiv:1903.10520).
    """
    prior = prior.detach().double()
    ridge = _best_ridge(folds.halves, prior, zero_sum) if ridge is None else ridge
    total = folds.total()
    weight = solve(total.covariances(), prior, ridge, zero_sum=zero_sum)
    return Fit(weight, _bias(weight, total), ridge)


def _best_ridge(halves: list[Moments], prior: Tensor, zero_sum: bool) -> float:
    errors = [0.0] * len(RIDGES)
    if all(half.count > 1 for half in halves):
        known = [half.covariances() for half in halves]
        for one, other in ((0, 1), (1, 0)):
            for i, ridge in enumerate(RIDGES):
                weight = solve(known[one], prior, ridge, zero_sum=zero_sum)
                errors[i] += _error(weight, halves[one], halves[other], known[other])
    return RIDGES[min(range(len(RIDGES)), key=errors.__getitem__)]


def solve(known: Covariances, prior: Tensor, ridge: float, *, zero_sum: bool = False) -> Tensor:
    """V (G, o, f) of `regress` for one ridge."""
    covariance, cross, _ = known
    damp = ridge * covariance.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-30)[:, None, None]
    kernel = covariance.clone()
    kernel.diagonal(dim1=1, dim2=2).add_(damp[:, :, 0])
    factor = torch.linalg.cholesky(kernel)
    weight = torch.cholesky_solve((cross + damp * prior).transpose(1, 2), factor).transpose(1, 2)
    if zero_sum:
        ones = weight.new_ones(prior.shape[0], prior.shape[2], 1)
        away = torch.cholesky_solve(ones, factor)
        weight = weight - weight.sum(2, keepdim=True) / away.sum(1, keepdim=True) * away.transpose(1, 2)
        weight = weight - weight.mean(2, keepdim=True)  # what rounding left
    return weight


def _bias(weight: Tensor, moments: Moments) -> Tensor:
    x, y = moments.means()
    return y - (weight @ x[:, :, None])[:, :, 0]


def _error(weight: Tensor, own: Moments, other: Moments, known: Covariances) -> float:
    """Mean square error on `other` of weights, with their biases, that were fitted on `own`, summed over targets.

    Args:
        known: the covariances of `other`.
    """
    covariance, cross, variance = known
    x, y = other.means()
    offset = y - (weight @ x[:, :, None])[:, :, 0] - _bias(weight, own)
    square = ((weight @ covariance) * weight).sum(2) - 2 * (weight * cross).sum(2) + variance + offset.square()
    return float(square.sum())


def fits(module: nn.Module) -> bool:
    """Whether `patches` knows the layer: convolutions that pad with zeros, and linear maps."""
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return module.padding_mode == "zeros"
    return isinstance(module, nn.Linear)


def patches(layer: Any, x: Tensor, y: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
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
    every: tuple[Any, ...] = (slice(None), slice(None))
    seen = _pad(layer, x)[every + tuple(read)]  # (N, C, p, *kernel)
    groups = layer.groups
    seen = seen.unflatten(1, (groups, -1)).transpose(2, 3).flatten(3)
    wanted = y[every + tuple(at)].unflatten(1, (groups, -1)).transpose(2, 3)
    return seen, wanted


def _draw(places: int, count: int, generator: torch.Generator) -> Tensor:
    if places <= count:
        return torch.arange(places)
    return torch.randperm(places, generator=generator)[:count]


def _pad(conv: Any, x: Tensor) -> Tensor:
    if conv.padding == "same":
        totals = [d * (k - 1) for k, d in zip(conv.kernel_size, conv.dilation, strict=True)]
        return F.pad(x, [part for total in reversed(totals) for part in (total // 2, total - total // 2)])
    if getattr(conv, "same_pad", type(conv).__name__ == "Conv2dSame"):
        return pad_same(x, list(conv.kernel_size), list(conv.stride), list(conv.dilation))
    if isinstance(conv.padding, str):
        return x
    return F.pad(x, [padding for padding in reversed(conv.padding) for _ in range(2)])


def checked(batch: Any, size: tuple[int, ...] | None, index: int) -> Tensor:
    """The images of one calibration batch; labels beside them are dropped.

    Args:
        size: (C, H, W) of the images before, if any.

    Raises:
        SourceError: no images, images of another size, or NaN or infinite values.
    """
    images = batch[0] if isinstance(batch, tuple | list) else batch
    if not isinstance(images, Tensor) or images.ndim < 2 or not images.is_floating_point():
        raise SourceError(f"calibration batch {index} is no batch of images", f"it is a {type(images).__name__}")
    if size is not None and tuple(images.shape[1:]) != size:
        raise SourceError(f"calibration batch {index} has images of size {tuple(images.shape[1:])}", f"not {size}")
    if not bool(torch.isfinite(images).all()):
        raise SourceError(f"calibration batch {index} has values that are not finite", "NaN or infinite pixels")
    return images
