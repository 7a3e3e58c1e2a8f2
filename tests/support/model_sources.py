"""A small network, written in every way a model source can be."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from normswap import provenance
from normswap.errors import quiet
from normswap.provenance import Provenance
from normswap.storage.header import digest_of

ARGS: dict[str, Any] = {"channels": [8, 16, 32, 64]}
SMALL = {"arch": "resnet18", "arch_args": ARGS, "num_classes": 10}
# The size that a network says it is made for: nothing that is made for it is larger.
SMALL_IMAGES = {"input_size": (3, 64, 64)}
State = dict[str, torch.Tensor]


def small(**kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    options = {**ARGS, "num_classes": 10, "pretrained_cfg_overlay": SMALL_IMAGES, **kwargs}
    return timm.create_model("resnet18", **options).eval()


def origin(model: nn.Module) -> Provenance:
    record = provenance.of(model)
    assert record is not None
    return record


def same(model: nn.Module, state: State) -> bool:
    own = model.state_dict()
    return own.keys() == state.keys() and all(torch.equal(own[key], state[key]) for key in own)


def write_folder(folder: Path, state: State, **config: Any) -> None:
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    names = [f"class{i}" for i in range(10)]
    cfg = {
        "input_size": [3, 48, 48],
        "mean": [0.5, 0.4, 0.3],
        "crop_pct": 1.0,
        "label_names": names,
    }
    layout = {
        "architecture": "resnet18",
        "num_classes": 10,
        "model_args": ARGS,
        "pretrained_cfg": cfg,
    }
    (folder / "config.json").write_text(json.dumps({**layout, **config}), encoding="utf-8")


def hugging_face(place: Path, **config: Any) -> Path:
    """A small classifier of transformers, as save_pretrained writes it, with living statistics."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with quiet():  # it imports torchao, where there is one, and that logs to stderr
        made = transformers.ResNetForImageClassification
    sizes = {
        "depths": [1, 1],
        "hidden_sizes": [8, 16],
        "embedding_size": 8,
        "layer_type": "basic",
        "num_labels": 4,
    }
    torch.manual_seed(0)

    model = made(transformers.ResNetConfig(**{**sizes, **config}))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 2)

    model.save_pretrained(place)
    size = {
        "size": {"shortest_edge": 44},
        "crop_size": {"height": 40, "width": 40},
        "do_center_crop": True,
    }
    stated = {**size, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.2], "resample": 2}
    (place / "preprocessor_config.json").write_text(json.dumps(stated), encoding="utf-8")

    return place


def record_of(folder: Path) -> Any:
    """The record in the weights that normswap wrote."""
    with safe_open(folder / "model.safetensors", "pt") as opened:
        return json.loads(opened.metadata()["normswap"])


def signed(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record with the digest that it must have, if it has one."""
    if "digest" not in record:
        return record
    return {**record, "digest": digest_of(record)}


def rewrite(
    folder: Path,
    *,
    header: Mapping[str, Any] = {},
    tensors: Mapping[str, torch.Tensor | None] = {},
    dropped: Sequence[str] = (),
) -> None:
    """Write the weights in a folder again, with the right digest of their record.

    Args:
        folder: The folder.
        header: Keys of the record that change.
        tensors: Tensors that change, by name; None for one that is left out.
        dropped: Keys of the record that are left out.
    """
    file = folder / "model.safetensors"
    record = {**record_of(folder), **header}
    record = {key: value for key, value in record.items() if key not in dropped}
    tensors = {**load_file(file), **tensors}
    state = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(state, file, {"normswap": json.dumps(signed(record))})

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["normswap"].pop("header", None)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
