"""Ultralytics' networks: `ultralytics:FILE.pt`, a checkpoint, or `ultralytics:NAME.yaml`, a description that it ships.

A checkpoint is a pickle: its tensors are read without its code (`pickled_networks`), and the network is built from the
shipped description of the name that it says. Others' descriptions are not taken, as Ultralytics evaluates their text.
"""

from __future__ import annotations

import re
from pathlib import Path

import ultralytics
from timm.layers import to_2tuple
from torch import nn
from ultralytics.nn import tasks
from ultralytics.utils import YAML

from normswap.errors import SourceError, first_line, near, spelled
from normswap.models import pickled_networks
from normswap.models.building import BuildRequest, Built, Cfg, check_allowed, make
from normswap.models.pickled_networks import PickledNetwork
from normswap.models.weight_files import check_finite, load_into
from normswap.plan import Arch

_FOLDER = Path(ultralytics.__file__).parent / "cfg" / "models"
_CLASSES = {"detect": "DetectionModel", "segment": "SegmentationModel", "pose": "PoseModel", "obb": "OBBModel"}
_CLASSES |= {"classify": "ClassificationModel"}
# What a training sets of a description, by this package's words.
_NUMBERS = {"num_classes": "nc", "in_chans": "channels", "kpt_shape": "kpt_shape"}
_BY_FACTORY = "Say how it is built: MODEL is the file, with --arch package.module:factory"


def build(name: str, request: BuildRequest) -> Built:
    """Build the network of a checkpoint, or of a description; or raises SourceError."""
    place = name.removeprefix("ultralytics:")
    if place.endswith(".yaml"):
        arch = Arch(place, {"num_classes": _described(place)["nc"], **request.given}, "ultralytics")
        return Built(create(arch), arch, name, {}, lambda: _without_weights(place))
    file = Path(place).resolve()
    pickled = _read(file)
    described = pickled.attributes["yaml"]
    arguments: Cfg = {ours: described[theirs] for ours, theirs in _NUMBERS.items() if theirs in described}
    if not any(tensor.endswith("running_mean") for tensor in pickled.state):
        arguments["fused"] = True
    arch = Arch(Path(described["yaml_file"]).name, {**arguments, **request.given}, "ultralytics")
    model = create(arch)

    def pretrained() -> nn.Module:
        check_finite(pickled.state, place)
        load_into(model, pickled.state, place, {})
        return model

    return Built(model, arch, f"ultralytics:{file}", _preprocessing(pickled, arch), pretrained)


def _without_weights(name: str) -> nn.Module:
    raise SourceError(f"{name} has no weights", remedy=f"Use '{spelled('weights', 'random')}'")


def _read(file: Path) -> PickledNetwork:
    if not file.is_file():
        raise SourceError(f"{file} does not exist", remedy=f"ultralytics.YOLO('{file.name}') downloads what it offers")
    try:
        pickled = pickled_networks.read(file)
    except Exception as error:
        raise SourceError(f"{file} cannot be read without running its code", first_line(error), _BY_FACTORY) from None
    described = pickled.attributes.get("yaml")
    if not isinstance(described, dict) or not isinstance(described.get("yaml_file"), str):
        raise SourceError(f"{file} does not say which network it holds", remedy=_BY_FACTORY)
    return pickled


def _described(name: str) -> Cfg:
    files = {file.stem: file for file in _FOLDER.rglob("*.yaml")}
    stem = name.removesuffix(".yaml")
    # The letter of a size is no part of the file's name: yolo11n-seg is yolo11-seg at the scale n.
    file = files.get(stem) or files.get(re.sub(r"(\d+)[nslmx](?=-|$)", r"\1", stem))
    if file is None:
        remedy = near(stem, files, _BY_FACTORY)
        raise SourceError(f"Ultralytics {ultralytics.__version__} ships no {name}", remedy=remedy)
    return {**YAML.load(file), "scale": tasks.guess_model_scale(name), "yaml_file": name}


def create(arch: Arch) -> nn.Module:
    """Build the bare network; see `kinds`."""
    check_allowed(arch.name, arch.kwargs, arch.kwargs.keys() - {*_NUMBERS, "fused"})
    described = _described(arch.name) | {_NUMBERS[key]: arch.kwargs[key] for key in _NUMBERS if key in arch.kwargs}
    task = tasks.guess_model_task(described)
    if task not in _CLASSES:
        raise SourceError(f"{arch.name} is built for {task}, not for {', '.join(_CLASSES)}", remedy=_BY_FACTORY)
    settings = {"cfg": described, "ch": described.get("channels", 3), "verbose": False}
    model: nn.Module = make(arch.name, getattr(tasks, _CLASSES[task]), settings)
    if arch.kwargs.get("fused"):
        model.fuse(verbose=False)  # type: ignore[operator]
    return model.eval()


def _preprocessing(pickled: PickledNetwork, arch: Arch) -> Cfg:
    """Return how Ultralytics prepares images, values in 0..1 and a border where a side is short, and the license."""
    arguments = pickled.attributes.get("args")
    side = getattr(arguments, "attributes", arguments or {}).get("imgsz", 640)
    channels = arch.kwargs.get("in_chans", 3)
    cfg: Cfg = {"input_size": [channels, *to_2tuple(side)], "mean": [0.0] * channels, "std": [1.0] * channels}
    cfg |= {"crop_pct": 1.0, "interpolation": "bilinear", "crop_mode": "center" if "-cls" in arch.name else "border"}
    license = re.match(r"[\w.-]+", str(pickled.beside.get("license", "")))
    return cfg if license is None else {**cfg, "license": license[0].lower()}
