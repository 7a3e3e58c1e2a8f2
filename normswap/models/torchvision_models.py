"""torchvision's networks: `torchvision:BUILDER[@WEIGHTS]`, every builder of `torchvision.models.get_model`.

Some builders build by the weights' name (frozen norms, auxiliary heads, another eps), and then load them. So the name
of the weights is a part of the architecture, as the argument `weights`, and building is asked for with it, without the
loading.
"""

from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torchvision import models
from torchvision.transforms import _presets as presets

from normswap.errors import SourceError, first_line
from normswap.models.building import Built, Cfg, Wanted, demand_allowed, make, near, seeded
from normswap.models.hub_config import crop_share
from normswap.models.weight_files import State, check_finite, load_into
from normswap.plan import Arch

_FORBIDDEN = ("weights_backbone", "progress", "quantize")
_TAG = "weights"


def build(name: str, wanted: Wanted) -> Built:
    """The bare network of `torchvision:BUILDER`, built as its default weights, if they are wanted, or those behind the
    @ want it.

    Raises:
        SourceError: unknown builder, weights or arguments.
    """
    called, _, tag = name.partition(":")[2].partition("@")
    given = wanted.named("num_classes", "in_chans")
    tag = str(given.pop(_TAG, "") or tag)
    _demand_known(called)
    member = _member(called, tag) if tag or wanted.trained else None
    classes = _classes(member)
    fresh = classes is not None and given.get("num_classes") not in (None, classes)
    arch = Arch(called, given if member is None or fresh else {_TAG: member.name, **given}, "torchvision")
    with seeded() if fresh else contextlib.nullcontext():
        model = create(arch)
    source = f"torchvision:{called}" + (f"@{member.name}" if member else "")

    def pretrained() -> nn.Module:
        state = _download(member, source)
        load_into(model, _rehead(state, model, classes) if fresh else state, source, {})
        return model

    seen = _preprocessing(member or _default(called), given.get("num_classes"))
    return Built(model, arch, source, seen, pretrained)


def create(arch: Arch) -> nn.Module:
    """See `kinds`."""
    _demand_known(arch.name)
    demand_allowed(arch.name, arch.kwargs, _FORBIDDEN)
    kwargs = dict(arch.kwargs)
    tag = kwargs.pop(_TAG, None)
    member = _member(arch.name, tag) if tag else None

    def builder(**kwargs: object) -> nn.Module:
        takes = inspect.signature(models.get_model_builder(arch.name)).parameters
        none = {"weights_backbone": None} if "weights_backbone" in takes else {}
        with _unfilled():
            return models.get_model(arch.name, weights=member, **none, **kwargs)

    return make(f"torchvision:{arch.name}", builder, kwargs).eval()


@contextlib.contextmanager
def _unfilled() -> Iterator[None]:
    """Let builders build for weights without having them."""
    kept = models.WeightsEnum.get_state_dict, nn.Module.load_state_dict
    models.WeightsEnum.get_state_dict = lambda self, *args, **kwargs: {}
    nn.Module.load_state_dict = lambda self, *args, **kwargs: None  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        models.WeightsEnum.get_state_dict, nn.Module.load_state_dict = kept  # type: ignore[method-assign]


def _demand_known(name: str) -> None:
    known = models.list_models()
    if name not in known:
        remedy = near(name, known, "See torchvision.models.list_models()")
        raise SourceError(f"torchvision has no model '{name}'", remedy=remedy)


def _default(name: str) -> models.WeightsEnum | None:
    """The weights that torchvision takes by default, or None where it has none."""
    return getattr(models.get_model_weights(name), "DEFAULT", None)


def _member(name: str, tag: str) -> models.WeightsEnum:
    """The weights of that name, or the default ones."""
    known = [one.name for one in models.get_model_weights(name)]
    if tag in ("", "DEFAULT"):
        found = _default(name)
        if found is None:
            remedy = "Use '--weights random' or a weights file of your own."
            raise SourceError(f"torchvision has no weights for {name}", remedy=remedy)
        return found
    if tag not in known:
        remedy = near(tag, known, f"There are {', '.join(known)}." if known else "It has none.")
        raise SourceError(f"torchvision has no weights '{tag}' for {name}", remedy=remedy)
    return models.get_model_weights(name)[tag]


def _classes(member: models.WeightsEnum | None) -> int | None:
    return len(member.meta["categories"]) if member is not None and "categories" in member.meta else None


def _download(member: models.WeightsEnum, source: str) -> State:
    """The tensors, from torch's cache or from torchvision's server; nothing in the file is run."""
    name = source.partition(":")[2]
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # torch says there what it fetches
            state: State = torch.hub.load_state_dict_from_url(
                member.url, map_location="cpu", progress=False, check_hash=True, weights_only=True
            )
    except Exception as error:  # urllib's, or the unpickler's
        file = Path(torch.hub.get_dir()) / "checkpoints" / member.url.rpartition("/")[2]
        remedy = (
            f"Ways on: '--weights random' for the bare architecture; '--weights FILE' with the weights of {name} on "
            f"this disk; or put {member.url} at {file}."
        )
        raise SourceError(f"no weights for {source}", f"{member.url}: {first_line(error)}", remedy) from None
    check_finite(state, source)
    return state


def _rehead(state: State, model: nn.Module, classes: int | None) -> State:
    """The weights but for the layers that give the classes: those keep their random values."""
    own = model.state_dict()
    return {
        key: own[key]
        if key in own and own[key].shape[1:] == value.shape[1:] and value.shape[:1] == (classes,)
        else value
        for key, value in state.items()
    }


def _preprocessing(member: models.WeightsEnum | None, classes: int | None) -> Cfg:
    """What torchvision does to an image before it, in timm's words, as far as one can say it in those."""
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
