"""Streamed least squares: the best weights of a layer, from moments of its inputs and targets.

Only covariances are stored. The rows of a block are summed about a point near their mean, in the
rows' precision; the sums of blocks are added in float64. Images go in turn to two folds. For each
ridge, weights are fitted on the first fold. The ridge whose weights err least on the second fold is
chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

# The ridges that are tried, in units of the mean diagonal of the covariance.
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
# Rows are summed when so many are waiting, or fewer if a row has many numbers.
_BLOCK = 4096
_NUMBERS = 2**22
# For patches of at least so many numbers, NumPy's symmetric product is faster than torch's.
_WIDE = 128
# About so many of a layer's targets are compared when the ridge is chosen.
_JUDGED = 128


@dataclass
class Moments:
    """Sums over rows of inputs x (G, n, f), of targets y (G, n, o) and of their products.

    All sums are about a point near the means, so that large means do not cancel the variances. G
    counts the groups of a layer, f the inputs and o the outputs of a group.

    Args:
        count: The number of rows that were added.
        x: The sum of the inputs, (G, f).
        y: The sum of the targets, (G, o).
        xx: The sum of the products x x', (G, f, f).
        xy: The sum of the products y x', (G, o, f).
        yy: The sum of the squares of y, (G, o).
        x0: The point about which x is summed: the mean of the first batch, (G, f).
        y0: The point about which y is summed, (G, o).
        waiting: Rows, less the point, that are not summed yet.
        biased: Whether the fitted map has a bias.
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
        """Return empty moments, about the means of a first batch that `add` has yet to add.

        Args:
            x: The inputs of the first batch, (G, rows, f).
            y: The targets of the first batch, (G, rows, o).
            biased: Whether the map that is fitted has a bias.
        """
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
        """Add a batch of rows and their targets.

        Args:
            x: The inputs, (G, n, f) or (G, N, p, f).
            y: The targets, (G, n, o) or (G, N, p, o).
        """
        self.waiting.append((_about(x, self.x0), _about(y, self.y0)))
        self.count += self.waiting[-1][0].shape[1]

        # Products of many rows at once are faster, so rows wait until there are enough.
        if sum(rows.shape[1] for rows, _ in self.waiting) >= min(
            _BLOCK, _NUMBERS // max(self.x.numel(), 1)
        ):
            self.flush()

    def flush(self) -> None:
        """Add the rows that are waiting to the sums."""
        if self.waiting:
            x, y = (torch.cat(rows, 1) for rows in zip(*self.waiting, strict=True))
            self.waiting = []
            self.x += x.sum(1)
            self.xx += _squared(x)
            self.y += y.sum(1)
            self.yy += y.square().sum(1)
            self.xy += y.transpose(1, 2) @ x

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of the rows of both.

        Args:
            other: Moments about the same points.
        """
        self.flush()
        other.flush()
        sums = {
            name: getattr(self, name) + getattr(other, name)
            for name in ("count", "x", "y", "xx", "xy", "yy")
        }
        return replace(self, **sums)

    def means(self) -> tuple[Tensor, Tensor]:
        """Return the means of x (G, f) and of y (G, o)."""
        self.flush()
        return self.x0 + self.x / self.count, self.y0 + self.y / self.count

    def covariances(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the covariances of x, of y with x, and the variances of y.

        Their shapes are C (G, f, f), B (G, o, f) and (G, o). They are about the means, or
        about zero where the fitted map has no bias.
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
    """Return rows (G, ..., f) less a point (G, f), as (G, n, f) in float32 or more."""
    precision = torch.promote_types(rows.dtype, torch.float32)
    return rows.flatten(1, -2).to(precision) - point[:, None].to(precision)


def _squared(x: Tensor) -> Tensor:
    """Return x' x of each group, (G, f, f).

    NumPy's BLAS computes half of the products where an array is multiplied by itself, so wide rows
    on a CPU go through NumPy.
    """
    if x.device.type != "cpu" or x.shape[2] < _WIDE:
        return x.transpose(1, 2) @ x
    # `Kernel.of` raises where the product is not finite.
    with np.errstate(over="ignore", invalid="ignore"):
        return torch.stack([torch.from_numpy(rows.T @ rows) for rows in x.numpy()])


@dataclass
class Folds:
    """The moments of the even images, and the moments of the odd images.

    Args:
        halves: The two `Moments`. The list is empty until the first batch is added.
        biased: Whether the fitted map has a bias.
        images: The number of images that were added.
    """

    halves: list[Moments] = field(default_factory=list)
    biased: bool = True
    images: int = 0

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add the rows of N images, each image to one half, in turn.

        Args:
            x: The inputs, (N, G, p, f).
            y: The targets, (N, G, p, o).
        """
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
        """Return the moments of all images."""
        return self.halves[0] + self.halves[1]


@dataclass(frozen=True)
class Kernel:
    """The part of a regression that depends on its inputs alone: K = C + ridge m, factored.

    Args:
        factor: The lower Cholesky factor of K, (G, f, f).
        damp: The ridge times m, the mean diagonal of C, (G, 1, 1).
    """

    factor: Tensor
    damp: Tensor

    @classmethod
    def of(cls, covariance: Tensor, ridge: float) -> Kernel:
        """Factor a covariance (G, f, f) plus a ridge.

        A float32 covariance of wide, correlated patches may have negative eigenvalues. The ridge of
        its group then grows tenfold, as often as the factorization fails.

        Raises:
            LinAlgError: The covariance is not finite.
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
        """Return V = (B + damp prior) (C + damp I)^-1 for the covariance C, (G, o, f).

        With `zero_sum` u, V is projected so that V u = 0.

        Args:
            cross: The covariance B of y with x, (G, o, f).
            prior: The weights towards which V shrinks, (G, o, f).
            zero_sum: The vector u (G, f). None asks for nothing.
        """
        weight = torch.cholesky_solve((cross + self.damp * prior).mT, self.factor).mT
        if zero_sum is not None:
            u = zero_sum[:, :, None]
            # The second projection removes the rounding error of the first.
            for direction in (torch.cholesky_solve(u, self.factor), u):
                weight = weight - (weight @ u) / (direction.mT @ u) * direction.mT
        return weight


@dataclass(frozen=True)
class Fit:
    """The result of a regression.

    Args:
        weight: The fitted weights V, (G, o, f).
        bias: The fitted biases, (G, o).
        ridge: The ridge that was chosen.
    """

    weight: Tensor
    bias: Tensor
    ridge: float


def regress(folds: Folds, prior: Tensor, *, zero_sum: Tensor | None = None) -> Fit:
    """Return the ridge regression of y on x, which shrinks the weights V towards `prior`.

        V = argmin E |y - b - V x|^2 + ridge * m |V - prior|^2,   m the mean diagonal of C
        V = (B + ridge m prior) K^-1,   K = C + ridge m

    With `zero_sum` u the result is projected: V -= (V u) / (u' K^-1 u) (K^-1 u)'.

    Args:
        folds: The moments of x and y on two halves of the images.
        prior: The weights towards which V shrinks, (G, o, f).
        zero_sum: The vector u (G, f) for which V u = 0 must hold: ones where filters sum to zero
            (weight standardization, arXiv:1903.10520). None asks for nothing.
    """
    prior = prior.detach().double()
    ridge = _best_ridge(folds.halves, prior, zero_sum)
    total = folds.total()
    covariance, cross, _ = total.covariances()
    weight = Kernel.of(covariance, ridge).weights(cross, prior, zero_sum=zero_sum)
    _, target_mean = total.means()
    return Fit(weight, _bias(weight, total, target_mean), ridge)


def _best_ridge(halves: list[Moments], prior: Tensor, zero_sum: Tensor | None) -> float:
    """Return the ridge of `RIDGES` that predicts the second half of the images best.

    Weights are fitted on the first half, with growing ridges. The search ends at the first ridge
    that does not lower the error on the second half.

    Args:
        halves: The moments of the first and the second half of the images.
        prior: The weight (G, o, f) that a large ridge pulls to.
        zero_sum: The vector u (G, f) for which V u = 0 must hold. None asks for nothing.
    """
    fitted, other = halves
    if min(fitted.count, other.count) < 2:
        return RIDGES[0]

    # About `_JUDGED` outputs, evenly spaced, are enough to judge by.
    judged = slice(None, None, max(prior.shape[1] // _JUDGED, 1))
    covariance, cross, _ = fitted.covariances()
    other_covariance, other_cross, other_variance = other.covariances()
    _, fitted_mean = fitted.means()
    _, other_mean = other.means()

    best = RIDGES[0]
    least = float("inf")
    for ridge in RIDGES:
        weight = Kernel.of(covariance, ridge).weights(
            cross[:, judged], prior[:, judged], zero_sum=zero_sum
        )

        # E |y - b - V x|^2 on the second half is V C V' - 2 V B' + Var[y], plus the squared error
        # of the mean output.
        fitted_bias = _bias(weight, fitted, fitted_mean[:, judged])
        offset = _bias(weight, other, other_mean[:, judged]) - fitted_bias
        own_term = ((weight @ other_covariance) * weight).sum(2)
        cross_term = (weight * other_cross[:, judged]).sum(2)
        square = own_term - 2 * cross_term
        error = float((square + other_variance[:, judged] + offset.square()).sum())
        if error >= least:
            break

        best = ridge
        least = error

    return best


def _bias(weight: Tensor, moments: Moments, target_mean: Tensor) -> Tensor:
    """Return the bias (G, o) that makes the mean output the mean target.

    A map without a bias gets 0.

    Args:
        weight: The weight (G, o, f) of the map.
        moments: The moments of inputs and outputs.
        target_mean: The mean target, (G, o).
    """
    bias = target_mean - (weight @ moments.means()[0][:, :, None])[..., 0]
    if moments.biased:
        return bias
    return torch.zeros_like(bias)
