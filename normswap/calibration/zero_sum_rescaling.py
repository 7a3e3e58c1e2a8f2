"""Rescale channels before filters are made to sum to zero, so that this costs least.

Filters that sum to zero are those of weight standardization. A filter with the sum s gets a
correction with the sum -s. The best such correction costs s^2 / (1' C^-1 1), where C is the
covariance of the filter's inputs. A channel may be scaled by f > 0 if the layers around it let a
factor pass (`channel_factors`). With u = 1 / f, S the filters' sums by channel and C the covariance
of the channels' sums under the kernel, a layer with k kernel positions loses

    sum over filters of (S u / k)^2 / (u' C^-1 u).

Gradient descent finds all factors together; each layer's loss counts as a share of its variance.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from normswap.calibration.checked_batches import first_images, run
from normswap.calibration.host_descent import Adam, Numbers
from normswap.calibration.sampling import patches
from normswap.calibration.sequential_fit import refit
from normswap.folding.channel_factors import FIXED, Channels, Reach, scale
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph import inspection
from normswap.layers import reparametrized
from normswap.layers.standardized import STANDARDIZED, effective_weight
from normswap.models.calling import Example
from normswap.models.modes import Progress, evaluating, hooked
from normswap.sites import own_forwards

# Channels are rescaled if there are at least so many images (ENOUGH). At most so many are used
# (MOST), and so many positions of each (PLACES).
ENOUGH = 16
MOST = 64
PLACES = 32
# The steps and the learning rate of the descent.
STEPS = 120
RATE = 0.05
# The weight of the mean square of the factors' logarithms in the loss.
STIFF = 0.03
# The bound of a factor's logarithm.
FARTHEST = 2.0
# Whether the layer at a path may be changed.
Part: TypeAlias = Callable[[str], bool]
# Whether the filters of a layer, given by path and module, must sum to zero.
Which: TypeAlias = Callable[[str, nn.Module], bool]


def fit_zero_sum(
    target: nn.Module,
    result: nn.Module,
    batches: Iterable[object],
    only: Part,
    *,
    seed: int,
    progress: Progress | None,
) -> None:
    """Rescale channels of both networks, then fit the result's filters, in place (`refit`).

    Args:
        target: The network that the result is fitted to. It keeps every filter's mean, so it
            computes the source's function, with the channels scaled as in the result.
        result: The network whose filters sum to zero.
        batches: Images as both networks take them. See `checked`.
        only: Whether the layer at a path may be changed.
        seed: Decides the positions that rows are taken from.
        progress: Called with the number of layers that are done, and the number of all layers.
    """
    factors = rescale(target, result, batches, _sums_to_zero, only)

    # `refit` asks this of each layer: by which factors its input channels were scaled, if its
    # filters must sum to zero. Where nothing was scaled, the factors are 1.
    def zero_sum(path: str, module: nn.Module) -> Tensor | None:
        if not isinstance(module, own_forwards.CONVOLUTIONS) or not _sums_to_zero(path, module):
            return None
        return factors.get(path, torch.ones(module.weight.shape[1] * module.groups))

    refit(target, result, batches, zero_sum=zero_sum, only=only, seed=seed, progress=progress)


def _sums_to_zero(path: str, module: nn.Module) -> bool:
    """Whether a layer standardizes its filters so that each sums to zero.

    Some standardized layers keep the mean of each filter.
    """
    return isinstance(module, STANDARDIZED) and not reparametrized.keeps_mean(module)


def rescale(
    target: nn.Module,
    result: nn.Module,
    batches: Iterable[object],
    zero_sum: Which,
    only: Part = lambda path: True,
) -> dict[str, Tensor]:
    """Scale channels of both networks, in place, so that filters can sum to zero at less cost.

    The layers around a channel undo its scale, so the target computes the same function as before.

    Args:
        target: The network that keeps every filter's mean.
        result: The network whose filters sum to zero.
        batches: Images as both networks take them. See `checked`.
        zero_sum: Whether the filters of a layer of the result must sum to zero.
        only: Whether the layer at a path may be changed.

    Returns:
        The factors (I,) of the input channels of each layer whose filters must sum to zero, by the
        layer's path. The dict is empty, and nothing is scaled, if the images are too few, or the
        covariances cannot be inverted.
    """
    examples = list(first_images(target, batches, MOST))
    if sum(example.count for example in examples) < ENOUGH:
        return {}

    # `Channels` numbers the factors: channels that have to be scaled together share a factor.
    # Layers that may not be changed are `outside` the part of the network that is scaled.
    anatomy = inspection.inspect(target, examples[0].first(2))
    outside = frozenset(path for path in anatomy.traced.modules if not only(path))
    channels = Channels(PlanBuilder(replace(anatomy, outside=outside)))
    # Only layers whose filters must sum to zero have a loss.
    losing = [
        reach for reach in channels.layers if zero_sum(reach.path, result.get_submodule(reach.path))
    ]

    try:
        best = factors(_losses(target, losing, examples), channels.count)
    except torch.linalg.LinAlgError:
        return {}

    for network in (target, result):
        scale(network, channels, best)
    return {reach.path: best[reach.reads] for reach in losing}


@dataclass(frozen=True)
class Loss:
    """The loss of one layer, as a function of the factors of its input channels.

    Args:
        reads: The index of the factor that scales each input channel, (I,).
        sums: The products of the filters' means over the kernel, summed over filters, for each
            group of the convolution, (G, i, i).
        inverse: The inverse of the covariance C of the input channels, each summed over the kernel,
            for each group of the convolution, (G, i, i).
        variance: The sum of the variances of the layer's outputs.
    """

    reads: Tensor
    sums: Tensor
    inverse: Tensor
    variance: float

    def measured(self, logs: Numbers) -> tuple[float, Numbers]:
        """Return the loss as a share of the variance, and its derivative.

        In each group the loss is (u' S u) / (u' C^-1 u). Here u = 1 / f has the factors f of the
        layer's input channels, S is `sums` and C^-1 is `inverse`. The derivative (I,) is by the
        logarithms of the factors f.

        Args:
            logs: The logarithms of all factors, (count,).
        """
        sums = self.sums.numpy()
        # In the tables' precision, so that the tables need not be copied.
        u = np.exp(-logs[self.reads.numpy()]).reshape(len(sums), -1, 1).astype(sums.dtype)
        along_sums = sums @ u
        along_inverse = self.inverse.numpy() @ u
        lost = (u * along_sums).sum(1, keepdims=True)
        kept = (u * along_inverse).sum(1, keepdims=True)

        # The derivatives of u' S u and u' C^-1 u by log f = -log u are -2 u S u and -2 u C^-1 u.
        by_log = -2 * u * (along_sums / kept - lost / kept**2 * along_inverse)
        return float((lost / kept).sum()) / self.variance, by_log.reshape(-1) / self.variance


def factors(losses: list[Loss], count: int) -> Tensor:
    """Return the factors that make the sum of the losses small, (count,).

    The descent runs in NumPy, as its steps are many and small, and run on the CPU whatever the
    network's device is.

    Args:
        losses: The loss of each layer whose filters must sum to zero.
        count: The number of factors. The factor at the index `FIXED` belongs to the channels that
            cannot be scaled, and stays 1.
    """
    descent = Adam(np.zeros(count), RATE, FARTHEST)
    for _ in range(STEPS if losses else 0):
        # The values of the descent are the logarithms of the factors. Large ones cost something,
        # too: this is the derivative of STIFF times their mean square.
        gradient = 2 * STIFF / count * descent.values
        for loss in losses:
            _, by_log = loss.measured(descent.values)
            # A factor may scale several channels.
            np.add.at(gradient, loss.reads.numpy(), by_log)
        descent.step(gradient)
        # The factor of the channels that cannot be scaled stays 1.
        descent.values[FIXED] = 0

    return torch.from_numpy(np.exp(descent.values)).float()


@torch.no_grad()
def _losses(model: nn.Module, layers: list[Reach], examples: list[Example]) -> list[Loss]:
    """Run a network on some calls, and return the `Loss` of each given layer, in order.

    Args:
        model: The network.
        layers: The convolutions whose filters must sum to zero, each with the factors of the
            channels that it reads.
        examples: The calls.
    """
    moments = {reach.path: _Moments() for reach in layers}
    handles = (
        model.get_submodule(path).register_forward_hook(each.look) for path, each in moments.items()
    )

    with evaluating(model), hooked(handles):
        for example in examples:
            run(model, example)

    # `pop`, so that the moments of a layer take no more memory once its loss is computed.
    convolutions = (cast(_ConvNd, model.get_submodule(reach.path)) for reach in layers)
    return [
        moments.pop(reach.path).loss(conv, reach.reads)
        for reach, conv in zip(layers, convolutions, strict=True)
    ]


class _Moments:
    """Sums of a convolution's inputs and outputs, and of their products, by group.

    The inputs are summed over the kernel's positions, and about the first batch's mean.
    """

    def __init__(self) -> None:
        self.count = 0
        self.generator = torch.Generator().manual_seed(0)
        # The mean of the first batch, which is subtracted from all inputs. None before that batch.
        self.origin: Tensor | None = None
        self.x = self.xx = self.y = self.yy = torch.zeros((), dtype=torch.float64)

    def look(
        self, layer: nn.modules.conv._ConvNd, args: tuple[Tensor, ...], output: Tensor
    ) -> None:
        """Add the inputs and outputs of one call of a convolution, in place: a forward hook.

        Args:
            layer: The convolution.
            args: The arguments of the call.
            output: The output of the call.
        """
        read, written = patches(layer, args[0], output, PLACES, self.generator)
        # A filter's mean multiplies the sum over the kernel's positions of each input channel.
        read = read.unflatten(3, (layer.weight.shape[1], -1)).sum(4)
        # The rows of all images come together: (N, G, p, ...) becomes (G, N p, ...).
        x, y = (rows.transpose(0, 1).flatten(1, 2) for rows in (read, written))
        if self.origin is None:
            self.origin = x.mean(1, keepdim=True)

        # The products take most of the time of wide layers, so they are in float32.
        x = x - self.origin
        y = y.double()
        self.count += x.shape[1]
        self.x = self.x + x.double().sum(1)
        self.xx = self.xx + (x.transpose(1, 2) @ x).double()
        self.y = self.y + y.sum(1)
        self.yy = self.yy + y.square().sum(1)

    def loss(self, layer: _ConvNd, reads: Tensor) -> Loss:
        """Return the `Loss` of the convolution: what it costs that its filters sum to zero.

        It is a function of the factors by which the input channels are scaled.

        Args:
            layer: The convolution.
            reads: The index of the factor that scales each input channel, (I,).
        """
        mean = self.x / self.count
        width = self.x.shape[1]
        covariance = self.xx / self.count - mean[:, :, None] * mean[:, None]
        mean_variance = covariance.diagonal(dim1=1, dim2=2).mean(1).view(-1, 1, 1)
        # With few rows correlations may be chance, so the fewer rows, the more is added to the
        # diagonal.
        ridge = width / self.count * mean_variance + 1e-30
        covariance = covariance + ridge * torch.eye(width).to(covariance)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(covariance))
        inverse = inverse.float().cpu()

        # The mean of each filter over the kernel, by input channel. `sums` has the products of
        # these means of two channels, summed over the filters.
        weight = effective_weight(layer).detach().double()
        means = weight.flatten(2).mean(2).unflatten(0, (layer.groups, -1))
        sums = (means.transpose(1, 2) @ means).float().cpu()
        variance = (self.yy / self.count - (self.y / self.count).square()).sum()
        return Loss(reads, sums, inverse, float(variance) + 1e-30)
