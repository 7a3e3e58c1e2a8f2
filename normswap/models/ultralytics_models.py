"""Ultralytics' networks: `ultralytics:FILE.pt`, a checkpoint, or `ultralytics:NAME.yaml`, a description that it ships.

A checkpoint is a pickle: its tensors are read without its code (`pickled_networks`), and the network is built from the
shipped description of the name that it says. Others' descriptions are not taken, as Ultralytics evaluates their text.
"""

from __future__ import annotations

import re
from pathlib import Path

import ultralytics
from torch import nn
from ultralytics.nn import tasks
from ultralytics.utils import YAML

from normswap.errors import SourceError, first_line, near, spelled
from normswap.models import pickled_networks
from normswap.models.building import BuildRequest, Built, Cfg, check_allowed, make
from normswap.models.weight_files import State, check_finite, load_into
from normswap.plan import Arch

_CLASSES = {"detect": "DetectionModel", "segment": "SegmentationModel", "pose": "PoseModel", "obb": "OBBModel"}
_CLASSES |= {"classify": "ClassificationModel"}
# What a training sets of a description, by this package's words.
_NUMBERS = {"num_classes": "nc", "in_chans": "channels", "kpt_shape": "kpt_shape"}
_BY_FACTORY = "Say how it is built: MODEL is the file, with --arch package.module:factory"


def build(name: str, request: BuildRequest) -> Built:
    """Build the network of a checkpoint, with its tensors, or of a description; or raises SourceError."""
    place, kwargs, state = name.removeprefix("ultralytics:"), dict[str, object](), State()
    if place.endswith(".yaml"):
        if request.trained:
            raise SourceError(f"{place} has no weights", remedy=f"Use '{spelled('weights', 'random')}'")
        network, described = place, _described(place)
    else:
        place = str(Path(place).resolve())
        try:
            attributes, state = pickled_networks.read(Path(place))
            described = attributes.get("yaml", {})
            network = Path(described["yaml_file"]).name
        except Exception as error:
            raise SourceError(f"{place} cannot be read", first_line(error), _BY_FACTORY) from None
        # Its networks have BatchNorms, all of them, until it fuses them.
        kwargs = {} if any(key.endswith("running_mean") for key in state) else {"fused": True}
    kwargs |= {ours: described[theirs] for ours, theirs in _NUMBERS.items() if theirs in described}
    arch = Arch(network, {**kwargs, **request.given}, "ultralytics")
    model = create(arch)

    def filled() -> nn.Module:
        check_finite(state, place)
        load_into(model, state, place, {})
        return model

    channels = arch.kwargs.get("in_chans", 3)
    cfg: Cfg = {"mean": [0.0] * channels, "std": [1.0] * channels, "crop_pct": 1.0, "interpolation": "bilinear"}
    cfg |= {"input_size": [channels, 640, 640], "crop_mode": "center" if "-cls" in arch.name else "border"}
    # Ultralytics writes it into each of its files.
    cfg |= {"license": "agpl-3.0"}
    return Built(model, arch, f"ultralytics:{place}", cfg, filled)


def _described(name: str) -> Cfg:
    """Return the description of a name that Ultralytics ships; or raises SourceError."""
    files = {file.stem: file for file in (Path(ultralytics.__file__).parent / "cfg" / "models").rglob("*.yaml")}
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
    model = make(arch.name, getattr(tasks, _CLASSES[task]), settings)
    return (model.fuse(verbose=False) if arch.kwargs.get("fused") else model).eval()
