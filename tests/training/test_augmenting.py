"""Crops, which take less time than timm's, are what timm gives."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation

from normswap.training.training_images import RandomResizedCrop


def photograph(mode: str) -> Image.Image:
    """Smooth, as photographs are, with edges."""
    coarse = np.random.default_rng(0).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((131, 97), Image.Resampling.BICUBIC).convert(mode)


def crop(transform: Callable[[Image.Image], Image.Image], image: Image.Image, seed: int) -> np.ndarray:
    random.seed(seed)
    return np.asarray(transform(image)).astype(int)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "nearest"])
def test_crops_are_timms(mode: str, interpolation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller and larger, of another shape than the image; torch rounds the rows before it goes on to the columns."""
    timms = RandomResizedCropAndInterpolation((40, 56), (0.08, 1.0), interpolation=interpolation)
    for capability in ("AVX2", "DEFAULT"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda there=capability: there)
        for seed in range(20):
            ours = crop(RandomResizedCrop(timms), photograph(mode), seed)
            assert np.abs(ours - crop(timms, photograph(mode), seed)).max() <= 3
