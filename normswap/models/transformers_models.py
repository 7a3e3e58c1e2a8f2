"""transformers' networks: `hf:owner/name[@revision]` from the Hugging Face hub, or `hf:DIR`.

The class is the one that the config names, else AutoModel's; code that a repository brings is never
run. An architecture is the class and its config as JSON, so that the network can be built again
offline.
"""

import copy
import functools
import importlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from normswap import provenance
from normswap.errors import OptionError, SourceError, explained, near, quiet
from normswap.models import hub, records
from normswap.models.building import (
    BuildRequest,
    Built,
    Cfg,
    check_arguments,
    check_size,
    make,
    rebuilds,
)
from normswap.models.weight_files import check_network, listed, note_new_head
from normswap.plan import Arch

_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_ADAPTER = "adapter_config.json"
_NOT_RUN = "Code that a repository brings is not run"


def build(name: str, request: BuildRequest) -> Built:
    """Return a network of transformers with random values, and how to load its trained weights.

    Args:
        name: `hf:owner/name`, `hf:DIR`, or `hf:CLASS` for a class of transformers.
        request: What the user asks for beside the name.

    Raises:
        SourceError: The network cannot be found, read or built.
    """
    # The part behind the colon is a directory, the name of a class, or a repository.
    place = name.partition(":")[2]
    is_folder = Path(place).is_dir()
    # These are the names in transformers for the numbers of classes and of input channels.
    arguments = request.arguments("num_labels", "num_channels")
    if not is_folder and hasattr(transformers, place):
        return _from_class(place, name, arguments)

    # Build the network that config.json states.
    source = f"hf:{Path(place).resolve()}" if is_folder else name
    stated = hub.read_json(_fetch(place, "config.json"), name)
    _check_stated(stated, name)
    arch = _architecture(name, stated, arguments)
    check_size(lambda: create(arch))
    model = create(arch)

    # Read how images are prepared for it.
    processor: Cfg = {}
    file = _optional(place, "preprocessor_config.json")
    if file is not None:
        processor = hub.read_json(file, name)
    preprocessing = hub.of_image_processor(processor, model, name)
    # If the user asks for another number of classes, the head is new and stays random.
    has_new_head = _config(hub.bare(stated), name).num_labels != model.config.num_labels

    def pretrained() -> nn.Module:
        return _trained(place, arch, name, has_new_head=has_new_head)

    return Built(model, arch, source, preprocessing, pretrained)


def _from_class(class_name: str, name: str, arguments: Cfg) -> Built:
    """Return a network of a class of transformers with random values.

    Args:
        class_name: The name of the class.
        name: What the user typed, such as `hf:CLASS`, for messages.
        arguments: The entries of the config with which the class is built.
    """
    arch = Arch(class_name, arguments, "transformers")
    _check_stated(arguments, name)
    model = create(arch)

    def pretrained() -> nn.Module:
        return _trained(class_name, arch, name, has_new_head=False)

    return Built(model, arch, name, hub.of_image_processor({}, model, name), pretrained)


def _optional(place: str, filename: str) -> Path | None:
    """Return the path of a file that a repository or directory may have, or None if it has none.

    Args:
        place: The directory, or the repository of the hub.
        filename: The name of the file.
    """
    try:
        return _fetch(place, filename)
    except SourceError:
        return None


def _check_stated(stated: Cfg, origin: str) -> None:
    """Raise SourceError if a config has a value of a type that normswap cannot read.

    Only a config that names its type of model is checked. `_config` refuses the others, and lists
    the types that there are.

    Args:
        stated: The config.
        origin: The name of the config, for the message.
    """
    if isinstance(stated.get("model_type"), str):
        records.checked(records.TransformersConfig, stated, f"{origin}: config.json")


def create(arch: Arch) -> transformers.PreTrainedModel:
    """Return a network of transformers with random values, on the CPU and in eval mode.

    Args:
        arch: The name of the network's class, and the entries of its config.
    """
    check_arguments(arch)
    _check_stated(arch.kwargs, f"hf:{arch.name}")
    config = _config(arch.kwargs, f"hf:{arch.name}")
    network_class = getattr(transformers, arch.name, None)
    if not (
        isinstance(network_class, type) and issubclass(network_class, transformers.PreTrainedModel)
    ):
        raise SourceError(f"transformers has no network '{arch.name}'", remedy=_NOT_RUN)
    return make(f"hf:{arch.name}", lambda: network_class(config), {}).eval()


def identify(model: nn.Module, rebuild: Callable[[nn.Module], nn.Module]) -> Arch | None:
    """Return how to rebuild a network that was built with transformers, or None if not known.

    Args:
        model: The network, which may be converted.
        rebuild: Converts a newly built network as `model` was converted, and returns it.
    """
    kind = type(model)
    if kind is not getattr(transformers, kind.__name__, None) or not isinstance(
        model, transformers.PreTrainedModel
    ):
        return None

    # A config may hold values that cannot be written as JSON. Then it cannot be stored.
    try:
        arch = Arch(
            kind.__name__, hub.bare(json.loads(model.config.to_json_string())), "transformers"
        )
    except (TypeError, ValueError):
        return None

    # The network is built to see whether it is the same.
    if not rebuilds(lambda: rebuild(create(arch)), model):
        return None
    return arch


def mark_converted(model: object) -> None:
    """Let `save_pretrained` of a converted network of transformers write the conversion, too.

    The config gets an entry `normswap` with the conversion's schemes. Networks of other libraries
    are left alone.
    """
    if not isinstance(model, transformers.PreTrainedModel):
        return
    plan = provenance.of(model).plan
    schemes = [step.scheme for step in plan.steps]
    model.config.normswap = {"schemes": schemes, "plan": plan.digest}
    model.__dict__["save_pretrained"] = functools.partial(save_converted, model)


def save_converted(
    model: transformers.PreTrainedModel, save_directory: str | os.PathLike[str], **options: Any
) -> None:
    """Write a converted network as transformers does, so that `normswap.load` opens it.

    Args:
        model: The network, in which this function has the place of the method `save_pretrained`.
        save_directory: The directory to write.
        options: Options of transformers' own `save_pretrained`.

    Raises:
        OptionError: The network is to be sent to the hub, which only `normswap.push` does.
        SourceError: Weights are NaN, infinite, or missing.
    """
    if options.get("push_to_hub"):
        raise OptionError(
            "push_to_hub=True of a converted network",
            "transformers would send the network without its plan",
            "Save it, then normswap.push(DIR, REPO)",
        )

    state = options.pop("state_dict", None)
    # transformers empties the state dict that it is given, so it gets a copy.
    copied_state = None if state is None else dict(state)
    type(model).save_pretrained(model, save_directory, state_dict=copied_state, **options)

    folder = Path(save_directory)
    # Other processes of distributed training write nothing.
    if options.get("is_main_process", True) and (folder / "config.json").is_file():
        # `normswap.storage` imports this package, so it is imported only when it is needed.
        storage = importlib.import_module("normswap.storage.pretrained")
        storage.add_conversion(model, folder, state)


def _fetch(place: str, *names: str) -> Path:
    """Return the path of the first of several files that a directory or repository has.

    A file of a repository is downloaded.

    Args:
        place: The directory, or the repository of the hub as owner/name.
        names: The names of the files, the preferred one first.
    """
    if Path(place).is_dir():
        return hub.local(Path(place), names)
    if place.count("/") != 1:
        raise SourceError(
            f"hf:{place} is no directory", "nor is it owner/name, a repository of the hub"
        )
    return hub.fetch(place, names)


def _architecture(name: str, stated: Cfg, arguments: Cfg) -> Arch:
    """Return the class and the config of a network, in which the user's arguments go first.

    Args:
        name: What the user typed, such as `hf:owner/name`, for messages.
        stated: The content of the network's config.json.
        arguments: The user's arguments, which replace entries of the config.
    """
    kwargs = {**hub.bare(stated), **arguments}
    check_arguments(Arch(name, kwargs, "transformers"))

    # The class of the config must know every argument.
    config = _config(hub.bare(stated), name)
    unknown = next(
        (key for key in arguments if key not in stated and not hasattr(config, key)), None
    )
    if unknown is not None:
        raise SourceError(
            f"{type(config).__name__} has no argument {unknown}", remedy=near(unknown, stated)
        )

    # The names of classes are dropped if another number of classes is asked for.
    if "num_labels" in arguments:
        for key in ("id2label", "label2id"):
            kwargs.pop(key, None)

    class_names = stated.get("architectures")
    if isinstance(class_names, list) and class_names and hasattr(transformers, str(class_names[0])):
        return Arch(class_names[0], kwargs, "transformers")
    # The config names no class of transformers, so AutoModel chooses one by the type of model.
    if type(config) not in transformers.MODEL_MAPPING:
        raise SourceError(
            f"{name}: config.json names no class of transformers in 'architectures'",
            f"AutoModel has none for {config.model_type}",
            _NOT_RUN,
        )
    model = make(name, transformers.AutoModel.from_config, {"config": config})
    return Arch(type(model).__name__, kwargs, "transformers")


def _config(stated: Cfg, origin: str) -> transformers.PretrainedConfig:
    """Return transformers' config object for an architecture.

    Args:
        stated: The entries of its config.json.
        origin: The name of the network, such as `hf:owner/name`, for messages.

    Raises:
        SourceError: There is no such model_type in transformers.
    """
    # A config may change the objects that it is given.
    body = copy.deepcopy(dict(stated))
    kind = body.pop("model_type", None)
    configs = transformers.CONFIG_MAPPING
    if not isinstance(kind, str) or kind not in configs:
        remedy = near(str(kind), configs, _NOT_RUN)
        raise SourceError(f"{origin}: transformers has no model_type {kind!r}", remedy=remedy)
    return make(origin, configs[kind].from_dict, {"config_dict": body})


def _trained(place: str, arch: Arch, name: str, *, has_new_head: bool) -> nn.Module:
    """Return a network of transformers with its trained weights.

    Args:
        place: The directory, or the repository of the hub, that holds the weights.
        arch: The architecture.
        name: What the user typed, such as `hf:owner/name`, for messages.
        has_new_head: Whether the head has another number of classes than the weights, and stays
            random.

    Raises:
        SourceError: The weights are missing or damaged, or belong to another network.
    """
    file = _fetch(place, *_FILES)
    if (file.parent / _ADAPTER).exists():
        # transformers would open the network that the adapter belongs to.
        raise SourceError(f"{name} holds {_ADAPTER}", "normswap takes a network, not an adapter")
    # If the weights are in several files, an index lists them.
    if file.name.endswith(".index.json"):
        index = records.checked(
            records.ShardIndex, hub.read_json(file, name), f"{name}: {file.name}"
        )
        for shard in sorted(set(index.weight_map.values())):
            _fetch(place, shard)

    # Everything is on the disk, so the hub is not asked.
    unreadable = explained(SourceError, f"{name} does not load", "Is the file whole?")
    with unreadable, quiet(), hub.offline():
        model, info = getattr(transformers, arch.name).from_pretrained(
            file.parent,
            config=_config(arch.kwargs, name),
            local_files_only=True,
            use_safetensors="safetensors" in file.name,
            weights_only=True,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )

    # transformers reports each tensor that did not fit, with its shapes in the file and in the
    # network. Those of a new head may have other shapes.
    classes = model.config.num_labels if has_new_head else None
    other_shapes = [
        key
        for key, in_file, in_network in info["mismatched_keys"]
        if not _differs_in_classes(in_file, in_network, classes)
    ]
    misfits = {
        "missing": info["missing_keys"],
        "unexpected": info["unexpected_keys"],
        "of another shape": other_shapes,
    }
    if any(misfits.values()):
        raise SourceError(f"the weights of {name} do not fit {arch.name}", listed(misfits))
    check_network(model, name)
    if has_new_head:
        note_new_head("the head", model.config.num_labels)
    return model.eval()


def _differs_in_classes(
    in_file: Sequence[int], in_network: Sequence[int], classes: int | None
) -> bool:
    """Whether a tensor is one of a new head: it differs from the file's in the classes alone.

    Args:
        in_file: Its shape in the file.
        in_network: Its shape in the network, whose first side is the classes.
        classes: The number of classes of the new head. None if there is no new head.
    """
    # A detector's head has one class more, for nothing.
    sizes = () if classes is None else ((classes,), (classes + 1,))
    return tuple(in_network[:1]) in sizes and tuple(in_file[1:]) == tuple(in_network[1:])
