"""Rescaling before filters that must sum to zero, chosen on images: which channel gives up what their sums told.

A filter w loses its sum s. Of all corrections d with sum -s, that which moves the output least costs s^2 / (1' C^-1 1),
C the covariance of what the filter reads. Channels may be scaled by f > 0 where a factor passes (`channel_factors`);
then the sum to lose is that of w / f, and with u = 1 / f, S the filters' sums by channel and C the covariance of the
channels' sums under the kernel, a layer of k places loses

    sum over filters of (S u / k)^2 / (u' C^-1 u),

which is small where u is large for channels that tell little that the others do not. All factors together are found by
gradient descent on the sum of the losses, each as a share of its layer's variance. Corrections are taken to be the same
in all places of the kernel: those that are fitted afterwards cost less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from normswap.calibration.checked_batches import checked, misfit
from normswap.calibration.sampling import patches
from normswap.folding.channel_factors import HELD, Channels, Reach, scale
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph import inspection
from normswap.layers.standardized import computed
from normswap.models.calling import Example
from normswap.models.modes import evaluating, hooked

ENOUGH, MOST = 16, 64  # images
PLACES = 32  # of each image, at most
STEPS, RATE = 120, 0.05
STIFF = 0.03  # what the mean square of the factors' logarithms costs, in shares of variance
FARTHEST = 2.0  # of a factor's logarithm


def rescale(
    target: nn.Module, result: nn.Module, batches: Iterable[object], zero_sum: Callable[[str, nn.Module], bool]
) -> dict[str, Tensor]:
    """Scale channels of target and result, in place; the target computes the same.

    Returns:
        The factors of the channels that each layer reads (I,), by path.

    Args:
        target: the network with its filters' means, of the same modules as `result`.
        batches: what they take (`Example.read`); about `MOST` images are looked at, fewer than `ENOUGH` do nothing.
        zero_sum: which layers of the result must have filters that sum to zero.
    """
    examples, count = [], 0
    for example in checked(target, batches):
        examples.append(example)
        count += example.count
        if count >= MOST:
            break
    if count < ENOUGH:
        return {}
    channels = Channels(PlanBuilder(inspection.inspect(target, examples[0].first(2))))
    losing = [one for one in channels.layers if zero_sum(one.path, result.get_submodule(one.path))]
    try:
        chosen = factors(_losses(target, losing, examples), channels.count)
    except torch.linalg.LinAlgError:
        return {}  # numbers overflow: the fit that follows says where
    for network in (target, result):
        scale(network, channels, chosen)
    return {one.path: chosen[one.reads] for one in losing}


@dataclass(frozen=True)
class Loss:
    """The loss of one layer, by the factors of the channels that it reads.

    Args:
        reads: the group of factors of each input channel (I,).
        sums: S' S / k^2 by group of the convolution (G, i, i); inverse: of the covariance, the same shape.
        variance: of the layer's outputs together.
    """

    reads: Tensor
    sums: Tensor
    inverse: Tensor
    variance: float

    def __call__(self, logs: Tensor) -> Tensor:
        u = (-logs[self.reads]).exp().view(len(self.sums), -1)
        return (_quadratic(self.sums, u) / _quadratic(self.inverse, u)).sum() / self.variance


def _quadratic(table: Tensor, u: Tensor) -> Tensor:
    """u' table u by group, and its gradient, with one product instead of three: the tables are large."""
    fixed = u.detach()
    along = torch.einsum("gij,gj->gi", table, fixed)
    return ((2 * u - fixed) * along).sum(1)


def factors(losses: list[Loss], count: int) -> Tensor:
    """The factor of each group, (count,), that of `HELD` 1."""
    with torch.enable_grad():
        logs = torch.zeros(count, requires_grad=True)
        optimizer = torch.optim.Adam([logs], lr=RATE)
        for _ in range(STEPS if losses else 0):
            optimizer.zero_grad()
            total = torch.stack([loss(logs) for loss in losses]).sum() + STIFF * logs.square().mean()
            total.backward()
            optimizer.step()
            with torch.no_grad():
                logs.clamp_(-FARTHEST, FARTHEST)
                logs[HELD] = 0
    return logs.detach().exp()


@torch.no_grad()
def _losses(model: nn.Module, layers: list[Reach], examples: list[Example]) -> list[Loss]:
    seen = {one.path: _Seen() for one in layers}
    handles = (model.get_submodule(path).register_forward_hook(moments.look) for path, moments in seen.items())
    try:
        with evaluating(model), hooked(handles):
            for example in examples:
                example.call(model)
    except Exception as error:  # whatever the network raises
        raise misfit(error) from None
    return [seen.pop(one.path).loss(cast(_ConvNd, model.get_submodule(one.path)), one.reads) for one in layers]


class _Seen:
    """Moments of what a layer reads and gives, by group of the convolution, about the first batch's mean."""

    def __init__(self) -> None:
        self.count, self.generator = 0, torch.Generator().manual_seed(0)
        self.at: Tensor | None = None
        self.x = self.xx = self.y = self.yy = torch.zeros((), dtype=torch.float64)

    def look(self, layer: nn.modules.conv._ConvNd, args: tuple[Tensor, ...], output: Tensor) -> None:
        read, written = patches(layer, args[0], output, PLACES, self.generator)
        read = read.unflatten(3, (layer.weight.shape[1], -1)).sum(4)
        x, y = (rows.transpose(0, 1).flatten(1, 2) for rows in (read, written))
        self.at = x.mean(1, keepdim=True) if self.at is None else self.at
        x, y = x - self.at, y.double()  # the products in float32: of wide layers they take most of the time
        self.count += x.shape[1]
        self.x, self.xx = self.x + x.double().sum(1), self.xx + (x.transpose(1, 2) @ x).double()
        self.y, self.yy = self.y + y.sum(1), self.yy + y.square().sum(1)

    def loss(self, layer: _ConvNd, reads: Tensor) -> Loss:
        mean, width = self.x / self.count, self.x.shape[1]
        spread = self.xx / self.count - mean[:, :, None] * mean[:, None]
        level = spread.diagonal(dim1=1, dim2=2).mean(1).view(-1, 1, 1)
        # the fewer places were seen, the more of what they have in common is taken for chance
        spread = spread + (width / self.count * level + 1e-30) * torch.eye(width).to(spread)
        sums = computed(layer).double().flatten(2).mean(2).unflatten(0, (layer.groups, -1))
        variance = (self.yy / self.count - (self.y / self.count).square()).sum()
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(spread))
        lost, inverse = ((sums.transpose(1, 2) @ sums).float().cpu(), inverse.float().cpu())
        return Loss(reads, lost, inverse, float(variance) + 1e-30)
