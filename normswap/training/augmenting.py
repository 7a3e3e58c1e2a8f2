"""How training images are changed at random: timm's training transforms, two of them computed in less time.

With the resizing and the normalization below, a process prepares a third more images a second than with timm's
(tests/lab/benchmarks/training_images.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation
from timm.data.transforms_factory import transforms_imagenet_train
from torch import Tensor
from torch.nn import functional
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from normswap.plan import Body
from normswap.training.recipe import Augment

_MODES = {InterpolationMode.BILINEAR: "bilinear", InterpolationMode.BICUBIC: "bicubic"}


def transform(model: Body, augment: Augment) -> transforms.Compose:
    """timm's training transform for the network; without `scale`, its images are cropped after padding, or whole."""
    size = tuple(model["input_size"][1:])
    interpolation = model.get("interpolation", "bilinear")
    make: Any = transforms_imagenet_train  # whose annotations say that it takes no None, and it does
    primary, secondary, last = make(
        img_size=size, scale=augment.scale, hflip=augment.hflip, color_jitter=augment.color_jitter or None,
        auto_augment=augment.auto_augment, re_prob=augment.erase, re_mode="pixel", separate=True,
        mean=model["mean"], std=model["std"], interpolation=interpolation,
    )  # fmt: skip
    if augment.scale is None:
        whole: list[Callable[[Image.Image], Image.Image]] = [transforms.Resize(size, InterpolationMode(interpolation))]
        if augment.padding:
            whole.append(transforms.RandomCrop(size, augment.padding, padding_mode="reflect"))
        primary.transforms[:1] = whole
    else:
        primary.transforms[0] = RandomResizedCrop(primary.transforms[0])
    last.transforms[:2] = [Normalized(model["mean"], model["std"])]
    return transforms.Compose([primary, secondary, last])


class RandomResizedCrop:
    """timm's crops from the same random numbers, resized by torch; pixels differ from Pillow's by rounding.

    torch has code of its own for pixels of 8 bits where the processor has AVX2; elsewhere Pillow resizes.

    Args:
        crops: timm's transform.
    """

    def __init__(self, crops: RandomResizedCropAndInterpolation) -> None:
        self.crops = crops

    def __call__(self, image: Image.Image) -> Image.Image:
        """Crop and resize an image of mode RGB or L."""
        crops, mode = self.crops, _MODES.get(self.crops.interpolation)
        if mode is None or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
            resized_by_pillow: Image.Image = crops(image)
            return resized_by_pillow
        top, left, height, width = crops.get_params(image, crops.scale, crops.ratio)
        planes = _planes(image.crop((left, top, left + width, top + height)))
        resized = functional.interpolate(planes, crops.size, mode=mode, antialias=True)
        return Image.fromarray(resized[0].movedim(0, -1).squeeze(-1).numpy())


class Normalized:
    """An image as a float tensor (C, H, W), normalized: torchvision's ToTensor and Normalize, bit for bit.

    Args:
        mean, std: per channel, of pixels 0 to 1.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = (torch.tensor(values).reshape(-1, 1, 1) for values in (mean, std))

    def __call__(self, image: Image.Image) -> Tensor:
        """Read an image of mode RGB or L."""
        planes = _planes(image)[0].to(torch.float32, memory_format=torch.contiguous_format)
        return planes.div_(255).sub_(self.mean).div_(self.std)


def _planes(image: Image.Image) -> Tensor:
    """Return a copy of the pixels (1, C, H, W), in the order (H, W, C) in memory: `channels_last`, which is faster."""
    return torch.from_numpy(np.array(image)).reshape(1, image.height, image.width, -1).movedim(-1, 1)
