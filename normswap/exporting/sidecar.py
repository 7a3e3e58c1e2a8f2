"""The sidecar of an exported file, FILE.preprocess.json, and the same in the file's metadata.

Its name has the whole name of the file, as exports in one folder may need different preprocessing.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

from normswap import provenance
from normswap.exporting.formats import sidecar_of
from normswap.exporting.signature import INPUT, Signature
from normswap.models import preprocessing, zoo
from normswap.plan import Body
from normswap.version import __version__


def config(model: nn.Module) -> Body:
    """timm's preprocessing record of a network: input_size, mean, std, interpolation, crop_pct,
    crop_mode.
    """
    data_config = zoo.data_config(model)
    # timm does not record how many channels a network was made for.
    if not provenance.of(model).pretrained_cfg:
        stem = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
        if stem is not None:
            data_config["input_size"] = (stem.in_channels, *tuple(data_config["input_size"])[1:])
    return data_config


def body(
    model: nn.Module, size: tuple[int, ...], output: str, *, normalize: bool, dynamic: bool
) -> Body:
    """How to prepare an image for the file, and what its answers mean.

    Args:
        size: (C, H, W) that the file takes.
        output: the name of its output.
        normalize: the file normalizes images itself; dynamic: it takes any number of images.
    """
    stated = config(model)
    labels = provenance.of(model).pretrained_cfg.get("label_names")
    if isinstance(labels, Mapping):
        labels = list(labels.values())
    crop = {key: stated[key] for key in ("crop_pct", "crop_mode", "interpolation") if key in stated}
    return {
        "input": {
            "name": INPUT,
            "dtype": "float32",
            "layout": "NCHW",
            "batch": None if dynamic else 1,
            "size": list(size),
            "channels": {1: "L", 3: "RGB"}.get(size[0]),
            "range": [0.0, 1.0],
        },
        "resize": {"to": [math.floor(side / stated["crop_pct"]) for side in size[1:]], **crop},
        "normalize": (
            None if normalize else {"mean": list(stated["mean"]), "std": list(stated["std"])}
        ),
        "assumed": list(preprocessing.assumed(model)),
        "output": {"name": output, "dtype": "float32", "labels": labels},
    }


def plain_body(
    signature: Signature, tensors: Sequence[Tensor], answers: Mapping[str, Tensor], *, dynamic: bool
) -> Body:
    """The sidecar's inputs (`tensors`) and outputs (`answers`) of a file that takes more than
    images.
    """

    def said(name: str, tensor: Tensor) -> Body:
        shape = [None if dynamic and not i else side for i, side in enumerate(tensor.shape)]
        return {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": shape}

    return {
        "inputs": [
            said(name, tensor) for name, tensor in zip(signature.inputs, tensors, strict=True)
        ],
        "outputs": [said(name, tensor) for name, tensor in answers.items()],
    }


def metadata(model: nn.Module, body: Body, dtype: str) -> dict[str, str]:
    """The metadata of the file: all values are text, lists and records as JSON."""
    record = provenance.of(model)
    return {
        "source": record.source,
        "sha256": record.sha256 or "",
        "architecture": getattr(record.arch, "name", type(model).__name__),
        "dtype": dtype,
        "labels": json.dumps(body.get("output", {}).get("labels")),
        "preprocess": json.dumps(body),
        "versions": json.dumps(
            {"normswap": __version__, "torch": torch.__version__, "timm": timm.__version__}
        ),
    }


def write(file: Path, body: Body) -> None:
    """Write the sidecar beside `file`."""
    sidecar_of(file).write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def body_of(file: Path, noted: Mapping[str, str]) -> Body:
    """The sidecar of an exported file, or its copy in the metadata; empty where there is neither."""
    try:
        text = sidecar_of(file).read_text(encoding="utf-8")
    except OSError:
        text = noted.get("preprocess", "{}")
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        return {}
