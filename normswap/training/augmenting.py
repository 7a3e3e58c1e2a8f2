"""How training images are changed at random: timm's training transforms, and timm's names for them.

timm is imported inside the function: recipes, whose keys these are, are listed and checked without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from normswap.plan import Body
from normswap.training.recipe_part import Count, NotNegative, Part, Share

if TYPE_CHECKING:
    from PIL.Image import Image
    from torchvision.transforms import Compose


class Augment(Part):
    """`data.augment`: timm's training transforms and mixup, by timm's names."""

    scale: tuple[Share, Share] | None = Field(None, description="Area of random resized crops; null: no such crops.")
    padding: Count = Field(0, description="Pixels (at input_size) around a random crop, if `scale` is null.")
    hflip: Share = Field(0.5, description="Chance of a horizontal flip.")
    color_jitter: NotNegative = Field(0.0, description="timm's color_jitter.")
    auto_augment: str | None = Field(None, description="timm's policy string, e.g. rand-m9-mstd0.5-inc1.")
    erase: Share = Field(0.0, description="Chance of random erasing (timm's re_prob).")
    mixup: NotNegative = Field(0.0, description="Alpha of mixup; 0: off.")
    cutmix: NotNegative = Field(0.0, description="Alpha of cutmix; 0: off.")


def transform(model: Body, augment: Augment) -> Compose:
    """timm's training transform for the network; without `scale`, its images are cropped after padding, or whole."""
    from timm.data.transforms_factory import transforms_imagenet_train
    from torchvision import transforms

    from normswap.training.quick_transforms import Normalized, RandomResizedCrop

    size = tuple(model["input_size"][1:])
    how: dict[str, object] = {
        "mean": model["mean"],
        "std": model["std"],
        "interpolation": model.get("interpolation", "bilinear"),
    }
    make: Callable[..., Sequence[Compose]] = transforms_imagenet_train  # which says that it takes no None, and does
    primary, secondary, last = make(
        img_size=size, scale=augment.scale, hflip=augment.hflip, color_jitter=augment.color_jitter or None,
        auto_augment=augment.auto_augment, re_prob=augment.erase, re_mode="pixel", separate=True, **how,
    )  # fmt: skip
    if augment.scale is None:
        mode = transforms.InterpolationMode(how["interpolation"])
        whole: list[Callable[[Image], Image]] = [transforms.Resize(size, mode)]
        if augment.padding:
            whole.append(transforms.RandomCrop(size, augment.padding, padding_mode="reflect"))
        primary.transforms[:1] = whole
    else:
        primary.transforms[0] = RandomResizedCrop(primary.transforms[0])
    last.transforms[:2] = [Normalized(model["mean"], model["std"])]
    return transforms.Compose([primary, secondary, last])
