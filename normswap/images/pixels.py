"""The pixels of an image, as the transforms take them."""

from __future__ import annotations

from PIL import Image


def converted(image: Image.Image, mode: str) -> object:
    """The image in `mode`, of 8 bits; Pillow cuts deeper pixels off at 255, so those are refused.

    Raises:
        ValueError: its pixels have more bits.
    """
    if image.mode.startswith(("I", "F")):
        bits = 16 if ";16" in image.mode else 32
        raise ValueError(f"its pixels have {bits} bits (mode {image.mode}), and networks are given 8: scale them to 8")
    return image.convert(mode)
