"""A preprocessor_config.json of transformers in timm's words."""

from __future__ import annotations

from normswap.models.hub_config import Cfg, crop_share

_INTERPOLATION = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers


def preprocessing(stated: Cfg, channels: int, side: object = None) -> Cfg:
    """Return timm's record of the preprocessing, as far as it is stated.

    Args:
        stated: the config of an image processor; empty where there is none.
        channels: that the network takes.
        side: height and width that the network's own config states, if it does.
    """
    size, crop = _sides(stated.get("size")), _sides(stated.get("crop_size"))
    if stated.get("do_resize") is False:
        size = None
    cropped = crop if crop and stated.get("do_center_crop", True) else None
    final = cropped or size or _sides(side)
    seen: Cfg = {}
    if final is not None:
        seen["input_size"] = [channels, *final]
    if size is not None and final is not None:
        share = stated.get("crop_pct") if cropped is None else crop_share(min(final), min(size))
        seen |= {"crop_pct": share or 1.0, "crop_mode": "center" if cropped or _keeps_shape(stated) else "squash"}
    if stated.get("resample") in _INTERPOLATION:
        seen["interpolation"] = _INTERPOLATION[stated["resample"]]
    if stated.get("do_normalize") is False:
        seen |= {"mean": [0.0] * channels, "std": [1.0] * channels}
    for key, word in (("image_mean", "mean"), ("image_std", "std")):
        values = stated.get(key)
        if word not in seen and isinstance(values, list) and len(values) == channels:
            seen[word] = [float(value) for value in values]
    return seen


def _keeps_shape(stated: Cfg) -> bool:
    size = stated.get("size")
    return not (isinstance(size, dict) and "height" in size)


def _sides(size: object) -> tuple[int, int] | None:
    """Read (height, width) of a size, as the processors write it: a number, two, or by name."""
    if isinstance(size, dict):
        edge = size.get("shortest_edge")
        size = (size.get("height", edge), size.get("width", edge))
    if isinstance(size, int):
        size = (size, size)
    if isinstance(size, list | tuple) and len(size) == 2 and all(isinstance(one, int) and one > 0 for one in size):
        return size[0], size[1]
    return None
