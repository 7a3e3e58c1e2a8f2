"""torchvision's networks: `torchvision:BUILDER[@WEIGHTS]`.

Every builder of `torchvision.models.get_model` is known. Some builders build another network
(frozen norms, auxiliary heads, another eps) if they are given the name of weights, and then load
these. So the name is a part of the architecture, as the argument `weights`. The network is built
with it, and nothing is loaded.
"""

import contextlib
import functools
import inspect
import io
import re
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torchvision import models
from torchvision.transforms import _presets as presets

from normswap.errors import SourceError, first_line, near, spelled
from normswap.models import hub
from normswap.models.building import BuildRequest, Built, Cfg, check_arguments, make
from normswap.models.hub import crop_share
from normswap.models.weight_files import State, load_into, note_new_head
from normswap.plan import Arch

_FORBIDDEN = ("weights_backbone", "progress", "quantize")


def build(name: str, request: BuildRequest) -> Built:
    """Return a network of torchvision with random values, and how to load its trained weights.

    Args:
        name: What the user typed: `torchvision:BUILDER[@WEIGHTS]`, such as
            `torchvision:resnet50@IMAGENET1K_V2`. By default the weights are the builder's default.
        request: What the user asks for beside the name.

    Raises:
        SourceError: There is no such network in torchvision, it has no such weights, or it cannot
            be built.
    """
    # Read the names of the builder and of the weights. The latter may also be an argument.
    builder, _, tag = name.partition(":")[2].partition("@")
    arguments = request.arguments()
    tag = str(arguments.pop("weights", "") or tag)
    _check_known(builder)

    # Find torchvision's record of the weights (`member`), and the number of their classes.
    member = None
    classes = 0
    source = f"torchvision:{builder}"
    if tag or request.trained:
        member = _member(builder, tag)
        classes = len(member.meta.get("categories") or ())
        source += f"@{member.name}"
    # torchvision refuses the name of weights together with another number of classes.
    fresh_head = bool(classes) and arguments.get("num_classes") not in (None, classes)
    if member is not None and not fresh_head:
        arguments = {"weights": member.name, **arguments}

    arch = Arch(builder, arguments, "torchvision")
    # A new head keeps these random values.
    model = create(arch)

    def pretrained() -> nn.Module:
        assert member is not None, "a network without weights is not asked for them"
        state = _download(member, source)
        if fresh_head:
            state = _rehead(state, model, classes)
            note_new_head("the head", arguments["num_classes"])
        # With an empty record, stem and head must fit as they are.
        load_into(model, state, source, {})
        return model

    # A network with random values gets the preprocessing of the builder's default weights.
    preprocessing = _preprocessing(
        member or getattr(models.get_model_weights(builder), "DEFAULT", None)
    )
    if "num_classes" in preprocessing and "num_classes" in arguments:
        preprocessing["num_classes"] = arguments["num_classes"]
    return Built(model, arch, source, preprocessing, pretrained)


def create(arch: Arch) -> nn.Module:
    """Return a network of torchvision with random values, on the CPU and in eval mode.

    Args:
        arch: The name of the builder, and its arguments. The argument `weights` only changes what
            is built. No weights are loaded.
    """
    # The arguments may come from somebody else's file. Those that are no part of an architecture,
    # such as an argument that loads weights, are refused.
    check_arguments(arch, _FORBIDDEN)
    _check_known(arch.name)
    kwargs = dict(arch.kwargs)
    tag = kwargs.pop("weights", None)
    if not isinstance(tag, str | None):
        raise SourceError(
            f"torchvision:{arch.name}", f"weights={tag!r:.100} are no name of weights"
        )
    member = _member(arch.name, tag) if tag else None
    # A detector would load weights for its backbone unless it is told not to.
    if "weights_backbone" in inspect.signature(models.get_model_builder(arch.name)).parameters:
        kwargs["weights_backbone"] = None

    # A builder loads the weights whose name it is given. Here it gets no tensors.
    no_tensors = mock.patch.object(models.WeightsEnum, "get_state_dict", return_value={})
    no_loading = mock.patch.object(nn.Module, "load_state_dict", return_value=None)
    with no_tensors, no_loading:
        builder = functools.partial(models.get_model, arch.name, weights=member)
        return make(f"torchvision:{arch.name}", builder, kwargs).eval()


def _check_known(name: str) -> None:
    """Raise SourceError if torchvision has no network of a name, and suggest similar names."""
    names = models.list_models()
    if name not in names:
        remedy = near(name, names, "See torchvision.models.list_models()")
        raise SourceError(f"torchvision has no model '{name}'", remedy=remedy)


def _member(name: str, tag: str) -> models.WeightsEnum:
    """Return torchvision's record of weights: their address, their classes and their images.

    Args:
        name: The builder.
        tag: The name of the weights. Empty for the default.

    Raises:
        SourceError: The builder has no such weights.
    """
    members = models.get_model_weights(name).__members__
    wanted = tag or "DEFAULT"
    if wanted in members:
        return members[wanted]

    quoted = f" '{tag}'" if tag else ""
    remedy = near(tag, members, f"Use '{spelled('weights', 'random')}', or a weights file.")
    raise SourceError(f"torchvision has no weights{quoted} for {name}", remedy=remedy)


def _download(member: models.WeightsEnum, source: str) -> State:
    """Return the tensors of torchvision's weights, downloaded or cached.

    Args:
        member: torchvision's record of the weights.
        source: The name of the network and its weights, for messages.

    Raises:
        SourceError: The download fails, or the file is damaged.
    """
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            state: State = torch.hub.load_state_dict_from_url(
                member.url, map_location="cpu", progress=False, check_hash=True, weights_only=True
            )
    # urllib and torch raise many kinds of errors for a download that fails.
    except Exception as error:
        file = Path(torch.hub.get_dir()) / "checkpoints" / member.url.rpartition("/")[2]
        # The name of a file has the beginning of its hash, as in `resnet18-f37072fd.pth`. torch
        # compares it while it downloads, and never again.
        stated_hash = file.stem.rpartition("-")[2]
        is_hash = re.fullmatch("[0-9a-f]{8,64}", stated_hash)
        if is_hash and file.is_file() and not hub.sha256(file).startswith(stated_hash):
            file.unlink()
            raise SourceError(
                f"{file} is damaged",
                "it has another hash than its name states",
                "It was removed from the cache; try again.",
            ) from None

        random = spelled("weights", "random")
        own = spelled("weights", metavar="FILE")
        remedy = (
            f"Ways on: '{random}'; '{own}' with weights on this disk; or put {member.url} at"
            f" {file}."
        )
        raise SourceError(
            f"no weights for {source}", f"{member.url}: {first_line(error)}", remedy
        ) from None
    return state


def _rehead(state: State, model: nn.Module, classes: int) -> State:
    """Return the tensors of weights, with the network's own head in place of theirs.

    Args:
        state: The tensors of the weights.
        model: The network, whose head has another number of outputs.
        classes: The number of outputs of the weights' head.
    """
    adapted = dict(state)
    for name, own in model.state_dict().items():
        if name not in state:
            continue
        # A tensor belongs to the head if its first dimension is the number of classes of the
        # weights, and its other dimensions are those of the network.
        stored = state[name].shape
        if stored[:1] == (classes,) and own.shape[1:] == stored[1:]:
            adapted[name] = own
    return adapted


def _preprocessing(member: models.WeightsEnum | None) -> Cfg:
    """Return the preprocessing for torchvision's weights, by the keys of timm's record.

    Args:
        member: torchvision's record of the weights. Without it the result is empty.
    """
    if member is None:
        return {}
    preset = member.transforms()
    # A detector normalizes its images itself.
    if isinstance(preset, presets.ObjectDetection):
        return {"mean": [0.0] * 3, "std": [1.0] * 3}
    preprocessing: Cfg = {
        name: list(getattr(preset, name)) for name in ("mean", "std") if hasattr(preset, name)
    }
    # Only the presets of classifiers state how an image is resized and cropped.
    if not isinstance(preset, presets.ImageClassification):
        return preprocessing

    side = int(preset.crop_size[0])
    preprocessing["input_size"] = [3, side, side]
    preprocessing["crop_pct"] = crop_share(side, int(preset.resize_size[0]))
    preprocessing["crop_mode"] = "center"
    preprocessing["interpolation"] = preset.interpolation.value
    if "categories" in member.meta:
        preprocessing["num_classes"] = len(member.meta["categories"])
    return preprocessing
