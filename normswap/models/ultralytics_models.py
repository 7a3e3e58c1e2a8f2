"""Ultralytics' networks: `ultralytics:FILE.pt` or `ultralytics:NAME.yaml`.

The first is a checkpoint, the second a description that Ultralytics ships. A checkpoint's tensors
are read without running its code (`read_pickled_network`). Its network is built from the shipped
description of the name that the checkpoint states. Other descriptions are refused, as Ultralytics
evaluates what they hold.
"""

import re
from pathlib import Path
from typing import Any

from torch import nn

from normswap.errors import SourceError, explained, spelled
from normswap.models.building import BuildRequest, Built, Cfg, check_arguments, make
from normswap.models.safe_pickle import read_pickled_network
from normswap.models.weight_files import State, load_into
from normswap.plan import Arch

_BY_FACTORY = "Say how it is built: MODEL is the file, with --arch package.module:factory"


def build(name: str, request: BuildRequest) -> Built:
    """Return a network of Ultralytics with random values, and how to load its trained weights.

    Args:
        name: `ultralytics:FILE.pt` for a checkpoint, or `ultralytics:NAME.yaml` for a description
            of a network, which has no weights.
        request: What the user asks for beside the name.

    Raises:
        SourceError: The file is missing or cannot be read, or Ultralytics ships no such network.
    """
    place = name.removeprefix("ultralytics:")
    state = State()
    kwargs = request.arguments()
    # The name of the description, such as `yolo11n.yaml`: the user's, or the one that the
    # checkpoint states.
    description = place
    if not place.endswith(".yaml"):
        place = str(Path(place).resolve())
        if not Path(place).is_file():
            raise SourceError(
                f"{place} does not exist",
                remedy=f"ultralytics.YOLO('{description}') may download it",
            )
        with explained(SourceError, f"{place} cannot be read", _BY_FACTORY):
            attributes, state = read_pickled_network(Path(place))
            description = attributes["yaml"]["yaml_file"]
            classes = attributes["yaml"]["nc"]
            if not isinstance(description, str):
                raise TypeError("it names no description")
        # Every network of Ultralytics has BatchNorms until they are fused into its convolutions.
        fused = not any(key.endswith("running_mean") for key in state)
        kwargs = {"num_classes": classes, "fused": fused, **kwargs}
    elif request.trained:
        raise SourceError(f"{place} has no weights", remedy=f"Use '{spelled('weights', 'random')}'")

    # The architecture states the number of classes, also if nobody asked for a number.
    model: Any = create(Arch(Path(description).name, kwargs, "ultralytics"))
    arch = Arch(Path(description).name, {"num_classes": model.yaml["nc"], **kwargs}, "ultralytics")

    def filled() -> nn.Module:
        load_into(model, state, place, {})
        return model

    # A classifier (`-cls`) is trained on smaller images than the others. Ultralytics writes the
    # license into each of its files.
    is_classifier = "-cls" in description
    side = 224 if is_classifier else 640
    cfg: Cfg = {
        "input_size": [3, side, side],
        "mean": [0.0] * 3,
        "std": [1.0] * 3,
        "license": "agpl-3.0",
    }
    cfg |= {
        "interpolation": "bilinear",
        "crop_pct": 1.0,
        # A classifier sees the centre of an image. Other networks see the whole image, with a
        # border around it.
        "crop_mode": "center" if is_classifier else "border",
    }
    return Built(model, arch, f"ultralytics:{place}", cfg, filled)


def create(arch: Arch) -> nn.Module:
    """Return a network of ultralytics with random values, on the CPU and in eval mode.

    Args:
        arch: The name of the network's description, such as `yolo11n.yaml`, and its arguments.
    """
    import ultralytics

    classes = arch.kwargs.get("num_classes")
    if not isinstance(classes, int | None) or not isinstance(arch.kwargs.get("fused"), bool | None):
        raise SourceError(
            f"{arch.name:.100}: num_classes is a whole number, fused is true or false"
        )
    # No other argument is taken.
    check_arguments(arch, arch.kwargs.keys() - {"num_classes", "fused"})

    # Find the description among those that Ultralytics ships.
    folder = Path(ultralytics.__file__).parent / "cfg" / "models"
    # The letter of a size is no part of the file's name: yolo11n-seg is yolo11-seg at the scale n.
    names = {arch.name, re.sub(r"(\d+)[nslmx]", r"\1", arch.name)}
    file = next((file for file in folder.rglob("*.yaml") if file.name in names), None)
    if file is None:
        raise SourceError(
            f"Ultralytics {ultralytics.__version__} ships no {arch.name}", remedy=_BY_FACTORY
        )

    # The network with the usual number of classes tells its Python class, and has read the
    # description. It is built again with the number of classes that is asked for.
    usual: Any = make(arch.name, ultralytics.YOLO, {"model": str(file.with_name(arch.name))}).model
    settings = {"cfg": usual.yaml, "nc": arch.kwargs.get("num_classes"), "verbose": False}
    model = make(arch.name, type(usual), settings)
    if arch.kwargs.get("fused"):
        model.fuse(verbose=False)
    return model.eval()
