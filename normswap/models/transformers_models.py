"""transformers' networks: `hf:owner/name[@revision]` from the Hugging Face hub, or `hf:DIR`.

The class is the one that the config names, else what AutoModel makes of it; code that a repository brings is never run.
The architecture is the class and its config, as JSON has it, so that the network can be built again offline.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from normswap.errors import SourceError, first_line, spelled
from normswap.layers.seeding import seeded
from normswap.models import hub
from normswap.models.building import BuildRequest, Built, Cfg, make, near, rebuilds
from normswap.models.image_processors import preprocessing
from normswap.models.weight_files import check_finite, quiet
from normswap.models.weights_fit import some
from normswap.plan import Arch

_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_PROCESSOR = "preprocessor_config.json"
_OF_A_FILE = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "auto_map")
_CLASSIFIES = "ForImageClassification"


def build(name: str, wanted: BuildRequest) -> Built:
    """Return the bare network of `hf:owner/name`, `hf:DIR`, or `hf:CLASS` with its config as arguments.

    Raises:
        SourceError: it cannot be found, read, understood or built.
    """
    place = name.partition(":")[2]
    arguments = wanted.named("num_labels", "num_channels")
    if place.isidentifier() and hasattr(transformers, place) and not Path(place).is_dir():
        arch = Arch(place, arguments, "transformers")
        bare = _made(arch)
        return Built(bare, arch, name, _seen(bare, None), lambda: _refused(name))
    fetch, source = _opened(place)
    stated = _read(fetch("config.json"), name)
    _check_arguments(stated, arguments)
    arch = _architecture(name, {**_bare(stated), **_labels(arguments)}, stated.get("architectures"))
    model = _made(arch)
    whole = _config(Arch(arch.name, _bare(stated), "transformers"))
    fresh = whole.num_labels != model.config.num_labels

    def pretrained() -> nn.Module:
        return _trained(_weights(fetch, name), arch, name, fresh=fresh)

    return Built(model, arch, source, _seen(model, _processor(fetch)), pretrained)


def create(arch: Arch) -> nn.Module:
    """Build the bare network; see `kinds`."""
    return _made(arch)


def _made(arch: Arch) -> transformers.PreTrainedModel:
    config, kind = _config(arch), _class(arch.name)
    return make(f"hf:{arch.name}", lambda **_: kind(config), {}).eval()


def identify(model: nn.Module, rebuild: Callable[[nn.Module], nn.Module]) -> Arch | None:
    """Return the architecture of a network that somebody built with transformers, or None."""
    kind = type(model)
    if kind is not getattr(transformers, kind.__name__, None) or not isinstance(model, transformers.PreTrainedModel):
        return None
    try:
        arch = Arch(kind.__name__, _bare(json.loads(model.config.to_json_string())), "transformers")
    except (TypeError, ValueError):  # a value that JSON does not have
        return None
    return arch if rebuilds(lambda: rebuild(create(arch)), model) else None


Fetch = Callable[..., Path]
"""From names of files, in order of preference, to the first that is there. Raises SourceError: none is."""


def _opened(place: str) -> tuple[Fetch, str]:
    """Return the files of a directory or hub repository, and what to name to open it again."""
    folder = Path(place)
    if folder.is_dir():

        def local(*names: str) -> Path:
            file = next((folder / name for name in names if (folder / name).is_file()), None)
            if file is None:
                raise SourceError(f"{folder} has no {' or '.join(names)}", remedy="Is it written by save_pretrained?")
            return file

        return local, f"hf:{folder.resolve()}"
    if place.count("/") != 1 or place.startswith(("/", ".")):
        raise SourceError(f"hf:{place} is no directory", "nor is it owner/name, a repository of the Hugging Face hub")
    remedy = (
        "Ways on: a directory on this disk, written by save_pretrained, as 'hf:DIR'; or a hub that answers (set "
        "HF_ENDPOINT to a mirror, or fill the cache in HF_HOME while online)."
    )
    return lambda *names: hub.fetch(place, names, remedy=remedy), f"hf:{place}"


def _read(file: Path, name: str) -> Cfg:
    try:
        stated = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(f"{name}: {file.name} cannot be read", first_line(error)) from None
    if not isinstance(stated, dict):
        raise SourceError(f"{name}: {file.name} holds no object")
    return stated


def _processor(fetch: Fetch) -> Cfg | None:
    try:
        return _read(fetch(_PROCESSOR), _PROCESSOR)
    except SourceError:  # not every model has one
        return None


def _bare(config: Cfg) -> Cfg:
    """Return a config without what it says of a file, and without weights that parts of it would fetch."""
    kept = {key: _bare(value) if isinstance(value, dict) else value for key, value in config.items()
            if key not in _OF_A_FILE}  # fmt: skip
    return {**kept, **({"use_pretrained_backbone": False} if "use_pretrained_backbone" in kept else {})}


def _labels(arguments: Cfg) -> Cfg:
    """Another number of labels is names for them, as a config has it."""
    count = arguments.get("num_labels")
    if not isinstance(count, int):
        return arguments
    names = {str(label): f"LABEL_{label}" for label in range(count)}
    rest = {key: value for key, value in arguments.items() if key != "num_labels"}
    return {**rest, "id2label": names, "label2id": {name: int(label) for label, name in names.items()}}


def _architecture(name: str, config: Cfg, named: object) -> Arch:
    """Return the class that the config names, else the one that AutoModel takes."""
    classes = [one for one in named if isinstance(one, str)] if isinstance(named, list) else []
    if classes and hasattr(transformers, classes[0]):
        return Arch(classes[0], config, "transformers")
    made = _config(Arch(name, config, "transformers"))
    mapping = transformers.AutoModel._model_mapping
    if type(made) not in mapping:
        raise SourceError(f"{name}: AutoModel has no class for {type(made).__name__}")
    entry = mapping[type(made)]
    kind: Any = entry[0] if isinstance(entry, tuple) else entry
    return Arch(kind.__name__, config, "transformers")


def _config(arch: Arch) -> transformers.PretrainedConfig:
    """Make the config of an architecture.

    Raises:
        SourceError: there is no such config, or it cannot be made with that.
    """
    body = dict(arch.kwargs)
    kind = body.pop("model_type", None)
    known = transformers.CONFIG_MAPPING
    if kind is None:
        raise SourceError(f"hf:{arch.name}: its config names no model_type", remedy="Is it a model of transformers?")
    if not isinstance(kind, str) or kind not in known:
        remedy = near(str(kind), list(known), "Code that a repository brings is not run")
        raise SourceError(f"hf:{arch.name}: transformers has no model_type {kind!r}", remedy=remedy)
    return make(f"hf:{arch.name}", known[kind].from_dict, {"config_dict": body})


def _check_arguments(stated: Cfg, arguments: Cfg) -> None:
    """Check the user's arguments.

    Raises:
        SourceError: there is one that such a config does not have.
    """
    name, known = stated.get("model_type"), transformers.CONFIG_MAPPING
    plain = known[name]() if isinstance(name, str) and name in known else None  # if not, building will say so
    strange = [key for key in arguments if plain is not None and key not in stated and not hasattr(plain, key)]
    if strange:
        raise SourceError(f"{type(plain).__name__} has no argument {some(strange)}", remedy=near(strange[0], stated))


def _class(name: str) -> type[transformers.PreTrainedModel]:
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise SourceError(f"transformers has no network '{name}'", remedy="Code that a repository brings is not run")
    return kind


def _weights(fetch: Fetch, name: str) -> Path:
    """Return the folder that has the weights, after all their parts have been fetched."""
    file = fetch(*_FILES)
    if file.name.endswith(".index.json"):
        parts = _read(file, name).get("weight_map")
        for part in sorted(set(parts.values())) if isinstance(parts, dict) else ():
            fetch(str(part))
    return file.parent


def _trained(folder: Path, arch: Arch, name: str, *, fresh: bool) -> nn.Module:
    """Return the network with the weights in the folder: all of them, and none of its own, but for another head.

    Raises:
        SourceError: they do not fit, are broken, or cannot be read without running them.
    """
    safe = any(folder.glob("*.safetensors"))
    try:
        with quiet(), seeded(), _no_bars():
            loaded: Any = _class(arch.name).from_pretrained(
                folder, config=_config(arch), local_files_only=True, use_safetensors=safe, weights_only=True,
                trust_remote_code=False, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True,
            )  # fmt: skip
    except Exception as error:  # its own, and those of every reader below
        raise SourceError(f"{name} does not load", first_line(error), "Is the file whole?") from None
    model, info = loaded
    wrong = {"missing": info["missing_keys"], "unexpected": info["unexpected_keys"],
             "of another shape": () if fresh else [key[0] for key in info["mismatched_keys"]]}  # fmt: skip
    misfits = [f"{len(keys)} {what}: {some(sorted(keys))}" for what, keys in wrong.items() if keys]
    if misfits:
        raise SourceError(f"the weights of {name} do not fit {arch.name}", "; ".join(misfits))
    check_finite(model.state_dict(), name)
    trained: nn.Module = model.eval()
    return trained


@contextmanager
def _no_bars() -> Iterator[None]:
    """Let transformers show no progress bars, for a while."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()


def _refused(name: str) -> nn.Module:
    raise SourceError(
        f"{name} is an architecture without weights", remedy=f"Use '{spelled('weights', 'random')}', or a weights file."
    )


def _seen(model: transformers.PreTrainedModel, processor: Cfg | None) -> Cfg:
    """Return the preprocessing, and for a classifier its classes."""
    config = model.config
    seen = preprocessing(processor or {}, getattr(config, "num_channels", 3), getattr(config, "image_size", None))
    if type(model).__name__.endswith(_CLASSIFIES):
        seen |= {"num_classes": config.num_labels, **_names(config)}
    return seen


def _names(config: Any) -> Cfg:
    names = [str(config.id2label[label]) for label in sorted(config.id2label)]
    meaningful = len(set(names)) == len(names) and not all(name.startswith("LABEL_") for name in names)
    return {"label_names": names} if meaningful else {}
