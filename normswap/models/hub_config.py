"""The content of a config.json in timm's hub layout, and the preprocessing record that normswap keeps of it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from normswap.errors import SourceError, first_line
from normswap.plan import Body

Cfg = Body  # timm's record of the preprocessing, or a config.json

# timm's preprocessing where nothing says more
GENERAL: Cfg = {"mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD, "interpolation": "bicubic",
                "crop_pct": 0.875, "crop_mode": "center"}  # fmt: skip
_TOP_LEVEL = ("num_classes", "label_names", "label_descriptions")
_PREPROCESSING = ("input_size", "fixed_input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode")
_STEM_AND_HEAD = ("first_conv", "classifier")
_RECORDED = (*_PREPROCESSING, *_STEM_AND_HEAD, *_TOP_LEVEL)


@dataclass(frozen=True)
class Config:
    """A config.json: the architecture, its arguments, and what it states about weights and preprocessing."""

    architecture: str
    model_args: Cfg
    stated: Cfg


def read_config(file: Path, origin: str) -> Config:
    """Read a config.json of timm's hub layout (also the old flat one, without `pretrained_cfg`).

    Raises:
        SourceError: missing, not JSON, or not that of a timm model.
    """
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        remedy = "A model directory has config.json and model.safetensors; for weights alone name the file."
        raise SourceError(f"{origin} has no config.json", remedy=remedy) from None
    except (OSError, ValueError) as error:
        raise SourceError(f"{origin}: config.json cannot be read", first_line(error)) from None
    name = config.get("architecture") if isinstance(config, dict) else None
    if not isinstance(name, str):
        foreign = isinstance(config, dict) and "model_type" in config
        remedy = f"It is a transformers model: name it hf:{origin.partition(':')[2] or origin}" if foreign else (
            "Is it a timm model?")  # fmt: skip
        raise SourceError(f"{origin}: config.json names no timm 'architecture'", remedy=remedy)
    stated, args = config.get("pretrained_cfg", config), config.get("model_args") or {}
    if not isinstance(stated, dict) or not isinstance(args, dict):
        raise SourceError(f"{origin}: 'pretrained_cfg' and 'model_args' in config.json must be objects")
    top = {key: config[key] for key in _TOP_LEVEL if key in config}
    return Config(name, args, {key: value for key, value in {**stated, **top}.items() if value is not None})


def shape_of(size: object, origin: str) -> tuple[int, int, int]:
    """Return an `input_size` as `(C, H, W)`.

    Raises:
        SourceError: it is something else.
    """
    if isinstance(size, list | tuple) and len(size) == 3 and all(isinstance(n, int) and n > 0 for n in size):
        return size[0], size[1], size[2]
    raise SourceError(f"{origin}: 'input_size' must be [channels, height, width], not {size}")


def per_channel(values: Sequence[float], channels: int) -> list[float]:
    """Return a statistic for each channel; as in timm, channels that it does not know get the mean of the others."""
    return list(values) if len(values) == channels else [sum(values) / len(values)] * channels


def crop_share(crop: int, resize: int) -> float:
    """Return the crop_pct by which timm resizes to that side: it takes the floor of crop / crop_pct."""
    share = crop / resize
    return share if math.floor(crop / share) == resize else math.nextafter(share, 0)


def record(cfg: Cfg, kwargs: Body, classes: int) -> Cfg:
    """Return the JSON-able preprocessing of a network, which may have another head and other channels than its source.

    Args:
        cfg: timm's record of the source's weights.
        kwargs: the arguments the network was built with.
        classes: how many classes it tells apart.
    """
    kept = {key: cfg[key] for key in _RECORDED if cfg.get(key) is not None}
    if classes != kept.get("num_classes"):
        kept = {key: value for key, value in kept.items() if not key.startswith("label_")}
        kept["num_classes"] = classes
    chans = kwargs.get("in_chans", kept["input_size"][0])
    size = kwargs.get("img_size", kept["input_size"][1:])
    kept["input_size"] = [chans, *((size, size) if isinstance(size, int) else size)]
    kept |= {key: per_channel(kept[key], chans) for key in ("mean", "std") if kept.get(key) is not None}
    plain: Cfg = json.loads(json.dumps(kept))
    return plain
