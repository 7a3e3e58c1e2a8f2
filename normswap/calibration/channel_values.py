"""Values that reach layers, on the user's images or on dead leaves.

Dead leaves (`synthetic_images.leaves`) are random shapes with the edges and the spectrum of
photographs. They are used if the user gave no images, and beside images that may be too few.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from normswap.calibration.checked_batches import run
from normswap.calibration.synthetic_images import leaves
from normswap.models import network_input
from normswap.models.calling import Example, anchor
from normswap.models.modes import evaluating, hooked
from normswap.sites.site import site_of

# The number of images of dead leaves, and the number of images in a batch.
COUNT = 128
BATCH = 64
# The largest side of an image of dead leaves, by the number of sides: signals have one, images two,
# clips three.
LARGEST = {1: 4096, 2: 128, 3: 32}

Value = TypeVar("Value")


@torch.no_grad()
def observed(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    examples: Iterable[Example],
    observe: Callable[[nn.Module, Tensor], Value],
) -> dict[str, list[Value]]:
    """Run a network in eval mode, and return the results of a function of each layer's inputs.

    Args:
        model: The network.
        layers: The layers whose inputs are observed, by path.
        examples: The calls of the network.
        observe: A function of a layer and its input, flattened to x (N, C, places).

    Returns:
        The results of `observe` for each layer, by path, one for each call.
    """
    values: dict[str, list[Value]] = {}

    def look(path: str, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].detach()
        values.setdefault(path, []).append(observe(layer, x.reshape(*x.shape[:2], -1)))

    handles = (
        layer.register_forward_pre_hook(partial(look, path)) for path, layer in layers.items()
    )
    with evaluating(model), hooked(handles):
        for example in examples:
            run(model, example)
    return values


def image_moments(_: nn.Module, x: Tensor) -> Tensor:
    """Return the mean and the mean square of each channel in each image, (2, N, C).

    Both are summed in float64, so that large means do not cancel the variances.

    Args:
        x: A layer's input, (N, C, places).
    """
    length = torch.linalg.vector_norm(x, dim=2, dtype=torch.float64)
    return torch.stack([x.mean(2, dtype=torch.float64), length.square() / x.shape[2]])


def _expected(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the mean and variance that a layer expects of its input, in float64.

    A norm expects its running statistics. A layer without statistics has a whitened input, so it
    expects mean 0 and variance 1.
    """
    site = site_of(layer)
    if site.holds_statistics:
        return site.input_moments
    weight = anchor(layer).detach().double()
    return torch.zeros_like(weight[:1]), torch.ones_like(weight[:1])


@torch.no_grad()
def dead_leaves(
    model: nn.Module, example: Example, norms: Mapping[str, nn.Module]
) -> list[Example]:
    """Return calls of the network with images of dead leaves: random shapes that hide one another.

    The images are scaled so that the input of the first norm has the norm's running variance.

    Args:
        model: The network.
        example: A call of the network, in which dead leaves take the place of the images.
        norms: The norms that the images are made for, by path.

    Returns:
        The calls. There are none if the network does not run on such images.
    """
    # A tensor of the network, whose device and dtype the images get.
    like = anchor(model)
    for size in _sizes(model, example.size):
        # A few images show whether the network runs, and which variance reaches the first norm.
        # `of` puts them in the place of the call's images.
        try:
            moments = observed(
                model, norms, [example.of(leaves(4, size, 0).to(like))], image_moments
            )
            first_path, (first_moments, *_) = next(iter(moments.items()))
        # The forward is the user's: it may raise anything for images of this size.
        except Exception:
            continue

        expected_mean, expected_variance = _expected(norms[first_path])
        mean, mean_square = first_moments
        # The mean square about the expected mean.
        about_expected = mean_square - 2 * expected_mean * mean + expected_mean.square()
        ratio = float(expected_variance.mean() / about_expected.mean())

        # The images get the deviation with which the norm's input has its running variance, but no
        # less than 1/8 and no more than 8, and 1 if the ratio is no positive number.
        deviation = min(max(ratio**0.5, 0.125), 8.0) if 0 < ratio < float("inf") else 1.0
        return [
            example.of((deviation * leaves(BATCH, size, i)).to(like)) for i in range(COUNT // BATCH)
        ]

    return []


def _sizes(model: nn.Module, recorded: tuple[int, ...]) -> list[list[int]]:
    """Return the sizes (C, ...) of images of dead leaves to try, small ones first.

    The list is empty if the network's inputs are no images, signals or clips.

    Args:
        model: The network.
        recorded: The size of the images that the network was recorded with.
    """
    made_for = network_input.candidates(model)[0]
    # The network may have been recorded with smaller images than it is made for. With such images
    # the last layers of a network for photographs have few positions, so the size that it is made
    # for is taken.
    channels, *sides = made_for if recorded in network_input.small(made_for) else recorded
    # A number of sides that is not listed is that of no image, signal or clip.
    largest = LARGEST.get(len(sides))
    # First sides of at most `largest`, which cost less, then the full sides, for a network that
    # does not run on smaller images.
    return (
        [[channels, *(min(side, largest) for side in sides)], [channels, *sides]] if largest else []
    )
