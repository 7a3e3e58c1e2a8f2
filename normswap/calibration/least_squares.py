"""Streamed least squares: the best weights of a layer from moments of its input patches and of its
targets.

Only a covariance is stored. A block of rows is summed about a point near its mean, in the rows'
precision; blocks are summed in float64. Images go in turn to two folds. Weights fitted on one fold
choose the ridge by their error on the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
# The largest block has so many rows, and so many numbers.
_BLOCK = 4096
_NUMBERS = 2**22
# For patches of at least so many numbers, NumPy's symmetric product is faster than torch's.
_WIDE = 128
# At most so many targets choose the ridge.
_JUDGED = 128


@dataclass
class Moments:
    """Sums of inputs x (G, n, f) and targets y (G, n, o) and of their products, about a point near
    their means.

    Args:
        count: rows.
        x, y: sums, (G, f) and (G, o).
        xx, xy, yy: sums of products, (G, f, f), (G, o, f) and (G, o).
        x0, y0: the point; the first batch's means.
        waiting: rows that are not summed yet, less the point.
        biased: whether the fitted map has a bias.
    """

    count: int
    x: Tensor
    y: Tensor
    xx: Tensor
    xy: Tensor
    yy: Tensor
    x0: Tensor
    y0: Tensor
    waiting: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    biased: bool = True

    @classmethod
    def like(cls, x: Tensor, y: Tensor, *, biased: bool = True) -> Moments:
        """Empty moments about the means of a first batch (`add`)."""
        x0, y0 = (rows.mean([*range(1, rows.ndim - 1)], dtype=torch.float64) for rows in (x, y))
        groups, fan = x0.shape
        out = y0.shape[1]
        shapes = (
            (groups, fan),
            (groups, out),
            (groups, fan, fan),
            (groups, out, fan),
            (groups, out),
        )
        xs, ys, xx, xy, yy = (x0.new_zeros(shape) for shape in shapes)
        return cls(0, xs, ys, xx, xy, yy, x0, y0, biased=biased)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add a batch of rows (G, n, f), or (G, N, p, f), and their targets (G, n, o), or (G, N, p,
        o).
        """
        self.waiting.append((_about(x, self.x0), _about(y, self.y0)))
        self.count += self.waiting[-1][0].shape[1]
        if sum(rows.shape[1] for rows, _ in self.waiting) >= min(
            _BLOCK, _NUMBERS // max(self.x.numel(), 1)
        ):
            self.flush()

    def flush(self) -> None:
        if self.waiting:
            x, y = (torch.cat(rows, 1) for rows in zip(*self.waiting, strict=True))
            self.waiting = []
            self.x += x.sum(1)
            self.xx += _squared(x)
            self.y += y.sum(1)
            self.yy += y.square().sum(1)
            self.xy += y.transpose(1, 2) @ x

    def __add__(self, other: Moments) -> Moments:
        self.flush()
        other.flush()
        sums = {
            name: getattr(self, name) + getattr(other, name)
            for name in ("count", "x", "y", "xx", "xy", "yy")
        }
        return replace(self, **sums)

    def means(self) -> tuple[Tensor, Tensor]:
        """Of x (G, f) and of y (G, o)."""
        self.flush()
        return self.x0 + self.x / self.count, self.y0 + self.y / self.count

    def covariances(self) -> tuple[Tensor, Tensor, Tensor]:
        """Covariances C of x (G, f, f), B of y with x (G, o, f), variances of y (G, o); about zero
        without a bias.
        """
        self.flush()
        x = self.x / self.count
        y = self.y / self.count
        covariance = self.xx / self.count - x[:, :, None] * x[:, None, :]
        cross = self.xy / self.count - y[:, :, None] * x[:, None, :]
        variance = self.yy / self.count - y.square()
        if self.biased:
            return covariance, cross, variance
        x, y = self.means()
        return (
            covariance + x[:, :, None] * x[:, None],
            cross + y[:, :, None] * x[:, None],
            variance + y.square(),
        )


def _about(rows: Tensor, point: Tensor) -> Tensor:
    precision = torch.promote_types(rows.dtype, torch.float32)
    return rows.flatten(1, -2).to(precision) - point[:, None].to(precision)


def _squared(x: Tensor) -> Tensor:
    """x' x of each group, (G, f, f); for an array times itself NumPy's BLAS computes only half of
    the products.
    """
    if x.device.type != "cpu" or x.shape[2] < _WIDE:
        return x.transpose(1, 2) @ x
    # `Kernel.of` raises where the product is not finite.
    with np.errstate(over="ignore", invalid="ignore"):
        return torch.stack([torch.from_numpy(rows.T @ rows) for rows in x.numpy()])


@dataclass
class Folds:
    """Moments of the even and of the odd images; `biased` as in `Moments`."""

    halves: list[Moments] = field(default_factory=list)
    biased: bool = True
    images: int = 0

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add rows x (N, G, p, f) and y (N, G, p, o) of N images."""
        if not self.halves:
            self.halves = [
                Moments.like(x.transpose(0, 1), y.transpose(0, 1), biased=self.biased)
                for _ in range(2)
            ]
        for i, half in enumerate(self.halves):
            rows = slice((i - self.images) % 2, None, 2)
            if x[rows].numel():
                half.add(x[rows].transpose(0, 1), y[rows].transpose(0, 1))
        self.images += len(x)

    def total(self) -> Moments:
        return self.halves[0] + self.halves[1]


@dataclass(frozen=True)
class Kernel:
    """What a regression computes from its inputs alone: the Cholesky factor of K (G, f, f), ridge m
    (G, 1, 1).
    """

    factor: Tensor
    damp: Tensor

    @classmethod
    def of(cls, covariance: Tensor, ridge: float) -> Kernel:
        """Factor a covariance (G, f, f) plus a ridge; raises LinAlgError: it is not finite.

        Float32 sums of wide, correlated patches may have negative eigenvalues. Such a group's ridge
        grows tenfold until the factorization succeeds.
        """
        damp = ridge * covariance.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-30)[:, None, None]
        while True:
            kernel = covariance.clone()
            kernel.diagonal(dim1=1, dim2=2).add_(damp[..., 0])
            factor, failed = torch.linalg.cholesky_ex(kernel)
            if not bool(damp.isfinite().all()):
                raise torch.linalg.LinAlgError("the covariance is not finite")
            if not bool((failed > 0).any()):
                return cls(factor, damp)
            damp = torch.where(failed[:, None, None] > 0, 10 * damp, damp)

    def weights(self, cross: Tensor, prior: Tensor, *, zero_sum: Tensor | None) -> Tensor:
        """V (G, o, f) of `regress`."""
        weight = torch.cholesky_solve((cross + self.damp * prior).mT, self.factor).mT
        if zero_sum is not None:
            u = zero_sum[:, :, None]
            # The second projection removes the rounding error of the first.
            for direction in (torch.cholesky_solve(u, self.factor), u):
                weight = weight - (weight @ u) / (direction.mT @ u) * direction.mT
        return weight


@dataclass(frozen=True)
class Fit:
    """The fitted weights V (G, o, f), biases (G, o) and the ridge."""

    weight: Tensor
    bias: Tensor
    ridge: float


def regress(folds: Folds, prior: Tensor, *, zero_sum: Tensor | None = None) -> Fit:
    """The ridge regression of y on x, which shrinks V towards `prior`.

        V = argmin E |y - b - V x|^2 + ridge * m |V - prior|^2,   m the mean diagonal of C
        V = (B + ridge m prior) K^-1,  K = C + ridge m;   with zero_sum u:  V -= (V u) / (u' K^-1 u)
        (K^-1 u)'

    Args:
        prior: (G, o, f).
        zero_sum: u (G, f), so that V u = 0; ones where filters sum to zero (weight standardization,
            arXiv:1903.10520).
    """
    prior = prior.detach().double()
    ridge = _best_ridge(folds.halves, prior, zero_sum)
    total = folds.total()
    covariance, cross, _ = total.covariances()
    weight = Kernel.of(covariance, ridge).weights(cross, prior, zero_sum=zero_sum)
    return Fit(weight, _bias(weight, total, total.means()[1]), ridge)


def _best_ridge(halves: list[Moments], prior: Tensor, zero_sum: Tensor | None) -> float:
    """The first of `RIDGES` after which the error on the second half rises, of weights fitted on
    the first half.
    """
    fitted, other = halves
    if min(fitted.count, other.count) < 2:
        return RIDGES[0]
    judged = slice(None, None, max(prior.shape[1] // _JUDGED, 1))
    covariance, cross, _ = fitted.covariances()
    other_covariance, other_cross, other_variance = other.covariances()
    best = RIDGES[0]
    least = float("inf")
    for ridge in RIDGES:
        weight = Kernel.of(covariance, ridge).weights(
            cross[:, judged], prior[:, judged], zero_sum=zero_sum
        )
        offset = _bias(weight, other, other.means()[1][:, judged]) - _bias(
            weight, fitted, fitted.means()[1][:, judged]
        )
        square = ((weight @ other_covariance) * weight).sum(2) - 2 * (
            weight * other_cross[:, judged]
        ).sum(2)
        error = float((square + other_variance[:, judged] + offset.square()).sum())
        if error >= least:
            break
        best = ridge
        least = error
    return best


def _bias(weight: Tensor, moments: Moments, target_mean: Tensor) -> Tensor:
    """The bias (G, o) with which the mean output is the mean target; 0 where the map has no bias."""
    bias = target_mean - (weight @ moments.means()[0][:, :, None])[..., 0]
    if moments.biased:
        return bias
    return torch.zeros_like(bias)
