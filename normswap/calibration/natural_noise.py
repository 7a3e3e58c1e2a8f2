"""Noise with the spectrum of natural images: its amplitude falls as 1/f (Field 1987), and its colours go together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def white(count: int, size: Sequence[int], seed: int) -> Tensor:
    """N(0, 1), (N, C, H, W), or of signals (N, C, L) or clips."""
    return torch.randn(count, *size, generator=torch.Generator().manual_seed(seed))


def coloured(noise: Tensor) -> Tensor:
    """White noise as natural images, up to a factor; differentiable."""
    sides = noise.shape[2:]
    places = tuple(range(2, noise.ndim))
    along = [torch.fft.fftfreq(side) for side in sides[:-1]] + [torch.fft.rfftfreq(sides[-1])]
    frequency = torch.stack(torch.meshgrid(*along, indexing="ij")).square().sum(0).sqrt()
    frequency.view(-1)[0] = 1 / max(sides)
    images = torch.fft.irfftn(torch.fft.rfftn(noise, dim=places) / frequency.to(noise.device), s=sides, dim=places)
    return 0.8**0.5 * images[:, :1] + 0.2**0.5 * images


def pink(count: int, size: Sequence[int], seed: int) -> Tensor:
    """Images of unit variance."""
    images = coloured(white(count, size, seed))
    return images / images.std()
