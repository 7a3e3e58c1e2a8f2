"""timm's networks: by name, from the Hugging Face hub, from directories.

Only this room knows timm's registry.
"""

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import timm
from timm.models import get_pretrained_cfg, is_model
from torch import nn

from normswap import shipped
from normswap.errors import SourceError, explained, near, quiet, spelled
from normswap.models import hub
from normswap.models.building import (
    BuildRequest,
    Built,
    Cfg,
    check_arguments,
    check_size,
    make,
    rebuilds,
)
from normswap.models.weight_files import check_network, load_into, note_new_head, read
from normswap.plan import Arch

# Arguments of timm.create_model that would load weights or return something else than the named
# network.
_FORBIDDEN = (
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "checkpoint_path",
    "cache_dir",
    "features_only",
)
_FILES = ("model.safetensors", "pytorch_model.bin")
# The values of a config.json that does not state them.
_USUAL = {**hub.GENERAL, "input_size": (3, 224, 224), "num_classes": 1000}


def create(arch: Arch) -> nn.Module:
    """Return a network of timm with random values, on the CPU and in eval mode.

    Args:
        arch: The name of the network in timm's registry, and its arguments.
    """
    # The arguments may come from somebody else's file. Those that are no part of an architecture,
    # such as an argument that loads weights, are refused.
    check_arguments(arch, _FORBIDDEN)
    _check_known(arch.name)
    model: nn.Module = make(
        arch.name, functools.partial(timm.create_model, arch.name, pretrained=False), arch.kwargs
    )
    return model.eval()


def _check_known(name: str) -> None:
    """Raise SourceError if timm has no network of a name. The message suggests similar names."""
    # A name may have the tag of its weights, as in `resnet50.a1_in1k`.
    base, _, tag = name.partition(".")
    # The networks that only the recipes of this package use are registered with timm when needed.
    if not is_model(base):
        shipped.register_networks()
    if _looks_like_path(name) or not is_model(base):
        names = timm.list_models() + timm.list_models(pretrained=True)
        raise SourceError(
            f"unknown model '{name}'", remedy=near(name, names, "timm.list_models() has the names")
        )

    try:
        get_pretrained_cfg(name)
    except RuntimeError:
        remedy = near(name, timm.list_models(f"{base}.*", include_tags=True))
        raise SourceError(f"timm has no weights '{tag}' for {base}", remedy=remedy) from None


def _registered(name: str) -> Cfg:
    """Return timm's record (`pretrained_cfg`) for the name of a network, as a dict.

    The record says how images are prepared, and which classes there are. It is empty if timm has
    none.
    """
    cfg = get_pretrained_cfg(name)
    return dict(cfg.to_dict()) if cfg else {}


def repository(name: str) -> str | None:
    """Return the hub's repository of trained weights, as owner/name, or None if they have none.

    Most weights lie in `timm/NAME.TAG`, some in a repository of their authors, and some not on the
    hub. For weights that this version of timm does not know, it is the first of these.

    Args:
        name: timm's name of the network, with the tag of its weights.
    """
    try:
        cfg = get_pretrained_cfg(name)
    except RuntimeError:
        cfg = None
    if cfg is None:
        return f"timm/{name}"
    return cfg.hf_hub_id or None


def _looks_like_path(name: str) -> bool:
    """Return whether a text has a slash, backslash or colon, which no name in timm has."""
    return any(mark in name for mark in "/\\:")


def build(name: str, request: BuildRequest) -> Built:
    """Return a network of timm with random values, and how to load its trained weights.

    Args:
        name: What the user typed: a name in timm's registry, `hf-hub:owner/name`, `local-dir:DIR`,
            or a directory. Repositories and directories have a config.json in timm's layout.
        request: What the user asks for beside the name.

    Raises:
        SourceError: The network cannot be found, read or built.
    """
    # Each kind of place gets a function that finds files in it.
    prefix, _, place = name.partition(":")
    arguments = request.arguments()
    if prefix in ("hf-hub", "hf_hub"):
        return _from_layout(functools.partial(hub.fetch, place), f"hf-hub:{place}", arguments)
    if name == shipped.NAME:
        return _from_layout(functools.partial(hub.local, shipped.FOLDER), name, arguments)
    if prefix == "local-dir" or (not is_model(name) and Path(name).is_dir()):
        folder = Path(name.removeprefix("local-dir:")).resolve()
        return _from_layout(functools.partial(hub.local, folder), f"local-dir:{folder}", arguments)

    if _looks_like_path(name):
        remedy = (
            "A hub repository is written hf-hub:OWNER/NAME or hf:OWNER/NAME, your own code"
            " package.module:factory"
        )
        raise SourceError(f"{name} is neither a file nor a directory", remedy=remedy)
    return _from_name(name, arguments)


def _from_name(name: str, arguments: Cfg) -> Built:
    """Return the network of a name in timm's registry with random values.

    Args:
        name: The name, perhaps with the tag of its weights, as in `resnet50.a1_in1k`.
        arguments: The user's arguments for `timm.create_model`.
    """
    model = create(Arch(name, arguments))
    cfg = hub.own_cfg(model) or {**_USUAL, "architecture": name}
    # The architecture is stored by its name without the tag of the weights. If the name is
    # deprecated, timm has put its current name into the record.
    arch = _untagged(cfg, arguments)
    # The user can open the network again by its name and the tag of its weights, if they have one.
    source = ".".join(filter(None, (arch.name, cfg.get("tag"))))
    preprocessing = hub.record(cfg, arch.kwargs, model)

    def pretrained() -> nn.Module:
        return _load_named(model, source, arguments, cfg)

    return Built(model, arch, source, preprocessing, pretrained)


def _untagged(cfg: Cfg, arguments: Cfg) -> Arch:
    """Return the architecture of weights, by its name without the tag of the weights.

    In timm, `NAME.TAG` may have other classes, channels or a fixed image size than `NAME` alone.
    Where they differ, they become arguments.

    Args:
        cfg: timm's record of the weights.
        arguments: The user's arguments. They replace those that the tag implies.
    """
    # Compare the record of the weights with timm's record for the name without a tag.
    name = cfg["architecture"]
    untagged = {**_USUAL, **_registered(name)}
    implied: Cfg = {}
    if cfg["num_classes"] != untagged["num_classes"]:
        implied["num_classes"] = cfg["num_classes"]
    if cfg["input_size"][0] != untagged["input_size"][0]:
        implied["in_chans"] = cfg["input_size"][0]
    # Only a network of a fixed size is built for the size of its images.
    sides = list(cfg["input_size"][1:])
    if cfg.get("fixed_input_size") and sides != list(untagged["input_size"][1:]):
        implied["img_size"] = sides
    return Arch(name, {**implied, **arguments})


def _load_named(model: nn.Module, source: str, arguments: Cfg, cfg: Cfg) -> nn.Module:
    """Return the network with the trained weights of timm's registry.

    Args:
        model: The network with random values. It is filled and returned if the weights lie on the
            hub. Otherwise timm builds another one.
        source: timm's name of the network, with the tag of its weights.
        arguments: The user's arguments.
        cfg: timm's record of the weights.
    """
    # Weights that lie on the hub are read here, unless their network must load them in its own way.
    if cfg.get("hf_hub_id") and cfg.get("custom_load") != "hf":
        repo = cfg["hf_hub_id"]
        file = cfg.get("hf_hub_filename")
        # The .safetensors file is tried first.
        filenames = (f"{file.removesuffix('.bin')}.safetensors", file) if file else _FILES
        load_into(model, read(hub.fetch(repo, filenames)), repo, cfg)
        return model

    if not cfg.get("url") and not cfg.get("hf_hub_id"):
        remedy = f"Use '{spelled('weights', 'random')}' or a weights file of your own."
        raise SourceError(f"timm has no pretrained weights for {source}", remedy=remedy)
    # Any other weights are loaded by timm itself.
    with explained(SourceError, f"cannot get the weights of {source}"), quiet():
        model = timm.create_model(source, pretrained=True, **arguments).eval()
    check_network(model, source)
    # If the weights have another number of classes, timm has made a new head.
    classes = getattr(model, "num_classes", None)
    if classes and cfg.get("num_classes") not in (None, classes):
        note_new_head("the head", classes)
    return model


def _from_layout(find: Callable[[Sequence[str]], Path], origin: str, arguments: Cfg) -> Built:
    """Return the network that a repository or directory in timm's layout holds, with random values.

    Args:
        find: Takes names of files, and returns the path of the first that the place has.
        origin: The name of the repository or directory in errors.
        arguments: The user's arguments.
    """
    arch, cfg = _configured(find(("config.json",)), origin, arguments)
    check_size(lambda: create(arch))
    model = create(arch)
    # timm has put the record of its default weights on the network. Only those entries stay that
    # hold for any weights.
    own_cfg = hub.of_architecture(model)
    model.__dict__.update(pretrained_cfg=own_cfg, default_cfg=own_cfg)

    def pretrained() -> nn.Module:
        load_into(model, read(find(_FILES)), origin, cfg)
        return model

    return Built(model, arch, origin, hub.record(cfg, arch.kwargs, model), pretrained)


def _configured(file: Path, origin: str, arguments: Cfg) -> tuple[Arch, Cfg]:
    """Return the architecture that a config.json states, and timm's record of its weights.

    The record (`pretrained_cfg`) says how images are prepared, and which layers are stem and head.

    Args:
        file: The path of config.json.
        origin: What the user typed, for messages.
        arguments: The arguments that the user gave, which replace those of the file.
    """
    architecture, model_args, stated = hub.read_config(file, origin)
    _check_known(architecture)
    name, _, _ = architecture.partition(".")

    # The file's record comes first, then timm's record of the architecture, then usual values.
    registered = _registered(name)
    of_architecture = {
        key: registered.get(key) for key in ("first_conv", "classifier", "fixed_input_size")
    }
    cfg = {**_USUAL, **of_architecture, **stated, "architecture": name}
    channels, *sides = cfg["input_size"]
    cfg["input_size"] = [model_args.get("in_chans", channels), *sides]

    # The user's arguments come first, then the file's, then those that the record implies. With the
    # record, `_untagged` returns an architecture whose arguments are the implied ones.
    kwargs = {
        **_untagged(cfg, {}).kwargs,
        "num_classes": cfg["num_classes"],
        **model_args,
        **arguments,
    }
    return Arch(name, kwargs), cfg


def identify(
    model: nn.Module, rebuild: Callable[[nn.Module], nn.Module] = lambda skeleton: skeleton
) -> Arch | None:
    """Return how to rebuild a network that timm has built, or None if that is not known.

    The arguments that timm has put on the network are tried first, then the numbers of its classes
    and channels alone.

    Args:
        model: The network, which may be converted.
        rebuild: Converts a newly built network as `model` was converted, and returns it. By default
            `model` was not converted.
    """
    name = hub.own_cfg(model).get("architecture")
    if not isinstance(name, str) or not is_model(name):
        return None
    name = name.partition(".")[0]
    for kwargs in _possible_arguments(model, name):
        arch = Arch(name, kwargs)
        if rebuilds(functools.partial(_rebuilt, arch, rebuild), model):
            return arch
    return None


def with_present_head(arch: Arch, model: nn.Module) -> Arch:
    """Return how to rebuild a network of timm with as many classes as it has now.

    Its method `reset_classifier` may have given it another head than it was built with.

    Args:
        arch: The name of the network in timm, and the arguments that it was built with.
        model: The network.
    """
    classes = getattr(model, "num_classes", None)
    built_with = arch.kwargs.get("num_classes", _registered(arch.name).get("num_classes"))
    if classes is None or classes == built_with:
        return arch
    return replace(arch, kwargs={**arch.kwargs, "num_classes": classes})


def _rebuilt(arch: Arch, rebuild: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Return a newly built network of timm after `rebuild` has converted it.

    Args:
        arch: The name of the network in timm, and its arguments.
        rebuild: Converts the network, and returns it.
    """
    return rebuild(create(arch))


def _possible_arguments(model: nn.Module, name: str) -> Iterator[Cfg]:
    """Yield arguments with which timm may have built a network, of types that JSON can hold.

    Args:
        model: The network.
        name: The name of its architecture in timm.
    """
    remembered = getattr(model, "_model_args", {})
    # A head that was replaced counts as it is now. The usual number of classes is left out, unless
    # a remembered argument must be overridden.
    current: Cfg = {}
    classes = getattr(model, "num_classes", None)
    if classes is not None and (
        classes != _registered(name).get("num_classes") or "num_classes" in remembered
    ):
        current["num_classes"] = classes
    # The first convolution tells the number of input channels.
    stem = next((layer for layer in nn.Module.modules(model) if isinstance(layer, nn.Conv2d)), None)
    if stem is not None and stem.in_channels != 3:
        current["in_chans"] = stem.in_channels

    for kwargs in ({**remembered, **current}, current):
        # An argument that is an object, such as a class, cannot be stored.
        try:
            plain = json.loads(json.dumps(kwargs))
        except (TypeError, ValueError):
            continue
        yield plain
