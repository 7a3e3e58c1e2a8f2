"""Random images: noise with the spectrum of natural images, and dead leaves, which have edges as well.

The noise's amplitude falls as 1/f (Field 1987), and its colours are correlated. Dead leaves are shapes that hide one
another, of sizes r with a density of 1/r^3 (Lee, Mumford & Huang 2001; Baradad et al. 2021, arXiv:2106.05963).
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def coloured(noise: Tensor) -> Tensor:
    """White noise (N, C, H, W), or (N, C, ...), with the spectrum of natural images, up to a factor; differentiable."""
    sides = noise.shape[2:]
    places = tuple(range(2, noise.ndim))
    along = [torch.fft.fftfreq(side) for side in sides[:-1]] + [torch.fft.rfftfreq(sides[-1])]
    frequency = torch.stack(torch.meshgrid(*along, indexing="ij")).square().sum(0).sqrt()
    frequency.view(-1)[0] = 1 / max(sides)
    spectrum = torch.fft.rfftn(noise, dim=places) / frequency.to(noise.device)
    images: Tensor = torch.fft.irfftn(spectrum, s=sides, dim=places)
    return float(0.8**0.5) * images[:, :1] + float(0.2**0.5) * images


def pink(count: int, size: Sequence[int], seed: int) -> Tensor:
    """Images of unit variance."""
    images = coloured(torch.randn(count, *size, generator=torch.Generator().manual_seed(seed)))
    return images / images.std()


# Leaves to an image, and the smallest and largest of them as shares of its side.
LEAVES, SMALLEST, LARGEST = 40, 0.03, 0.6


def leaves(count: int, size: Sequence[int], seed: int) -> Tensor:
    """Dead leaves of unit variance; contrast, colours and a grain of noise are drawn for each image."""
    generator = torch.Generator().manual_seed(seed)
    channels, *sides = size
    per = (count, *(1,) * (len(sides) + 1))

    def drawn(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    places = torch.stack(torch.meshgrid(*(torch.linspace(0, 1, side) for side in sides), indexing="ij"))
    images = drawn(count, channels, *per[2:]).expand(count, *size)
    vivid = drawn(*per)
    for i in range(LEAVES):
        span = SMALLEST**-2 + drawn(count) * (LARGEST**-2 - SMALLEST**-2)
        # The first leaves are large, so that no pixel stays empty.
        radius = LARGEST * (0.3 + 0.7 * drawn(count)) if i < LEAVES // 10 else span**-0.5
        turn = torch.randn(count, len(sides), len(sides), generator=generator)
        turn = turn / turn.det().abs().clamp_min(0.05).view(-1, 1, 1) ** (1 / len(sides)) / radius.view(-1, 1, 1)
        away = places - drawn(count, len(sides)).view(count, -1, *per[2:])
        away = torch.einsum("nij,nj...->ni...", turn, away)
        far = torch.where(drawn(*per) < 0.5, away.square().sum(1, keepdim=True), away.abs().amax(1, keepdim=True))
        colour = drawn(*per) + vivid / 2 * (drawn(count, channels, *per[2:]) - 0.5)
        shade = (drawn(*per) - 0.5) / 2 * away[:, :1]
        images = torch.where(far < 1, colour + shade, images)
    grain = pink(count, size, seed) * (0.02 + 0.13 * drawn(*per))
    images = (images + grain - 0.5).clamp(-0.5, 0.5)
    return images / images.std()
