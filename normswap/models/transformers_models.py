"""transformers' networks: `hf:owner/name[@revision]` from the Hugging Face hub, or `hf:DIR`.

The class is the one that the config names, else what AutoModel makes of it; code that a repository brings is never run.
The architecture is the class and its config, as JSON has it, so that the network can be built again offline.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from normswap.errors import SourceError, first_line
from normswap.models import hub
from normswap.models.building import Built, Cfg, Wanted, make, near, rebuilds, seeded
from normswap.models.image_processors import preprocessing
from normswap.models.weight_files import check_finite, quiet, some
from normswap.plan import Arch

_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_PROCESSOR = "preprocessor_config.json"
_OF_A_FILE = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "auto_map")
_CLASSIFIES = "ForImageClassification"


def build(name: str, wanted: Wanted) -> Built:
    """The bare network of `hf:owner/name`, `hf:DIR`, or `hf:CLASS` with its config as arguments.

    Raises:
        SourceError: it cannot be found, read, understood or built.
    """
    place = name.partition(":")[2]
    given = wanted.named("num_labels", "num_channels")
    if place.isidentifier() and hasattr(transformers, place) and not Path(place).is_dir():
        arch = Arch(place, given, "transformers")
        bare = create(arch)
        return Built(bare, arch, name, _seen(bare, None), lambda: _refused(name))
    fetch, source = _opened(place)
    stated = _read(fetch("config.json"), name)
    _demand_arguments(stated, given)
    arch = _architecture(name, {**_bare(stated), **_labels(given)}, stated.get("architectures"))
    model: Any = create(arch)
    whole = _config(Arch(arch.name, _bare(stated), "transformers"))
    fresh = whole.num_labels != model.config.num_labels

    def pretrained() -> nn.Module:
        return _trained(_weights(fetch, name), arch, name, fresh=fresh)

    return Built(model, arch, source, _seen(model, _processor(fetch)), pretrained)


def create(arch: Arch) -> nn.Module:
    """See `kinds`."""
    config = _config(arch)
    kind = _class(arch.name)
    model: nn.Module = make(f"hf:{arch.name}", lambda **_: kind(config), {})
    return model.eval()


def identify(model: nn.Module, rebuild: Callable[[nn.Module], nn.Module]) -> Arch | None:
    """The architecture of a network that somebody built with transformers, or None."""
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
    """The files of a directory or hub repository, and what to name to open it again."""
    folder = Path(place)
    if folder.is_dir():

        def local(*names: str) -> Path:
            found = next((folder / name for name in names if (folder / name).is_file()), None)
            if found is None:
                raise SourceError(f"{folder} has no {' or '.join(names)}", remedy="Is it written by save_pretrained?")
            return found

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
    """A config without what it says of a file, and without weights that parts of it would fetch."""
    kept = {key: _bare(value) if isinstance(value, dict) else value for key, value in config.items()
            if key not in _OF_A_FILE}  # fmt: skip
    return {**kept, **({"use_pretrained_backbone": False} if "use_pretrained_backbone" in kept else {})}


def _labels(given: Cfg) -> Cfg:
    """Another number of labels is names for them, as a config has it."""
    count = given.get("num_labels")
    if not isinstance(count, int):
        return given
    names = {str(label): f"LABEL_{label}" for label in range(count)}
    rest = {key: value for key, value in given.items() if key != "num_labels"}
    return {**rest, "id2label": names, "label2id": {name: int(label) for label, name in names.items()}}


def _architecture(name: str, config: Cfg, named: object) -> Arch:
    """The class that the config names, else the one that AutoModel takes."""
    classes = [one for one in named if isinstance(one, str)] if isinstance(named, list) else []
    if classes and hasattr(transformers, classes[0]):
        return Arch(classes[0], config, "transformers")
    made = _config(Arch(name, config, "transformers"))
    mapping = transformers.AutoModel._model_mapping
    if type(made) not in mapping:
        raise SourceError(f"{name}: AutoModel has no class for {type(made).__name__}")
    found = mapping[type(made)]
    kind: Any = found[0] if isinstance(found, tuple) else found
    return Arch(kind.__name__, config, "transformers")


def _config(arch: Arch) -> transformers.PretrainedConfig:
    """Raises:
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


def _demand_arguments(stated: Cfg, given: Cfg) -> None:
    """Raises:
    SourceError: the user gives an argument that such a config does not have.
    """
    name, known = stated.get("model_type"), transformers.CONFIG_MAPPING
    plain = known[name]() if isinstance(name, str) and name in known else None  # if not, building will say so
    strange = [key for key in given if plain is not None and key not in stated and not hasattr(plain, key)]
    if strange:
        raise SourceError(f"{type(plain).__name__} has no argument {some(strange)}", remedy=near(strange[0], stated))


def _class(name: str) -> Any:
    found = getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise SourceError(f"transformers has no network '{name}'", remedy="Code that a repository brings is not run")
    return found


def _weights(fetch: Fetch, name: str) -> Path:
    """The folder that has the weights, after all their parts have been fetched."""
    file = fetch(*_FILES)
    if file.name.endswith(".index.json"):
        parts = _read(file, name).get("weight_map")
        for part in sorted(set(parts.values())) if isinstance(parts, dict) else ():
            fetch(str(part))
    return file.parent


def _trained(folder: Path, arch: Arch, name: str, *, fresh: bool) -> nn.Module:
    """The network with the weights in the folder: all of them, and none of its own, but for another head.

    Raises:
        SourceError: they do not fit, are broken, or cannot be read without running them.
    """
    safe = any(folder.glob("*.safetensors"))
    try:
        with quiet(), seeded(), _no_bars():
            model, info = _class(arch.name).from_pretrained(
                folder, config=_config(arch), local_files_only=True, use_safetensors=safe, weights_only=True,
                trust_remote_code=False, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True,
            )  # fmt: skip
    except Exception as error:  # its own, and those of every reader below
        raise SourceError(f"{name} does not load", first_line(error), "Is the file whole?") from None
    wrong = {"missing": info["missing_keys"], "unexpected": info["unexpected_keys"],
             "of another shape": () if fresh else [key[0] for key in info["mismatched_keys"]]}  # fmt: skip
    said = [f"{len(keys)} {what}: {some(sorted(keys))}" for what, keys in wrong.items() if keys]
    if said:
        raise SourceError(f"the weights of {name} do not fit {arch.name}", "; ".join(said))
    check_finite(model.state_dict(), name)
    trained: nn.Module = model.eval()
    return trained


class _no_bars:
    """transformers without progress bars, for a while."""

    def __enter__(self) -> None:
        self.before = transformers.utils.logging.is_progress_bar_enabled()
        transformers.utils.logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        if self.before:
            transformers.utils.logging.enable_progress_bar()


def _refused(name: str) -> nn.Module:
    raise SourceError(f"{name} is an architecture without weights", remedy="Use '--weights random', or a weights file.")


def _seen(model: Any, processor: Cfg | None) -> Cfg:
    """The preprocessing, and for a classifier its classes."""
    config = model.config
    seen = preprocessing(processor or {}, getattr(config, "num_channels", 3), getattr(config, "image_size", None))
    if type(model).__name__.endswith(_CLASSIFIES):
        seen |= {"num_classes": config.num_labels, **_names(config)}
    return seen


def _names(config: Any) -> Cfg:
    names = [str(config.id2label[label]) for label in sorted(config.id2label)]
    told = len(set(names)) == len(names) and not all(name.startswith("LABEL_") for name in names)
    return {"label_names": names} if told else {}
