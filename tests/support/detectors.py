"""Detectors of Ultralytics, and images of bright squares with their boxes, as it reads them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

import normswap
from normswap.sites import affine


def lived_in_detector(description: str) -> Any:
    """Return a detector whose norms have seen noise, so that its answers differ between images.

    Args:
        description: The file that describes the network, such as yolov8n.yaml.
    """
    from ultralytics import YOLO

    torch.manual_seed(0)
    model: Any = YOLO(description).model
    for norm in filter(affine.is_batchnorm, model.modules()):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        norm.momentum = 0.5

    model.train()
    for _ in range(8):
        model(torch.randn(4, 3, 64, 64))
    return model.eval()


def opened_detector(description: str, file: Path) -> nn.Module:
    """Return such a detector as it is opened from a file that Ultralytics wrote.

    Args:
        description: The file that describes the network, such as yolov8n.yaml.
        file: The file to write, a .pt.
    """
    from ultralytics import YOLO

    wrapper: Any = YOLO(description)
    wrapper.model = lived_in_detector(description)
    wrapper.save(file)
    return normswap.open(f"ultralytics:{file}")


def write_squares(folder: Path, side: int, count: int) -> Path:
    """Write grey images, each with one bright square, and return the file that describes them.

    Args:
        folder: The folder to make: images/, labels/ and data.yaml.
        side: The side of an image in pixels. A square's is three eighths of it.
        count: The number of images, which are both trained on and validated on.
    """
    drawn = np.random.default_rng(0)
    for name in ("images", "labels"):
        (folder / name).mkdir(parents=True)

    square = side * 3 // 8
    for number in range(count):
        pixels = drawn.integers(0, 90, (side, side, 3), dtype=np.uint8)
        top, left = drawn.integers(0, side - square, 2)
        pixels[top : top + square, left : left + square] = drawn.integers(160, 255, 3)
        Image.fromarray(pixels).save(folder / "images" / f"{number}.png")

        middle = f"{(left + square / 2) / side:.4f} {(top + square / 2) / side:.4f}"
        share = f"{square / side:.4f}"
        label = folder / "labels" / f"{number}.txt"
        label.write_text(f"0 {middle} {share} {share}\n", encoding="utf-8")

    description = folder / "data.yaml"
    description.write_text(
        f"path: {folder.resolve()}\ntrain: images\nval: images\nnames: {{0: square}}\n",
        encoding="utf-8",
    )
    return description
