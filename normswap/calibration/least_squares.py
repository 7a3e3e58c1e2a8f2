"""Streamed least squares: from the moments of a layer's input patches and of its targets to its best weights.

Kept of the data is a covariance per layer, whatever the number of images. Products are summed in the rows' own
precision over a block of them, about a point near their mean, and in float64 over the blocks. The images are dealt to
two folds, so that the ridge can be chosen by what the weights fitted on one fold make of the other. See `regress` for
the algebra.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from normswap.calibration.row_block import RowBlock
from normswap.errors import SourceError

Covariances = tuple[Tensor, Tensor, Tensor]
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
_BLOCK = 4096  # rows
_NUMBERS = 2**22  # in a block: of many narrow groups, it has fewer rows
_WIDE = 128  # numbers in a patch, from which on half the products are worth sparing
_ASKED = 128  # targets that the ridge is chosen by
_COSTLY = 1024  # numbers in a patch, from which on few ridges are tried


@dataclass
class Moments:
    """Sums of inputs x (G, n, f) and targets y (G, n, o) and of their products, about a point near their means.

    Args:
        count: rows seen.
        x, y: sums, (G, f) and (G, o).
        xx, xy, yy: sums of products, (G, f, f), (G, o, f) and (G, o).
        x0, y0: the point; the first batch's means.
        waiting: rows about the point that are not in the sums yet.
        biased: whether the map that is sought has a bias; without one it passes through zero.
    """

    count: int
    x: Tensor
    y: Tensor
    xx: Tensor
    xy: Tensor
    yy: Tensor
    x0: Tensor
    y0: Tensor
    waiting: RowBlock = field(default_factory=RowBlock)
    biased: bool = True

    @classmethod
    def like(cls, x: Tensor, y: Tensor, *, biased: bool = True) -> Moments:
        """Empty moments about the means of a first batch, as `add` takes it."""
        x0, y0 = (rows.mean([*range(1, rows.ndim - 1)], dtype=torch.float64) for rows in (x, y))
        (groups, fan), out = x0.shape, y0.shape[1]
        shapes = ((groups, fan), (groups, out), (groups, fan, fan), (groups, out, fan), (groups, out))
        xs, ys, xx, xy, yy = (x0.new_zeros(shape) for shape in shapes)
        return cls(0, xs, ys, xx, xy, yy, x0, y0, biased=biased)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Take in a batch of rows (G, n, f), or (G, N, p, f), and their targets (G, n, o), or (G, N, p, o)."""
        self.count += x.shape[1:-1].numel()
        self.waiting.add(x, self.x0, y, self.y0)
        if self.waiting.count >= min(_BLOCK, _NUMBERS // max(self.x.numel(), 1)):
            self.flush()

    def flush(self) -> None:
        """Sum up what is waiting."""
        if self.waiting.count:
            x, y = self.waiting.taken()
            self.x += x.sum(1)
            self.xx += _squared(x)
            self.y += y.sum(1)
            self.yy += y.square().sum(1)
            self.xy += y.transpose(1, 2) @ x

    def __add__(self, other: Moments) -> Moments:
        names = ("count", "x", "y", "xx", "xy", "yy")
        self.flush()
        other.flush()
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})

    def means(self) -> tuple[Tensor, Tensor]:
        """Of x (G, f) and of y (G, o)."""
        self.flush()
        return self.x0 + self.x / self.count, self.y0 + self.y / self.count

    def covariances(self) -> Covariances:
        """C of x (G, f, f), B of y with x (G, o, f), and the variances of y (G, o); about zero without a bias."""
        self.flush()
        x, y = self.x / self.count, self.y / self.count
        covariance = self.xx / self.count - x[:, :, None] * x[:, None, :]
        variance = self.yy / self.count - y.square()
        if not self.biased:
            x, y = self.means()
            covariance, variance = covariance + x[:, :, None] * x[:, None, :], variance + y.square()
        return covariance, self.cross(), variance

    def cross(self) -> Tensor:
        """B of y with x, (G, o, f)."""
        self.flush()
        cross = self.xy / self.count - (self.y / self.count)[:, :, None] * (self.x / self.count)[:, None, :]
        if self.biased:
            return cross
        x, y = self.means()
        return cross + y[:, :, None] * x[:, None, :]


def _squared(x: Tensor) -> Tensor:
    """x' x of each group, (G, f, f). Of an array with itself NumPy lets BLAS compute one half only."""
    if x.device.type != "cpu" or x.shape[2] < _WIDE:
        return x.transpose(1, 2) @ x
    with np.errstate(over="ignore", invalid="ignore"):  # `Kernel.of` says what is not finite
        return torch.stack([torch.from_numpy(rows.T @ rows) for rows in x.numpy()])


@dataclass
class Folds:
    """Moments of the even and of the odd images; `biased`: see `Moments`."""

    halves: list[Moments] = field(default_factory=list)
    biased: bool = True

    def add(self, x: Tensor, y: Tensor) -> None:
        """Rows x (N, G, p, f) and y (N, G, p, o) of N images in turn."""
        if not self.halves:
            self.halves = [Moments.like(x.transpose(0, 1), y.transpose(0, 1), biased=self.biased) for _ in range(2)]
        for i, half in enumerate(self.halves):
            if x[i::2].numel():
                half.add(x[i::2].transpose(0, 1), y[i::2].transpose(0, 1))

    def total(self) -> Moments:
        return self.halves[0] + self.halves[1]


@dataclass(frozen=True)
class Kernel:
    """The part of a regression that depends on the inputs alone.

    Args:
        factor: Cholesky's, of K (..., G, f, f).
        damp: ridge * m, (..., G, 1, 1).
    """

    factor: Tensor
    damp: Tensor

    @classmethod
    def of(cls, covariance: Tensor, ridge: float | Tensor) -> Kernel:
        """Of a covariance (G, f, f) and a ridge, or several (R, 1, 1, 1), each of which gives a kernel.

        Where sums in float32 left it further below zero than the ridge lifts it (wide patches that go together), the
        group's ridge is ten times as large, and again.

        Raises:
            torch.linalg.LinAlgError: a number in it is not finite.
        """
        damp = ridge * covariance.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-30)[:, None, None]
        while True:
            kernel = covariance.expand(*damp.shape[:-2], *covariance.shape[1:]).clone()
            kernel.diagonal(dim1=-2, dim2=-1).add_(damp[..., 0])
            factor, failed = torch.linalg.cholesky_ex(kernel)
            finite, fails = torch.stack([damp.isfinite().all(), (failed > 0).any()]).tolist()  # one wait for a device
            if not finite:
                raise torch.linalg.LinAlgError("the covariance is not finite")
            if not fails:
                return cls(factor, damp)
            damp = torch.where(failed[..., None, None] > 0, 10 * damp, damp)

    def weights(self, cross: Tensor, prior: Tensor, *, zero_sum: Tensor | None) -> Tensor:
        """V (..., G, o, f) of `regress`."""
        weight = torch.cholesky_solve((cross + self.damp * prior).mT, self.factor).mT
        if zero_sum is not None:
            u = zero_sum[:, :, None]
            for away in (torch.cholesky_solve(u, self.factor), u):  # then what rounding left
                weight = weight - (weight @ u) / (away.mT @ u) * away.mT
        return weight


@contextmanager
def naming(path: str, done: str) -> Iterator[None]:
    """Say which layer it was that cannot be, say, fitted.

    Raises:
        SourceError: a covariance is not finite.
    """
    try:
        yield
    except torch.linalg.LinAlgError as error:
        why = f"{error}: on these images, what reaches it overflows when it is squared"
        remedy = "Are these the network's trained weights, and its images?"
        raise SourceError(f"{path} cannot be {done}", why, remedy) from None


@dataclass(frozen=True)
class Fit:
    """The weights V (G, o, f) and biases (G, o) that were found, and the ridge they were found with."""

    weight: Tensor
    bias: Tensor
    ridge: float


def regress(folds: Folds, prior: Tensor, *, zero_sum: Tensor | None = None) -> Fit:
    """The V nearest to y = V x + b in the least-squares sense, drawn towards `prior` where the data say little.

        V = argmin E |y - b - V x|^2 + ridge * m |V - prior|^2,   m the mean diagonal of C

        V = (B + ridge m prior) K^-1,  K = C + ridge m;   with zero_sum u:  V -= (V u) / (u' K^-1 u) (K^-1 u)'

    The ridge is the one of `RIDGES` whose V, fitted on one half of the images, errs least on the other.

    Args:
        prior: (G, o, f).
        zero_sum: u (G, f) that V u = 0 for: ones where filters sum to zero (weight standardization, arXiv:1903.10520).
    """
    prior = prior.detach().double()
    ridge = _best_ridge(folds.halves, prior, zero_sum)
    total = folds.total()
    covariance, cross, _ = total.covariances()
    weight = Kernel.of(covariance, ridge).weights(cross, prior, zero_sum=zero_sum)
    return Fit(weight, _bias(weight, total), ridge)


def _best_ridge(halves: list[Moments], prior: Tensor, zero_sum: Tensor | None) -> float:
    """Tried from the smallest on until the error has risen twice; at once where an answer is a wait for a device."""
    if not all(half.count > 1 for half in halves):
        return RIDGES[0]
    asked = slice(None, None, max(prior.shape[1] // _ASKED, 1))
    known = [half.covariances() for half in halves]

    def error(ridge: float | Tensor, one: int, other: int) -> Tensor:
        covariance, cross, _ = known[one]
        weight = Kernel.of(covariance, ridge).weights(cross[:, asked], prior[:, asked], zero_sum=zero_sum)
        return _error(weight, asked, halves[one], halves[other], known[other])

    if prior.shape[2] >= _COSTLY:  # factors cost minutes: from the middle on downhill, fitted on the first half only
        return RIDGES[_downhill(functools.cache(lambda at: float(error(RIDGES[at], 0, 1))), len(RIDGES))]
    ridges = prior.new_tensor(RIDGES)[:, None, None, None]
    parts = ridges.split(1) if prior.device.type == "cpu" else (ridges,)
    return RIDGES[_first_valley(one for part in parts for one in (error(part, 0, 1) + error(part, 1, 0)).tolist())]


def _downhill(error: Callable[[int], float], count: int) -> int:
    at = (count - 1) // 2
    for step in (1, -1):
        while 0 <= at + step < count and error(at + step) < error(at):
            at += step
    return at


def _first_valley(errors: Iterable[float]) -> int:
    """Where the error is least before it has risen twice running; no more of them are asked for then."""
    seen: list[float] = []
    for error in errors:
        seen.append(error)
        if len(seen) > 2 and seen[-1] > seen[-2] > seen[-3]:
            break
    return min(range(len(seen)), key=seen.__getitem__)


def _bias(weight: Tensor, moments: Moments, asked: slice = slice(None)) -> Tensor:
    x, y = moments.means()
    bias = y[:, asked] - (weight @ x[:, :, None])[..., 0]
    return bias if moments.biased else torch.zeros_like(bias)


def _error(weight: Tensor, asked: slice, fitted_on: Moments, other: Moments, known: Covariances) -> Tensor:
    """Mean square error on `other` of weights, with their biases, that were fitted on `fitted_on`, summed over targets.

    Args:
        weight: (..., G, o, f); the error is (...).
        asked: which targets the weights are for.
        known: the covariances of `other`.
    """
    covariance, cross, variance = known
    offset = _bias(weight, other, asked) - _bias(weight, fitted_on, asked)
    square = ((weight @ covariance) * weight).sum(-1) - 2 * (weight * cross[:, asked]).sum(-1)
    return (square + variance[:, asked] + offset.square()).sum((-2, -1))
