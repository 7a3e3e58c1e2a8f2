"""Mean and variance per channel of layers' inputs, streamed over batches of images of any size.

Batches are merged in float64 (Chan, Golub & LeVeque 1979), so that large means do not cancel the
variance.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normswap.calibration.checked_batches import checked, run
from normswap.errors import SourceError, VerificationError
from normswap.models.modes import Progress, evaluating, hooked


@dataclass
class ChannelMoments:
    """The mean and variance of each channel, in float64, of values that come in batches.

    Args:
        count: The number of values that each channel has.
        mean: The mean of each channel, (C,).
        square: The sum of the squared distances from the mean, (C,).
    """

    count: int
    mean: Tensor
    square: Tensor

    @classmethod
    def none(cls, channels: int, device: torch.device | None = None) -> ChannelMoments:
        """Return moments of no values, to which `add` adds values.

        Args:
            channels: The number of channels.
            device: The device of the tensors. By default it is torch's default device.
        """
        return cls(0, *torch.zeros(2, channels, dtype=torch.float64, device=device))

    @property
    def variance(self) -> Tensor:
        """The unbiased variance of each channel (C,), as a BatchNorm stores it."""
        return self.square / (self.count - 1)

    def add(self, values: Tensor) -> None:
        """Merge values (C, N) into the moments, in place."""
        # With n values so far and m new ones, whose means differ by d, the sums of squares add up,
        # plus d^2 n m / (n + m). The mean moves by d m / (n + m).
        count = self.count + values.shape[1]
        mean = values.mean(1)
        apart = mean - self.mean
        self.square += (values - mean[:, None]).square().sum(
            1
        ) + apart.square() * self.count * values.shape[1] / count
        self.mean += apart * values.shape[1] / count
        self.count = count


class ChannelLine:
    """The least-squares line from x to y in each of C channels.

    The values come in batches, and are summed in float64.
    """

    def __init__(self, channels: int, device: torch.device) -> None:
        self.count = 0
        self.sums = torch.zeros(4, channels, dtype=torch.float64, device=device)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add values to the sums, in place.

        Args:
            x: The values that the line maps, (C, N).
            y: The values that the line should give for them, (C, N).
        """
        self.count += x.shape[1]
        self.sums += torch.stack([x, y, x.square(), x * y]).sum(2)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance of x, each (C,)."""
        mean, _, square, _ = self.sums / self.count
        return mean, (square - mean.square()).clamp_min(0)

    def fitted(self) -> tuple[Tensor, Tensor]:
        """Return slope and offset of each channel's line, each (C,).

        A channel in which x is constant gets the slope 0.
        """
        # The slope is the covariance of x and y over the variance of x. Rounding can leave a small
        # variance in a channel that is constant.
        # The means of x, of y, of x^2 and of x y.
        mean, target, square, product = self.sums / self.count
        variance = square - mean.square()
        varies = variance > 1e-12 * square
        slope = torch.where(varies, (product - mean * target) / variance, 0.0)
        return slope, target - slope * mean


@dataclass(frozen=True)
class MeasuredMoments:
    """The mean and variance of layers' inputs, as they were measured on images.

    Args:
        moments: The moments of each layer's input, by the layer's path.
        images: The number of images that were measured.
    """

    moments: dict[str, ChannelMoments]
    images: int

    def store(self, norms: Mapping[str, Any]) -> None:
        """Set the running statistics of norms to the measured moments, in place.

        Args:
            norms: The norms, by the path of the layer whose input was measured.

        Raises:
            VerificationError: A variance is larger than its norm's dtype can hold.
        """
        for path, moments in self.moments.items():
            norms[path].running_mean.copy_(moments.mean)
            norms[path].running_var.copy_(moments.variance)
            # A variance that the dtype cannot hold has become infinite.
            if not bool(torch.isfinite(norms[path].running_var).all()):
                raise VerificationError(
                    f"the variance at {path} is more than {norms[path].running_var.dtype} holds"
                )


@torch.no_grad()
def measure(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    batches: Iterable[object],
    progress: Progress | None = None,
) -> MeasuredMoments:
    """Measure mean and variance of each layer's input, in one pass over images in eval mode.

    Args:
        model: The network that runs. Nothing in it is changed.
        layers: The layers to watch, by path. Each reads a tensor (N, C, ...).
        batches: Images as the network takes them. See `checked`.
        progress: Called with the number of batches that are done, and the number of all batches.

    Raises:
        SourceError: The images are unusable, there are none, or a layer reads one value per
            channel.
        VerificationError: A layer reads values that are not finite.
    """
    moments: dict[str, ChannelMoments] = {}
    total = operator.length_hint(batches)
    images = 0
    handles = (
        layer.register_forward_pre_hook(partial(_add_input, moments, path))
        for path, layer in layers.items()
    )

    examples = checked(model, batches)
    with evaluating(model), hooked(handles):
        for number, example in enumerate(examples, 1):
            run(model, example)
            images += example.count
            if progress is not None:
                progress(number, total)

    if not images:
        raise SourceError("0 calibration images", "at least 1 is needed")

    for path, moment in moments.items():
        if moment.count < 2:
            raise SourceError(
                f"{path} sees one value per channel",
                "its variance is not defined",
                "Give more images",
            )
        if not bool(torch.isfinite(moment.mean).all() and torch.isfinite(moment.square).all()):
            raise VerificationError(f"what reaches {path} is not finite on these images")

    return MeasuredMoments(moments, images)


def _add_input(
    moments: dict[str, ChannelMoments], path: str, _: nn.Module, args: tuple[Tensor, ...]
) -> None:
    """Add the input of the layer at `path` to its moments, in place: a forward pre-hook."""
    values = args[0].detach().double().transpose(0, 1).flatten(1)
    moments.setdefault(path, ChannelMoments.none(len(values), values.device)).add(values)
