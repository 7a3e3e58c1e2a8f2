"""Streamed least squares: the best weights of a layer, from moments of its inputs and targets.

Only covariances are stored. The rows of a block are summed about a point near their mean, in the
rows' precision; the sums of blocks are added in float64. Images go in turn to two folds, whose sums
are tensors with both folds. For each ridge, weights are fitted on the first fold. The ridge whose
weights err least on the second fold is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from normswap.calibration.host_descent import Numbers

# The ridges that are tried, in units of the mean diagonal of the covariance.
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
# Rows are summed when so many of each fold are waiting, or fewer if a row has many numbers.
_BLOCK = 4096
_NUMBERS = 2**22
# Patches of at most so many numbers (3 x 3 of 128 channels) are fitted with all ridges at once.
# Covariances of wider ones take much memory, so they are fitted with one ridge after the other.
_NARROW = 1152
# For patches of at least so many numbers, NumPy's symmetric product is faster than torch's.
_WIDE = 128
# About so many of a layer's targets are compared when the ridge is chosen.
_JUDGED = 128


@dataclass(frozen=True)
class Moments:
    """Sums over rows of inputs x (G, n, f), of targets y (G, n, o) and of their products.

    All sums are in float64, and about a point near the means, so that large means do not cancel the
    variances. G counts the groups of a layer, f the inputs and o the outputs of a group. The sums
    of both folds are one record, whose tensors then have 2 as their first dimension.

    Args:
        count: The number of rows, (1, 1).
        x: The sum of the inputs, (G, f).
        y: The sum of the targets, (G, o).
        xx: The sum of the products x x', (G, f, f).
        xy: The sum of the products y x', (G, o, f).
        yy: The sum of the squares of y, (G, o).
        x0: The point about which x is summed, (G, f), of both folds.
        y0: The point about which y is summed, (G, o), of both folds.
        biased: Whether the fitted map has a bias.
    """

    count: Tensor
    x: Tensor
    y: Tensor
    xx: Tensor
    xy: Tensor
    yy: Tensor
    x0: Tensor
    y0: Tensor
    biased: bool

    def means(self) -> tuple[Tensor, Tensor]:
        """Return the means of x (G, f) and of y (G, o)."""
        return self.x0 + self.x / self.count, self.y0 + self.y / self.count

    def covariances(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the covariances of x, of y with x, and the variances of y.

        Their shapes are C (G, f, f), B (G, o, f) and (G, o). They are about the means, or
        about zero where the fitted map has no bias.
        """
        x = self.x / self.count
        y = self.y / self.count
        count = self.count[..., None]
        covariance = _plus_outer(self.xx / count, x, x, -1)
        cross = _plus_outer(self.xy / count, y, x, -1)
        variance = torch.addcmul(self.yy / self.count, y, y, value=-1)
        if self.biased:
            return covariance, cross, variance

        # Without a bias the map cannot remove the means, so the products of the means are added.
        x, y = self.means()
        return (
            _plus_outer(covariance, x, x, 1),
            _plus_outer(cross, y, x, 1),
            torch.addcmul(variance, y, y),
        )


def _plus_outer(matrix: Tensor, left: Tensor, right: Tensor, factor: int) -> Tensor:
    """Return matrix + factor * left right', where left is (..., m) and right is (..., n)."""
    return torch.addcmul(matrix, left[..., :, None], right[..., None, :], value=factor)


def _squared(x: Tensor) -> Tensor:
    """Return x' x of each fold and group, (2, G, f, f), of rows x (2, G, n, f).

    NumPy's BLAS computes half of the products where an array is multiplied by itself, so wide rows
    on a CPU go through NumPy.
    """
    if x.device.type != "cpu" or x.shape[3] < _WIDE:
        return x.mT @ x
    # `Kernel.of` raises where the product is not finite.
    with np.errstate(over="ignore", invalid="ignore"):
        products = [torch.from_numpy(rows.T @ rows) for rows in x.flatten(0, 1).numpy()]
    squared: Tensor = torch.stack(products).unflatten(0, x.shape[:2])
    return squared


class Folds:
    """The moments of the even images and the moments of the odd images.

    Products of many rows at once are faster, so rows wait until there are enough. Both folds are
    summed at once.

    Args:
        biased: Whether the fitted map has a bias.
    """

    def __init__(self, *, biased: bool = True) -> None:
        self.biased = biased
        # Batches of inputs and targets that are not summed yet.
        self.waiting: list[tuple[Tensor, Tensor]] = []
        # The points about which inputs (G, 1, f) and targets (G, 1, o) are summed. Empty before the
        # first batch, whose means they are.
        self.points: tuple[Tensor, ...] = ()
        # `Moments.x`, `y`, `xx`, `xy` and `yy` of both folds. Empty before the first sum.
        self.sums: list[Tensor] = []
        # The number of images that are summed, and the number of rows of each fold.
        self.images = 0
        self.rows = np.zeros(2)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add the rows of N images. Images go to the two folds in turn.

        Args:
            x: The f inputs of each group at p positions of each image, (N, G, p, f).
            y: The targets there, (N, G, p, o).
        """
        if not self.points:
            self.points = (_mean_row(x), _mean_row(y))
        # Only images with the same number of rows can be joined.
        if self.waiting and self.waiting[0][0].shape[1:] != x.shape[1:]:
            self._sum_waiting()

        self.waiting.append((x, y))
        waiting_images = sum(len(images) for images, _ in self.waiting)
        _, groups, positions, fan = x.shape
        if waiting_images * positions >= 2 * min(_BLOCK, _NUMBERS // (groups * fan)):
            self._sum_waiting()

    def _sum_waiting(self) -> None:
        """Add the rows in `waiting` to the sums, and clear `waiting`."""
        if not self.waiting:
            return

        inputs, targets = (torch.cat(batches) for batches in zip(*self.waiting, strict=True))
        self.waiting = []
        x = self._by_fold(inputs, self.points[0])
        y = self._by_fold(targets, self.points[1])

        # The products take most of the time, so they are computed in the rows' precision.
        block = [
            x.sum(2, dtype=torch.float64),
            y.sum(2, dtype=torch.float64),
            _squared(x),
            y.mT @ x,
            y.square().sum(2, dtype=torch.float64),
        ]
        if not self.sums:
            self.sums = [sums.double() for sums in block]
        else:
            for sums, new in zip(self.sums, block, strict=True):
                sums += new

        # Image n of all that were ever added is in fold n % 2.
        count, _, positions, _ = inputs.shape
        odd_images = (self.images + count) // 2 - self.images // 2
        self.rows += (positions * (count - odd_images), positions * odd_images)
        self.images += count

    def _by_fold(self, rows: Tensor, point: Tensor) -> Tensor:
        """Return rows (N, G, p, f) less a point, parted into folds, (2, G, n, f)."""
        about = rows - point
        # The first image must be even and the last one odd. Images of zeros, which add nothing to
        # the sums, are put where that is not so.
        missing_even = self.images % 2
        missing_odd = (missing_even + len(rows)) % 2
        if missing_even or missing_odd:
            about = F.pad(about, (0, 0, 0, 0, 0, 0, missing_even, missing_odd))
        parted: Tensor = about.unflatten(0, (-1, 2)).permute(1, 2, 0, 3, 4).flatten(2, 3)
        return parted

    def each(self) -> Moments:
        """Return the moments of both folds."""
        self._sum_waiting()
        return self._moments(self.rows.reshape(2, 1, 1), self.sums)

    def total(self) -> Moments:
        """Return the moments of all images: the sum of both folds."""
        self._sum_waiting()
        return self._moments(self.rows.sum().reshape(1, 1), [each.sum(0) for each in self.sums])

    def _moments(self, count: Numbers, sums: Sequence[Tensor]) -> Moments:
        x, y, xx, xy, yy = sums
        x0, y0 = (point[:, 0] for point in self.points)
        return Moments(
            count=torch.from_numpy(count).to(x.device),
            x=x,
            y=y,
            xx=xx,
            xy=xy,
            yy=yy,
            x0=x0,
            y0=y0,
            biased=self.biased,
        )


def _mean_row(rows: Tensor) -> Tensor:
    """Return the mean row (G, 1, f) of rows (N, G, p, f), in float32 or more.

    Rows in half precision become float32 when it is subtracted from them.
    """
    precision = torch.promote_types(rows.dtype, torch.float32)
    return rows.mean((0, 2), dtype=torch.float64)[:, None].to(precision)


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

            # Reading an answer waits for the device, so both are read at once.
            answers = torch.cat([damp.flatten(), failed.flatten()]).cpu().numpy()
            added, failures = np.split(answers, 2)
            if not np.isfinite(added).all():
                raise torch.linalg.LinAlgError("the covariance is not finite")
            if not failures.any():
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
    ridge = _best_ridge(folds, prior, zero_sum)
    total = folds.total()
    covariance, cross, _ = total.covariances()
    weight = Kernel.of(covariance, ridge).weights(cross, prior, zero_sum=zero_sum)
    return Fit(weight, _bias(weight, *total.means(), biased=folds.biased), ridge)


def _best_ridge(folds: Folds, prior: Tensor, zero_sum: Tensor | None) -> float:
    """Return the ridge of `RIDGES` that predicts the odd images best.

    Weights are fitted to the even images, with growing ridges. The search ends at the first ridge
    that does not lower the error on the odd images.

    Args:
        folds: The moments of the even and of the odd images.
        prior: The weight (G, o, f) that a large ridge pulls to.
        zero_sum: The vector u (G, f) for which V u = 0 must hold. None asks for nothing.
    """
    each = folds.each()
    if folds.rows.min() < 2:
        return RIDGES[0]

    # A ridge is judged by its errors at about `_JUDGED` of the outputs, evenly spaced. They are
    # enough to choose it by, and take less time than all outputs.
    judged = slice(None, None, max(prior.shape[1] // _JUDGED, 1))
    judged_prior = prior[:, judged]
    # The covariances of x, those of y with x and the variances of y, on the even images (fitted on)
    # and the odd ones (judged on).
    covariances, crosses, variances = each.covariances()
    covariance, odd_covariance = covariances
    cross, odd_cross = crosses[:, :, judged]
    twice_odd_cross = 2 * odd_cross
    odd_variance = variances[1, :, judged].sum()
    # How far the mean input and the mean target of the odd images are from those of the even ones.
    input_means, target_means = each.means()
    input_shift = input_means[1] - input_means[0]
    target_shift = (target_means[1] - target_means[0])[:, judged]

    def errors(ridges: Sequence[float]) -> list[float]:
        """Fit weights with each ridge to the even images, and return their errors on the odd ones.

        An error is the mean squared error on the odd images, summed over the outputs in `judged`.
        """
        ridge = torch.tensor(ridges, dtype=prior.dtype, device=prior.device).view(-1, 1, 1, 1)
        weight = Kernel.of(covariance, ridge).weights(cross, judged_prior, zero_sum=zero_sum)

        # With the weights V (`weight`) and the bias b of the even images, E |y - b - V x|^2 on the
        # odd images is the sum over outputs of V C V' - 2 V B' + Var[y] + d^2. C (`odd_covariance`)
        # is the covariance of x, B (`odd_cross`) that of y with x, and Var[y] (`odd_variance`) the
        # variance of y, all on the odd images. The error d (`offset`) of the mean output is the
        # difference between the biases that fit the odd and the even images.
        offset = _bias(weight, input_shift, target_shift, biased=folds.biased)
        pulled = weight @ odd_covariance - twice_odd_cross
        square: Tensor = (
            (pulled * weight).sum((1, 2, 3)) + offset.square().sum((1, 2)) + odd_variance
        )
        return square.tolist()

    # With few inputs per output, all ridges are fitted in one call. With many, the covariances of
    # all ridges would take much memory, so they are fitted one by one.
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
