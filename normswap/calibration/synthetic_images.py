"""Images for users who have none: made from a network's BatchNorm statistics, or at random.

`make` starts from noise with the spectrum of natural images. Gradient descent changes the noise
until each BatchNorm sees its running mean and variance (Cai et al. 2020, arXiv:2001.00281; Yin et
al. 2020, arXiv:1912.08795). The noise's amplitude falls as 1/f (Field 1987), and its colours are
correlated.

`leaves` draws dead leaves: shapes that hide one another, of sizes r with a density of 1/r^3 (Lee,
Mumford & Huang 2001; Baradad et al. 2021, arXiv:2106.05963). They have edges and
the spectrum of natural images, and need no network.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normswap.errors import OptionError, SourceError, explained, spelled
from normswap.models.calling import Example, anchor
from normswap.models.modes import Progress, hooked, undisturbed
from normswap.sites.site import site_of, sites_of

# So many images are made, in batches of this size.
COUNT = 128
BATCH = 32
# The steps and the learning rate of the descent.
STEPS = 30
RATE = 0.2
# The number of leaves in an image, and their smallest and largest radius as shares of its side.
LEAVES = 40
SMALLEST = 0.03
LARGEST = 0.6


@dataclass(frozen=True, eq=False)
class SyntheticImages:
    """Batches of images that are made when they are first read.

    Args:
        make: A function that makes the batches. It is called once.
    """

    make: Callable[[], list[Tensor]]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._batches)

    @functools.cached_property
    def _batches(self) -> list[Tensor]:
        return self.make()


def make(
    model: nn.Module,
    form: Example,
    size: Sequence[int],
    *,
    seed: int,
    progress: Progress | None = None,
) -> list[Tensor]:
    """Make batches of images on which each BatchNorm sees its running mean and variance.

    Args:
        model: The network whose statistics are matched. Nothing in it is changed.
        form: A call of the network, in which the made images take the place of its images.
        size: The size of an image (C, H, W), of a signal (C, L) or of a clip (C, T, H, W).
        seed: Decides the noise from which the images are made.
        progress: Called with the number of steps that are done, and the number of all steps.

    Returns:
        Batches on the network's device and in its dtype.

    Raises:
        OptionError: No BatchNorm is left in the network, or it takes more than images, or none.
        SourceError: The network has no gradients, or its numbers overflow.
    """
    remedy = f"Give {spelled('calibrate', metavar='DATA')} (images, no labels needed)"
    batchnorms = [site for site in sites_of(model) if site.is_batchnorm]
    norms = [site.module for site in batchnorms if site.refusal_of_kind is None]
    if not norms:
        raise OptionError(
            "synthetic images cannot be made", "no BatchNorm is left in the network", remedy
        )
    if not form.only_images or len(size) < 2:
        raise OptionError(
            "synthetic images cannot be made", "the network takes more than images, or none", remedy
        )

    # A tensor of the network, whose device and dtype the images get.
    like = anchor(model)
    batches: list[Tensor] = []
    total = COUNT // BATCH
    for i in range(total):
        generator = torch.Generator().manual_seed(seed * total + i)
        white = torch.randn(BATCH, *size, generator=generator).to(like.device).requires_grad_()
        # The descent changes `white`, and the images are `coloured(white) * level`. The level gives
        # the images at the start unit variance, and then stays the same.
        level = 1 / coloured(white.detach()).std()

        optimizer = torch.optim.Adam([white], lr=RATE)
        with (
            undisturbed(model),
            torch.inference_mode(False),
            torch.enable_grad(),
            _distances(norms) as distances,
        ):
            for step in range(STEPS):
                distances.clear()
                # The network runs on the images as they are now. Its norms put their distances into
                # the list.
                with explained(SourceError, "synthetic images cannot be made", remedy):
                    form.of((coloured(white) * level).to(like)).call(model)
                    loss = torch.stack(distances).mean()
                    (white.grad,) = torch.autograd.grad(loss, white)

                if not bool(torch.isfinite(loss)):
                    raise SourceError(
                        "synthetic images cannot be made", "the network's numbers overflow", remedy
                    )

                optimizer.step()
                if progress is not None:
                    progress(i * STEPS + step + 1, total * STEPS)

        batches.append((coloured(white.detach()) * level).to(like))

    return batches


@contextmanager
def _distances(norms: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Context manager: collect how far each norm's input is from its running statistics.

    A distance is the squared error of the input's mean, plus that of its deviation, averaged over
    channels. Both errors are in units of the running deviation.

    Yields:
        A list, to which each call of a norm appends its distance. The caller clears it.
    """
    distances: list[Tensor] = []

    def compare(norm: Any, args: tuple[Tensor, ...]) -> None:
        """Append how far a norm's input is from its running statistics: a forward pre-hook."""
        # Half precision is too coarse for a variance. The statistics are over all dimensions but
        # that of the channels.
        x = args[0].to(torch.promote_types(args[0].dtype, torch.float32))
        site = site_of(norm)
        scale, shift = (value.to(x) for value in site.standardization)
        variance, mean = torch.var_mean(x, (0, *range(2, x.ndim)), correction=0)
        _, running_variance = site.input_moments

        # `scale` and `shift` take the running mean to 0 and the running deviation to about 1 (the
        # norm adds eps to the variance).
        mean_error = mean * scale + shift
        kept_deviation = running_variance.to(variance).sqrt() * scale
        # The slope of a square root at 0 is infinite, so that of a constant channel gets a little.
        deviation_error = (variance * scale.square() + 1e-12).sqrt() - kept_deviation
        distances.append((mean_error.square() + deviation_error.square()).mean())

    with hooked(norm.register_forward_pre_hook(compare) for norm in norms):
        yield distances


def coloured(noise: Tensor) -> Tensor:
    """Turn white noise (N, C, ...) into images with the spectrum of natural images, up to a factor.

    The images are differentiable with respect to the noise.
    """
    sides = noise.shape[2:]
    side_dims = tuple(range(2, noise.ndim))
    # The noise is real, so the transform returns only half of the frequencies of the last side.
    by_side = [torch.fft.fftfreq(side) for side in sides[:-1]] + [torch.fft.rfftfreq(sides[-1])]
    frequency = torch.stack(torch.meshgrid(*by_side, indexing="ij")).square().sum(0).sqrt()
    # The mean has frequency 0, by which nothing can be divided. It gets the lowest other frequency.
    frequency.view(-1)[0] = 1 / max(sides)

    # The amplitudes of natural images fall as 1 / frequency.
    spectrum = torch.fft.rfftn(noise, dim=side_dims) / frequency.to(noise.device)
    images: Tensor = torch.fft.irfftn(spectrum, s=sides, dim=side_dims)

    # The channels of natural images are correlated, so each is mixed with the first channel, which
    # gives four fifths of its variance.
    return float(0.8**0.5) * images[:, :1] + float(0.2**0.5) * images


def pink(count: int, size: Sequence[int], seed: int) -> Tensor:
    """Return images of noise with the spectrum of natural images and unit variance.

    Args:
        count: The number of images.
        size: The size of an image, (C, H, W).
        seed: The seed of the random numbers.
    """
    images = coloured(torch.randn(count, *size, generator=torch.Generator().manual_seed(seed)))
    return images / images.std()


def leaves(count: int, size: Sequence[int], seed: int) -> Tensor:
    """Return images of dead leaves (random shapes that hide one another) with unit variance.

    Contrast, colours and a grain of noise are drawn for each image.

    Args:
        count: The number of images.
        size: The size of an image, (C, H, W).
        seed: The seed of the random numbers.
    """
    # The drawn images are cached, and the caller may write into its images, so it gets a copy.
    return _drawn_leaves(count, tuple(size), seed).clone()


@functools.lru_cache(maxsize=4)
def _drawn_leaves(count: int, size: tuple[int, ...], seed: int) -> Tensor:
    """Draw the images of `leaves`. They are cached for further conversions in the same process."""
    generator = torch.Generator().manual_seed(seed)
    channels, *sides = size
    # The shape of one number per image, which broadcasts to the images.
    per_image = (count, *(1,) * (len(sides) + 1))

    def drawn(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    # The coordinates of each pixel, from 0 to 1: (dimensions, sides...).
    positions = torch.stack(
        torch.meshgrid(*(torch.linspace(0, 1, side) for side in sides), indexing="ij")
    )
    # The background has one colour. Vividness is how much colours vary between channels.
    images = drawn(count, channels, *per_image[2:]).expand(count, *size)
    vividness = drawn(*per_image)
    for i in range(LEAVES):
        # Draw a radius r for each image, with a density that falls as r^-3: 1 / r^2 is uniform.
        # The first tenth of the leaves are large, so that they cover the background.
        inverse_square = SMALLEST**-2 + drawn(count) * (LARGEST**-2 - SMALLEST**-2)
        radius = LARGEST * (0.3 + 0.7 * drawn(count)) if i < LEAVES // 10 else inverse_square**-0.5

        # A random linear map, scaled to the radius, turns and stretches the leaf.
        shape_map = torch.randn(count, len(sides), len(sides), generator=generator)
        shape_map = (
            shape_map
            / shape_map.det().abs().clamp_min(0.05).view(-1, 1, 1) ** (1 / len(sides))
            / radius.view(-1, 1, 1)
        )

        # A position is in the leaf if its offset from the centre, after the map, is shorter than 1.
        # Half of the leaves are ellipses, half are parallelograms.
        offset = positions - drawn(count, len(sides)).view(count, -1, *per_image[2:])
        offset = torch.einsum("nij,nj...->ni...", shape_map, offset)
        length = torch.where(
            drawn(*per_image) < 0.5,
            offset.square().sum(1, keepdim=True),
            offset.abs().amax(1, keepdim=True),
        )

        # The leaf covers the leaves before it. Its brightness changes along one direction.
        colour = drawn(*per_image) + vividness / 2 * (drawn(count, channels, *per_image[2:]) - 0.5)
        shade = (drawn(*per_image) - 0.5) / 2 * offset[:, :1]
        images = torch.where(length < 1, colour + shade, images)

    grain = pink(count, size, seed) * (0.02 + 0.13 * drawn(*per_image))
    images = (images + grain - 0.5).clamp(-0.5, 0.5)
    return images / images.std()
