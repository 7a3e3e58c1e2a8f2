"""Law of FILE.preprocess.json: whoever follows it prepares an image as timm does for the network.

The record of each network has no value of timm's own defaults, so that a value that is lost shows.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.lived_in_networks import distance, run
from support.sampled_tables import quick
from support.small_trainings import network
from timm.data import create_transform
from timm.data.constants import (
    DEFAULT_CROP_MODE,
    DEFAULT_CROP_PCT,
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
)
from torch import Tensor, nn

import normswap
from normswap.exporting import formats, sidecar

STATED: dict[str, Any] = {
    "input_size": (3, 32, 32),
    "mean": (0.3, 0.4, 0.5),
    "std": (0.2, 0.3, 0.4),
    "interpolation": "bilinear",
    "crop_pct": 0.8,
    "crop_mode": "squash",
}
DEFAULTS: dict[str, Any] = {
    "input_size": (3, 224, 224),
    "mean": IMAGENET_DEFAULT_MEAN,
    "std": IMAGENET_DEFAULT_STD,
    "interpolation": "bicubic",
    "crop_pct": DEFAULT_CROP_PCT,
    "crop_mode": DEFAULT_CROP_MODE,
}
CENTERED = {**STATED, "crop_mode": "center"}
# Each record, the size of images that the user asks for, and whether the file normalizes.
ROWS: dict[str, tuple[dict[str, Any], tuple[int, int, int] | None, bool]] = {
    "squashed": (STATED, None, False),
    "squashed, another size": (STATED, (3, 40, 40), False),
    "squashed, another size, normalized": (STATED, (3, 40, 40), True),
    "squashed, another shape": (STATED, (3, 40, 48), True),
    "cropped": (CENTERED, None, True),
    "cropped, another size": (CENTERED, (3, 48, 48), False),
    "cropped less": ({**CENTERED, "crop_pct": 0.95, "interpolation": "nearest"}, (3, 40, 40), True),
}


def stating(record: dict[str, Any]) -> nn.Module:
    """A small network with this record of its images."""
    model = network()
    known = {**model.__dict__["pretrained_cfg"], **record}
    model.__dict__.update(pretrained_cfg=known, default_cfg=known)
    return model


def followed(told: dict[str, Any], image: Image.Image) -> Tensor:
    """The image as the sidecar says, by Pillow and numpy alone."""
    resize = told["resize"]
    height, width = resize["to"]
    way = Image.Resampling[resize["interpolation"].upper()]
    if resize["crop_mode"] == "squash":
        resized = image.resize((width, height), way)
    else:
        scale = min(height, width) / min(image.size)
        sides = (int(image.size[0] * scale), int(image.size[1] * scale))
        resized = image.resize(sides, way)

    _, rows, columns = told["input"]["size"]
    left = round((resized.size[0] - columns) / 2)
    top = round((resized.size[1] - rows) / 2)
    cropped = resized.crop((left, top, left + columns, top + rows))
    low, high = told["input"]["range"]
    pixels = low + (high - low) * np.asarray(cropped, np.float32).transpose(2, 0, 1) / 255

    if told["normalize"]:
        for number, channel in enumerate(pixels):
            mean, std = (told["normalize"][name][number] for name in ("mean", "std"))
            channel[...] = (channel - mean) / std
    return torch.from_numpy(pixels)[None]


@pytest.mark.parametrize("name", STATED)
def test_no_value_is_a_default(name: str) -> None:
    assert STATED[name] != DEFAULTS[name]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name",
    quick(ROWS, ["squashed", "squashed, another size, normalized", "cropped, another size"]),
)
def test_whoever_follows_it_prepares_an_image_as_timm_does(name: str, tmp_path: Path) -> None:
    record, asked, normalize = ROWS[name]
    model = stating(record)
    pixels = np.random.default_rng(0).integers(0, 256, (70, 90, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    used = {key: record[key] for key in STATED}
    if asked:
        used["input_size"] = asked
    transform: Any = create_transform(**used)

    done = normswap.export(model, tmp_path / "a.pt2", input_size=asked, normalize=normalize)

    told = json.loads(done.sidecar.read_text(encoding="utf-8"))
    assert told["input"]["size"] == list(used["input_size"])
    assert (told["normalize"] is None) is normalize
    answers = formats.get("pt2").open(done.file)(followed(told, image))
    assert distance(run(model, transform(image)[None]), answers) <= 1e-4


AS_PIXELS = {
    "mean": [0.0] * 3,
    "std": [1.0] * 3,
    "interpolation": "bilinear",
    "crop_mode": "center",
}


@pytest.mark.parametrize("share", [0.5, 0.875, 0.9, 0.95, 0.965, 1.0])
def test_sidecars_say_the_size_that_timm_resizes_to(share: float) -> None:
    model: Any = nn.Conv2d(3, 1, 1)
    model.pretrained_cfg = {**AS_PIXELS, "input_size": (3, 224, 224), "crop_pct": share}
    said = sidecar.body(model, (3, 224, 224), "logits", normalize=True, dynamic=False)["resize"]
    first = create_transform((3, 224, 224), crop_pct=share).transforms[0]
    assert said["to"] == [first.size, first.size]
    assert said["crop_pct"] == share
