"""transformers' networks: `hf:owner/name[@revision]` from the Hugging Face hub, or `hf:DIR`.

The class is the one that the config names, else AutoModel's; code that a repository brings is never
run. An architecture is the class and its config as JSON, so that the network can be built again
offline.
"""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from normswap.errors import SourceError, explained, near, quiet
from normswap.layers.seeding import seeded
from normswap.models import hub
from normswap.models.building import BuildRequest, Built, Cfg, make, rebuilds
from normswap.models.weight_files import check_finite, listed
from normswap.plan import Arch

_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_NOT_RUN = "Code that a repository brings is not run"


def build(name: str, request: BuildRequest) -> Built:
    """Return the bare network of `hf:owner/name`, `hf:DIR`, or `hf:CLASS` with arguments; or raises
    SourceError.
    """
    place = name.partition(":")[2]
    source = name
    arguments = request.arguments("num_labels", "num_channels")
    stated = arguments
    processor = dict[str, Any]()
    arch = Arch(place, arguments, "transformers")
    if Path(place).is_dir() or not hasattr(transformers, place):
        if Path(place).is_dir():
            source = f"hf:{Path(place).resolve()}"
        stated = hub.read_json(_fetch(place, "config.json"), name)
        arch = _architecture(name, stated, arguments)
        with contextlib.suppress(SourceError):
            processor = hub.read_json(_fetch(place, "preprocessor_config.json"), name)
    model = create(arch)
    fresh = _config(Arch(name, hub.bare(stated))).num_labels != model.config.num_labels
    preprocessing = hub.of_image_processor(processor, model)
    return Built(
        model, arch, source, preprocessing, lambda: _trained(place, arch, name, fresh=fresh)
    )


def create(arch: Arch) -> transformers.PreTrainedModel:
    """Build the bare network; see `kinds`."""
    config = _config(arch)
    kind = getattr(transformers, arch.name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise SourceError(f"transformers has no network '{arch.name}'", remedy=_NOT_RUN)
    return make(f"hf:{arch.name}", lambda: kind(config), {}).eval()


def identify(model: nn.Module, rebuild: Callable[[nn.Module], nn.Module]) -> Arch | None:
    """Return the architecture of a network that somebody built with transformers, or None."""
    kind = type(model)
    if kind is not getattr(transformers, kind.__name__, None) or not isinstance(
        model, transformers.PreTrainedModel
    ):
        return None
    try:
        arch = Arch(
            kind.__name__, hub.bare(json.loads(model.config.to_json_string())), "transformers"
        )
    except (TypeError, ValueError):
        return None
    if not rebuilds(lambda: rebuild(create(arch)), model):
        return None
    return arch


def _fetch(place: str, *names: str) -> Path:
    if Path(place).is_dir():
        return hub.local(Path(place), names)
    if place.count("/") != 1:
        raise SourceError(
            f"hf:{place} is no directory", "nor is it owner/name, a repository of the hub"
        )
    return hub.fetch(place, names)


def _architecture(name: str, stated: Cfg, arguments: Cfg) -> Arch:
    config = _config(Arch(name, hub.bare(stated)))
    strange = next(
        (key for key in arguments if key not in stated and not hasattr(config, key)), None
    )
    if strange is not None:
        raise SourceError(
            f"{type(config).__name__} has no argument {strange}", remedy=near(strange, stated)
        )
    kwargs = hub.bare(stated) | arguments
    # The names of the config's classes are those of another number of classes.
    for key in ("id2label", "label2id") if "num_labels" in arguments else ():
        kwargs.pop(key, None)
    named = stated.get("architectures")
    if isinstance(named, list) and named and hasattr(transformers, str(named[0])):
        return Arch(named[0], kwargs, "transformers")
    model = make(name, transformers.AutoModel.from_config, {"config": config})
    return Arch(type(model).__name__, kwargs, "transformers")


def _config(arch: Arch) -> transformers.PretrainedConfig:
    body = dict(arch.kwargs)
    kind = body.pop("model_type", None)
    configs = transformers.CONFIG_MAPPING
    if not isinstance(kind, str) or kind not in configs:
        remedy = near(str(kind), configs, _NOT_RUN)
        raise SourceError(f"{arch.name}: transformers has no model_type {kind!r}", remedy=remedy)
    return make(f"hf:{arch.name}", configs[kind].from_dict, {"config_dict": body})


def _trained(place: str, arch: Arch, name: str, *, fresh: bool) -> nn.Module:
    file = _fetch(place, *_FILES)
    if file.name.endswith(".index.json"):
        for shard in sorted(set(hub.read_json(file, name).get("weight_map", {}).values())):
            _fetch(place, shard)
    with explained(SourceError, f"{name} does not load", "Is the file whole?"), quiet(), seeded():
        model, info = getattr(transformers, arch.name).from_pretrained(
            file.parent,
            config=_config(arch),
            local_files_only=True,
            use_safetensors="safetensors" in file.name,
            weights_only=True,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    other_shapes = [key[0] for key in info["mismatched_keys"] if not fresh]
    wrong = {
        "missing": info["missing_keys"],
        "unexpected": info["unexpected_keys"],
        "of another shape": other_shapes,
    }
    if any(wrong.values()):
        raise SourceError(f"the weights of {name} do not fit {arch.name}", listed(wrong))
    check_finite(model.state_dict(), name)
    return model.eval()
