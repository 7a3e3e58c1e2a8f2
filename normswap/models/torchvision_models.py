"""torchvision's networks: `torchvision:BUILDER[@WEIGHTS]`, every builder of `torchvision.models.get_model`.

Some builders build by the weights' name (frozen norms, auxiliary heads, another eps), and then load them. So the name
of the weights is a part of the architecture, as the argument `weights`, and building is asked for with it, without the
loading.
"""

from __future__ import annotations

import contextlib
import inspect
import io
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torchvision import models
from torchvision.transforms import _presets as presets

from normswap.errors import SourceError, first_line, spelled
from normswap.layers.seeding import seeded
from normswap.models.building import BuildRequest, Built, Cfg, check_allowed, make, near
from normswap.models.hub_config import crop_share
from normswap.models.weight_files import State, check_finite, load_into
from normswap.plan import Arch

_FORBIDDEN = ("weights_backbone", "progress", "quantize")
_TAG = "weights"


def build(name: str, wanted: BuildRequest) -> Built:
    """Build the bare network of `torchvision:BUILDER` as its weights want it: those behind the @, or the default ones.

    Raises:
        SourceError: unknown builder, weights or arguments.
    """
    called, _, tag = name.partition(":")[2].partition("@")
    arguments = wanted.named("num_classes", "in_chans")
    tag = str(arguments.pop(_TAG, "") or tag)
    _check_known(called)
    member = _member(called, tag) if tag or wanted.trained else None
    classes = _classes(member)
    fresh = classes is not None and arguments.get("num_classes") not in (None, classes)
    arch = Arch(called, arguments if member is None or fresh else {_TAG: member.name, **arguments}, "torchvision")
    with seeded() if fresh else contextlib.nullcontext():
        model = create(arch)
    source = f"torchvision:{called}" + (f"@{member.name}" if member else "")

    def pretrained() -> nn.Module:
        state = _download(member, source)
        load_into(model, _rehead(state, model, classes) if fresh else state, source, {})
        return model

    seen = _preprocessing(member or _default(called), arguments.get("num_classes"))
    return Built(model, arch, source, seen, pretrained)


def create(arch: Arch) -> nn.Module:
    """Build the bare network; see `kinds`."""
    _check_known(arch.name)
    check_allowed(arch.name, arch.kwargs, _FORBIDDEN)
    kwargs = dict(arch.kwargs)
    tag = kwargs.pop(_TAG, None)
    member = _member(arch.name, tag) if tag else None

    def builder(**kwargs: object) -> nn.Module:
        takes = inspect.signature(models.get_model_builder(arch.name)).parameters
        none = {"weights_backbone": None} if "weights_backbone" in takes else {}
        with _unfilled():
            return models.get_model(arch.name, weights=member, **none, **kwargs)

    return make(f"torchvision:{arch.name}", builder, kwargs).eval()


def _unfilled() -> contextlib.ExitStack:
    """Let builders build for weights without having them."""
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(models.WeightsEnum, "get_state_dict", return_value={}))
    stack.enter_context(mock.patch.object(nn.Module, "load_state_dict", return_value=None))
    return stack


def _check_known(name: str) -> None:
    known = models.list_models()
    if name not in known:
        remedy = near(name, known, "See torchvision.models.list_models()")
        raise SourceError(f"torchvision has no model '{name}'", remedy=remedy)


def _default(name: str) -> models.WeightsEnum | None:
    """Return the weights that torchvision takes by default, or None where it has none."""
    return getattr(models.get_model_weights(name), "DEFAULT", None)


def _member(name: str, tag: str) -> models.WeightsEnum:
    """Return the weights of that name, or the default ones."""
    known = [one.name for one in models.get_model_weights(name)]
    if tag in ("", "DEFAULT"):
        default = _default(name)
        if default is None:
            remedy = f"Use '{spelled('weights', 'random')}' or a weights file of your own."
            raise SourceError(f"torchvision has no weights for {name}", remedy=remedy)
        return default
    if tag not in known:
        remedy = near(tag, known, f"There are {', '.join(known)}." if known else "It has none.")
        raise SourceError(f"torchvision has no weights '{tag}' for {name}", remedy=remedy)
    return models.get_model_weights(name)[tag]


def _classes(member: models.WeightsEnum | None) -> int | None:
    return len(member.meta["categories"]) if member is not None and "categories" in member.meta else None


def _download(member: models.WeightsEnum, source: str) -> State:
    """Return the tensors, from torch's cache or from torchvision's server; nothing in the file is run."""
    name = source.partition(":")[2]
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # torch says there what it fetches
            state: State = torch.hub.load_state_dict_from_url(
                member.url, map_location="cpu", progress=False, check_hash=True, weights_only=True
            )
    except Exception as error:  # urllib's, or the unpickler's
        file = Path(torch.hub.get_dir()) / "checkpoints" / member.url.rpartition("/")[2]
        remedy = (
            f"Ways on: '{spelled('weights', 'random')}' for the bare architecture; "
            f"'{spelled('weights', metavar='FILE')}' with the weights of {name} on this disk; "
            f"or put {member.url} at {file}."
        )
        raise SourceError(f"no weights for {source}", f"{member.url}: {first_line(error)}", remedy) from None
    check_finite(state, source)
    return state


def _rehead(state: State, model: nn.Module, classes: int | None) -> State:
    """Return the weights but for the layers that give the classes: those keep their random values."""
    bare = model.state_dict()
    return {
        key: bare[key]
        if key in bare and bare[key].shape[1:] == value.shape[1:] and value.shape[:1] == (classes,)
        else value
        for key, value in state.items()
    }


def _preprocessing(member: models.WeightsEnum | None, classes: int | None) -> Cfg:
    """Return torchvision's preprocessing in timm's words, as far as it can be said in those."""
    if member is None:
        return {}
    preset = member.transforms()
    if not isinstance(preset, presets.ImageClassification):
        stated = {key: list(getattr(preset, key)) for key in ("mean", "std") if hasattr(preset, key)}
        inside = isinstance(preset, presets.ObjectDetection)  # then the network itself normalizes
        return {"mean": [0.0] * 3, "std": [1.0] * 3} if inside else stated
    side = int(preset.crop_size[0])
    return {
        "input_size": [3, side, side],
        "mean": list(preset.mean),
        "std": list(preset.std),
        "interpolation": preset.interpolation.value,
        "crop_pct": crop_share(side, int(preset.resize_size[0])),
        "crop_mode": "center",
        "num_classes": classes or _classes(member),
    }
