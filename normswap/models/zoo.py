"""Model sources: from what the user names to a network with weights, whatever kind of source it is (`kinds`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, resolve_data_config
from torch import nn

from normswap import provenance
from normswap.errors import OptionError, SourceError
from normswap.models import kinds, network_input
from normswap.models.building import Built, Wanted
from normswap.models.hub_config import Cfg, per_channel
from normswap.models.mapped_weights import same_layout, take
from normswap.models.undrawn import undrawn
from normswap.models.weight_files import SUFFIXES, hash_tensors, load_into, read_wrapped
from normswap.plan import Arch
from normswap.provenance import Provenance

__all__ = ["create", "data_config", "demand_trust", "hash_tensors", "identify", "open_source", "skeleton"]


OPTIONS = {"weights": "--weights", "arch": "--arch", "arch_args": "--arch-arg", "num_classes": "--num-classes",
           "in_chans": "--in-chans"}  # fmt: skip


class Asked(TypedDict, total=False):
    """What may be asked of a source that is built (`open_source`)."""

    weights: str
    arch: str | None
    arch_args: Mapping[str, object] | None
    num_classes: int | None
    in_chans: int | None


def create(arch: Arch) -> nn.Module:
    """The bare skeleton: eval mode, on the CPU, random values. Never touches the network or any file of weights.

    Raises:
        SourceError: the builder does not know the name (near ones are suggested), or rejects the arguments.
    """
    return kinds.by_builder(arch.builder).load().create(arch)


def skeleton(arch: Arch) -> nn.Module:
    """The same with zeros for random values, for one that is then filled, strictly."""
    return undrawn(lambda: create(arch), lambda model: model)


def identify(model: nn.Module, rebuild: Callable[[nn.Module], nn.Module] = lambda skeleton: skeleton) -> Arch | None:
    """How to rebuild a network that the user made, or None when no candidate gives the same modules.

    `rebuild` does to a skeleton what has been done to the network since (replays a plan).
    """
    found = (kind.identify(model, rebuild) for kind in kinds.KINDS if kind.identify)
    return next((arch for arch in found if arch is not None), None)


def demand_trust(what: str, kind: kinds.Kind, *, trusted: bool) -> None:
    """Raises:
    SourceError: such networks are built by code of this machine, and nobody has said that it may be imported.
    """
    if kind.foreign and not trusted:
        raise SourceError(
            f"{what} is code of this machine, which a file asks for",
            "it is imported only if you say so",
            "Add --trust-factory (in Python: trust_factory=True), or name it as MODEL yourself",
        )


def open_source(
    source: str,
    *,
    weights: str = "pretrained",
    arch: str | None = None,
    arch_args: Mapping[str, object] | None = None,
    num_classes: int | None = None,
    in_chans: int | None = None,
    trust_factory: bool = True,
    mapped: bool = False,
) -> nn.Module:
    """The network that `source` names, in eval mode on the CPU, carrying its Provenance.

    Args:
        source: a timm name, `hf-hub:org/name[@revision]`, `local-dir:DIR`, a directory with config.json and weights,
            a name of another kind (`kinds`), or a weights file (then with `arch`). A timm name wins over a directory
            of that name.
        weights: "pretrained"; "random" for the bare architecture; or a weights file.
        arch: the architecture of a weights file, named as a source is.
        arch_args: further arguments of the architecture.
        num_classes: another head than the source's; for a weights file, the head it has.
        in_chans: another number of input channels; for a weights file, the number it has.
        trust_factory: a factory may be imported; false where the name was read from a file.
        mapped: parameters may be the pages of a safetensors file, not copies of them. It takes half the time, and
            nobody may write to that file, rather than replace it, while the network lives.

    Raises:
        SourceError: the source cannot be found, read, understood or built.
        OptionError: options that do not go together.
    """
    name, file = _parts(source, weights, arch)
    kind = kinds.of(name)
    demand_trust(name, kind, trusted=trust_factory)
    trained = file is None and weights == "pretrained"
    wanted = Wanted(dict(arch_args or {}), num_classes, in_chans, trained)
    if file is not None:
        return _filled(lambda: kind.load().build(name, wanted), file, mapped=mapped)
    built = kind.load().build(name, wanted)
    if not trained:
        return _carry(built, built.model, built.source, (), None)
    model = built.pretrained()
    return _carry(built, model, built.source, built.notes, hash_tensors(model.state_dict()))


def _parts(source: str, weights: str, arch: str | None) -> tuple[str, Path | None]:
    """The name of the architecture, and the weights file, if it is to be filled from one."""
    if _is_file(source):
        return _demand_name(Path(source), weights, arch), Path(source)
    if arch is not None:
        raise OptionError(f"an architecture ({arch}) goes with a weights file, and {source} is none")
    if weights in ("pretrained", "random"):
        return source, None
    if not (weights.endswith(SUFFIXES) or Path(weights).is_file()):
        raise OptionError(f"weights '{weights}'", "must be 'pretrained' or 'random', or a weights file")
    return source, Path(weights)


def _is_file(source: str) -> bool:
    """Whether that is meant to be a weights file, there or not."""
    prefix, colon, _ = source.partition(":")
    if (colon and prefix in kinds.prefixes()) or Path(source).is_dir():
        return False
    return Path(source).is_file() or source.endswith(SUFFIXES)


def _demand_name(file: Path, weights: str, arch: str | None) -> str:
    if not file.is_file():
        raise SourceError(f"{file} is a directory" if file.is_dir() else f"{file} does not exist")
    if weights == "random":
        raise OptionError(f"random weights and the weights of {file} exclude each other")
    if weights != "pretrained":
        raise OptionError(f"{file} and {weights} are both weights", remedy="Name an architecture, and one of them")
    if arch is None:
        raise OptionError(f"{file} holds weights only", remedy="Say what it is: '--arch NAME' (named as a MODEL is).")
    return arch


def _filled(build: Callable[[], Built], file: Path, *, mapped: bool) -> nn.Module:
    """The network with the tensors of a file, strictly."""
    found = read_wrapped(file)
    with ThreadPoolExecutor(1) as beside:
        hashed = beside.submit(hash_tensors, found.state)
        built = undrawn(build, lambda built: built.model, zeros=False)
        if not (mapped and found.pages and take(built.model, found.state)):
            load_into(built.model, found.state, str(file), {})
    state = built.model.state_dict()
    sha256 = hashed.result() if same_layout(state, found.state) else hash_tensors(state)
    return _carry(built, built.model, str(file.resolve()), found.notes, sha256)


def _carry(built: Built, model: nn.Module, source: str, notes: tuple[str, ...], sha256: str | None) -> nn.Module:
    """Let the model carry its origin, and let timm see the same preprocessing."""
    known = {**(getattr(model, "pretrained_cfg", None) or {}), **built.seen}
    model.__dict__.update(pretrained_cfg=known, default_cfg=known)  # plain attributes, as timm sets them
    record = Provenance(built.arch, source, sha256, built.seen, notes=notes)
    return provenance.attach(model, record)


# timm's preprocessing where nothing says more
_GENERAL = {"interpolation": "bicubic", "crop_pct": 0.875, "crop_mode": "center"}
_GENERAL |= {"mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD}


def data_config(model: nn.Module) -> Cfg:
    """The evaluation preprocessing: input_size, mean, std, interpolation, crop_pct, crop_mode."""
    origin = provenance.of(model)
    own: object = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    cfg = (origin.pretrained_cfg if origin else None) or (dict(own) if isinstance(own, Mapping) else {})
    if not cfg.get("input_size"):
        size = network_input.size(model)
        cfg = {**_GENERAL, **cfg, "input_size": size if len(size) == 3 else (size[0], 224, 224)}
        cfg |= {key: per_channel(cfg[key], size[0]) for key in ("mean", "std")}
    return dict(resolve_data_config(pretrained_cfg=cfg))


def for_size(model: nn.Module, size: Sequence[int]) -> nn.Module:
    """The network itself, whose record says that it is made for images of this size (C, H, W).

    Raises:
        OptionError: it is built for another.
    """
    origin = provenance.of(model) or Provenance()
    record = {**(origin.pretrained_cfg or data_config(model)), "input_size": tuple(size)}
    provenance.attach(model, replace(origin, pretrained_cfg=record))
    built = network_input.size(model)
    if tuple(built) != tuple(size):
        text, own = (",".join(map(str, one)) for one in (size, built))
        raise OptionError(f"--input-size {text}", f"the network is built for {own}", "See `--arch-arg img_size=...`")
    return model
