"""Streamed least squares: the best weights of a layer, from moments of its inputs and targets.

Only covariances are stored. The rows of a block are summed about a point near their mean, in the
rows' precision; the sums of blocks are added in float64. Images go in turn to two folds. For each
ridge, weights are fitted on the first fold. The ridge whose weights err least on the second fold is
chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

# The ridges that are tried, in units of the mean diagonal of the covariance.
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
# Rows are summed when so many are waiting, or fewer if a row has many numbers.
_BLOCK = 4096
_NUMBERS = 2**22
# Patches of at most so many numbers are fitted with all ridges at once, wider ones with one ridge
# after the other, as a ridge that need not be tried saves more than the calls of torch cost.
_NARROW = 512
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
        # The means over all dimensions but the first (groups) and the last (inputs or targets).
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
        self.add_about(_about(x, self.x0).flatten(1, -2), _about(y, self.y0).flatten(1, -2))

    def add_about(self, x: Tensor, y: Tensor) -> None:
        """Add rows, and their targets, from which the points x0 and y0 are subtracted already.

        Args:
            x: The inputs less x0, (G, n, f).
            y: The targets less y0, (G, n, o).
        """
        self.waiting.append((x, y))
        self.count += x.shape[1]

        # Products of many rows at once are faster, so rows wait until there are enough.
        if sum(rows.shape[1] for rows, _ in self.waiting) >= min(
            _BLOCK, _NUMBERS // max(self.x.numel(), 1)
        ):
            self.flush()

    def flush(self) -> None:
        """Add the rows in `waiting` to the sums, and clear `waiting`."""
        if self.waiting:
            parts = zip(*self.waiting, strict=True)
            x, y = (torch.cat(rows, 1) if len(rows) > 1 else rows[0] for rows in parts)
            self.waiting = []
            self.x += x.sum(1)
            self.xx += _squared(x)
            self.y += y.sum(1)
            self.yy += y.square().sum(1)
            self.xy += y.transpose(1, 2) @ x

    def __add__(self, other: Moments) -> Moments:
        """Return the sums over the rows of this record and of another one.

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
        share = 1 / self.count
        # Of products like these torch computes a x x' + b C in one call.
        covariance = torch.baddbmm(self.xx, x[:, :, None], x[:, None], beta=share, alpha=-1)
        cross = torch.baddbmm(self.xy, y[:, :, None], x[:, None], beta=share, alpha=-1)
        variance = torch.addcmul(self.yy * share, y, y, value=-1)
        if self.biased:
            return covariance, cross, variance

        # Without a bias the map cannot remove the means, so the products of the means are added.
        x, y = self.means()
        return (
            torch.baddbmm(covariance, x[:, :, None], x[:, None]),
            torch.baddbmm(cross, y[:, :, None], x[:, None]),
            torch.addcmul(variance, y, y),
        )


def _about(rows: Tensor, point: Tensor) -> Tensor:
    """Return rows (G, ..., f) minus a point (G, f). Half precision becomes float32."""
    precision = torch.promote_types(rows.dtype, torch.float32)
    by_group = (len(point), *(1,) * (rows.ndim - 2), -1)
    return rows.to(precision) - point.to(precision).view(by_group)


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
        """Add the rows of N images. Images go to the two halves in turn.

        Args:
            x: The f inputs of each group at p positions of each image, (N, G, p, f).
            y: The targets there, (N, G, p, o).
        """
        count = len(x)
        x = x.transpose(0, 1)
        y = y.transpose(0, 1)
        if not self.halves:
            self.halves = [Moments.like(x, y, biased=self.biased) for _ in range(2)]

        # Both halves sum about the same point, so it is subtracted from all rows at once.
        x = _about(x, self.halves[0].x0)
        y = _about(y, self.halves[0].y0)
        for i, half in enumerate(self.halves):
            # Image n of all that were ever added goes to half n % 2.
            images = slice((i - self.images) % 2, None, 2)
            if x[:, images].numel():
                half.add_about(x[:, images].flatten(1, 2), y[:, images].flatten(1, 2))
        self.images += count

    def total(self) -> Moments:
        """Return the moments of all images: the sum of both halves."""
        return self.halves[0] + self.halves[1]


@dataclass(frozen=True)
class Kernel:
    """The factored matrix K = C + ridge m of a ridge regression, which depends on inputs alone.

    C is the covariance of the inputs, and m the mean of its diagonal. Both are by group. A record
    may be made for R ridges at once. Its tensors then have R as their first dimension.

    Args:
        factor: The lower Cholesky factor of K, (G, f, f).
        damp: The ridge times m, (G, 1, 1).
    """

    factor: Tensor
    damp: Tensor

    @classmethod
    def of(cls, covariance: Tensor, ridge: float | Tensor) -> Kernel:
        """Factor a covariance (G, f, f) plus a ridge.

        A float32 covariance of wide, correlated patches may have negative eigenvalues. The ridge of
        its group then grows tenfold, as often as the factorization fails.

        Args:
            covariance: The covariance C of the inputs, (G, f, f).
            ridge: The ridge, or R ridges as (R, 1, 1, 1).

        Raises:
            LinAlgError: The covariance is not finite.
        """
        # The ridge is in units of m, the mean diagonal of the covariance.
        damp = ridge * covariance.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-30)[:, None, None]
        while True:
            # A copy of the covariance for each ridge, to whose diagonal the ridge is added.
            kernel = covariance.expand(*damp.shape[:-2], *covariance.shape[1:]).clone()
            kernel.diagonal(dim1=-2, dim2=-1).add_(damp[..., 0])
            factor, failed = torch.linalg.cholesky_ex(kernel)

            # A sum of ridges is finite if each is. Reading a number waits for the GPU, so both are
            # read at once.
            total, failures = torch.stack([damp.sum(), failed.sum()]).tolist()
            if not math.isfinite(total):
                raise torch.linalg.LinAlgError("the covariance is not finite")
            if not failures:
                return cls(factor, damp)
            damp = torch.where(failed[..., None, None] > 0, 10 * damp, damp)

    def weights(self, cross: Tensor, prior: Tensor, *, zero_sum: Tensor | None) -> Tensor:
        """Return the regression weights V = (B + damp prior) (C + damp I)^-1, (G, o, f).

        C is the covariance of the inputs x, and B that of the targets y with x. If this `Kernel`
        has R ridges, the result is the weights of each, (R, G, o, f). With `zero_sum` u, the result
        is the best weights among those with V u = 0.

        Args:
            cross: The covariance B of y with x, (G, o, f).
            prior: The weights towards which V shrinks, (G, o, f).
            zero_sum: The vector u (G, f). None asks for nothing.
        """
        weight = torch.cholesky_solve(torch.addcmul(cross, self.damp, prior).mT, self.factor).mT
        if zero_sum is not None:
            u = zero_sum[:, :, None]
            # To subtract a multiple of K^-1 u from each row, with K = C + damp I, costs least: it
            # gives the best weights with V u = 0. A multiple of u then removes the rounding error.
            for direction in (torch.cholesky_solve(u, self.factor), u):
                weight = weight - (weight @ u) / (direction.mT @ u) * direction.mT
        return weight


@dataclass(frozen=True)
class Fit:
    """The result of a ridge regression of o outputs on f inputs, in each of G groups.

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

    C is the covariance of x, and B that of y with x. With `zero_sum` u the result is projected:
    V -= (V u) / (u' K^-1 u) (K^-1 u)'.

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
    return Fit(weight, _bias(weight, *total.means(), biased=total.biased), ridge)


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
    fitted_means = fitted.means()
    other_means = other.means()
    # How far the mean input and the mean target of the second half are from those of the first.
    apart = [theirs - ours for theirs, ours in zip(other_means, fitted_means, strict=True)]

    def errors(ridges: Sequence[float]) -> list[float]:
        """Fit weights with each ridge on the first half, and return their errors on the second.

        An error is the squared error, summed over the outputs that are judged (`judged`).
        """
        ridge = torch.tensor(ridges, dtype=prior.dtype).to(prior.device).view(-1, 1, 1, 1)
        weight = Kernel.of(covariance, ridge).weights(
            cross[:, judged], prior[:, judged], zero_sum=zero_sum
        )

        # E |y - b - V x|^2 on the second half is V C V' - 2 V B' + Var[y] with the covariances C of
        # x and B of y with x there, plus the squared error of the mean output. That error is the
        # difference between the biases that fit the two halves.
        offset = _bias(weight, apart[0], apart[1][:, judged], biased=fitted.biased)
        pulled = weight @ other_covariance - 2 * other_cross[:, judged]
        constant = other_variance[:, judged].sum()
        square: Tensor = (pulled * weight).sum((1, 2, 3)) + offset.square().sum((1, 2)) + constant
        return square.tolist()

    # With few inputs per output, all ridges are fitted in one call. With many, a ridge that is not
    # tried saves more than the calls cost, so they are fitted one by one.
    together = len(RIDGES) if prior.shape[2] <= _NARROW else 1
    best = RIDGES[0]
    least = float("inf")
    for start in range(0, len(RIDGES), together):
        ridges = RIDGES[start : start + together]
        for ridge, error in zip(ridges, errors(ridges), strict=True):
            if error >= least:
                return best

            best = ridge
            least = error

    return best


def _bias(weight: Tensor, input_mean: Tensor, target_mean: Tensor, *, biased: bool) -> Tensor:
    """Return the bias (..., G, o) that makes the mean output the mean target.

    Args:
        weight: The weight (..., G, o, f) of the map.
        input_mean: The mean input, (G, f).
        target_mean: The mean target, (G, o).
        biased: Whether the map has a bias. Without one, the bias is 0.
    """
    bias = target_mean - (weight @ input_mean[:, :, None])[..., 0]
    if biased:
        return bias
    return torch.zeros_like(bias)
