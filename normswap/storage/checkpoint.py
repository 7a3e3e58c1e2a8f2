"""Save and load: a directory of weights, plan and measured proof. Nothing is pickled.

`model.safetensors` has the tensors, and in its header the schema version, source and hash,
architecture, plan, report and library versions; `config.json` is timm's hub layout;
`norms.safetensors` has the source's norm tensors; `README.md` is a model card. The directory is
written beside its place and renamed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import timm
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from normswap import provenance
from normswap.copying import dotted
from normswap.errors import OutputError, PlanError, SourceError, explained, first_line
from normswap.models import hub, kinds, network_input, weight_files, zoo
from normswap.plan import Arch, Plan
from normswap.storage import atomic_write, model_card, network_folder
from normswap.storage.network_folder import CARD, CONFIG, NORMS, WEIGHTS
from normswap.surgery import applying, unfolding
from normswap.surgery.carrying_out import Conversion
from normswap.surgery.report import Report
from normswap.version import __version__

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Of the record in the header of the weights.
VERSION = 1


class Header(BaseModel):
    """The record as it is read; the report is that of the conversion.

    Args:
        hashes: of all tensors of a file, by file; tensors: of each by itself, by file and name
            (none in older ones).
    """

    model_config = ConfigDict(strict=True)
    version: int
    arch: Arch | None
    plan: dict[str, Any]
    source: str
    sha256: str | None
    pretrained_cfg: dict[str, Any]
    report: Report | None
    hashes: dict[str, str]
    tensors: dict[str, dict[str, str]] = {}
    versions: dict[str, str]


def open_model(
    source: str,
    *,
    input_size: Sequence[int] | None = None,
    inputs: Mapping[str, Sequence[object]] | None = None,
    trust_factory: bool = False,
    named: bool = True,
    **asked: Unpack[zoo.Asked],
) -> nn.Module:
    """Open any MODEL: a source of `zoo.open_source`, or what `save` wrote, on the hub, too, or its
    weights file alone.

    Returns the network in eval mode, on the CPU, carrying its provenance.

    Args:
        input_size: (C, H, W) of its images, where it states another or none (`zoo.for_size`);
            inputs: what it takes, by name, where that is no image (`zoo.for_inputs`).
        trust_factory: as in `load`; named: whether the user named the MODEL, so that its factory
            may be imported.
        asked: weights, arch, arch_args, num_classes, in_chans, as in `zoo.open_source`.

    Raises SourceError: it cannot be found, read or understood.
    """
    folder = Path(source.removeprefix("local-dir:"))
    network_folder.check_not_moved_aside(folder)
    if folder.exists() and is_checkpoint(folder):
        zoo.check_unasked(str(folder), asked)
        model = load(folder, trust_factory=trust_factory)
    elif (hub_copy := _from_hub(source)) is not None:
        model = load(hub_copy, trust_factory=trust_factory)
    else:
        model = zoo.open_source(source, trust_factory=named or trust_factory, **asked)
    if inputs:
        model = zoo.for_inputs(model, inputs)
    if input_size is None:
        return model
    return zoo.for_size(model, input_size)


def save(
    result: Conversion | nn.Module,
    directory: str | Path,
    *,
    arch: Arch | None = None,
    force: bool = False,
) -> Path:
    """Write a conversion (or a loaded, perhaps fine-tuned, network) to `directory`. Returns the
    directory.

    A network that nobody knows how to build is saved too; `load` then needs its skeleton.

    Args:
        arch: how to build the bare architecture, where the network does not know it itself; of a
            factory of your own: `Arch("package.module:factory", kwargs, "factory")`.
        force: replace the files of a network that normswap, or timm, wrote before; of a link, in
            the directory that it points to. Whatever lies beside them stays.

    Raises OutputError: the place is taken, or cannot be written; SourceError: weights are NaN,
    infinite, or missing.
    """
    place = Path(directory)
    model, report = (
        (result.model, result.report) if isinstance(result, Conversion) else (result, None)
    )
    model = network_input.require_module(model)
    network_input.check_values(model)
    network_folder.check_writable(place, force=force)
    record = replace(provenance.of(model), arch=arch or unfolding.architecture(model))
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {place}", error.strerror or str(error)) from None
    # Of a link, the directory that it points to is written.
    target = place.resolve()
    if target.is_dir():
        # Only the files of a network are replaced. Whatever else lies there stays.
        names = [CONFIG, CARD, *([NORMS] if record.norms else [])]
        obsolete = [] if record.norms else [NORMS]
        with atomic_write.writing(target / WEIGHTS, names, obsolete) as aside:
            _write(aside.parent, model, record, report)
            # Another process may have written it since.
            network_folder.check_writable(place, force=force)
        return place

    with atomic_write.writing(target) as aside:
        aside.mkdir()
        _write(aside, model, record, report)
        # Another process may have made it since, and put anything into it.
        network_folder.check_writable(place, force=False)
    return place


def load(
    directory: str | Path,
    skeleton: nn.Module | None = None,
    *,
    trust_factory: bool = False,
    changed: bool = False,
) -> nn.Module:
    """Return the network that `save` wrote: in eval mode, on the CPU, carrying its provenance.

    The architecture is built without weights, the plan replayed, the tensors loaded strictly.

    Args:
        skeleton: the source architecture with any weights, if normswap cannot build it; it is not
            changed.
        trust_factory: import the user's factory that builds the network, which runs its code.
        changed: accept tensors that differ from those that were proven.

    Raises SourceError: it is no such directory, or is damaged, or needs a skeleton, or trust in a
    factory; PlanError: the plan does not fit the architecture (another version of timm may build it
    differently).
    """
    place = Path(directory)
    header = read_header(place)
    file = place if place.is_file() else place / WEIGHTS
    norms_file = file.with_name(NORMS)
    plan = Plan.from_json(json.dumps(header.plan), f"{file}: plan")
    if header.plan.get("digest") != plan.digest:
        raise PlanError(f"{file}: the plan does not have the digest it was saved with")
    state = weight_files.read(file)
    states = {WEIGHTS: state}
    # A file alone may stand beside the norms of another network, or without any.
    if place.is_dir() or (file.name == WEIGHTS and norms_file.is_file()):
        states[NORMS] = weight_files.read(norms_file) if norms_file.is_file() else {}
    weight_files.check_finite(state, str(file))
    bare = (
        copy.deepcopy(skeleton)
        if skeleton is not None
        else _bare(place, header.arch, trust_factory)
    )
    dtype = _dtype(state)
    model = applying.apply(bare, plan.steps)._apply(
        lambda t: t.to(dtype) if t.is_floating_point() else t
    )
    _take_dtypes(model, state)
    weight_files.load_into(model, state, str(file), {})
    if not changed:
        _check_the_same(header, states, file)
    model.eval()
    cfg = {**(getattr(model, "pretrained_cfg", None) or {}), **header.pretrained_cfg}
    model.__dict__.update(pretrained_cfg=cfg, default_cfg=cfg)
    norms = states.get(NORMS, {})
    record = provenance.Provenance(
        header.arch, header.source, header.sha256, header.pretrained_cfg, plan, norms
    )
    return provenance.attach(model, record)


def read_header(place: Path) -> Header:
    """Read the record in a directory or in a weights file; raises SourceError: missing, damaged, or
    of a later one.
    """
    file = place if place.is_file() else place / WEIGHTS
    if not file.is_file():
        raise SourceError(
            f"{place} has no {WEIGHTS}", remedy="Name a directory that normswap wrote"
        )
    what = f"{file} is not a readable safetensors file"
    with explained(SourceError, what, "Is it truncated?"), safe_open(file, "pt") as opened:
        text = (opened.metadata() or {}).get("normswap")
    if text is None:
        remedy = (
            "Name what `normswap convert` wrote; in Python, normswap.open(MODEL) takes any other"
        )
        raise SourceError(f"{file} was not written by normswap", "its header holds no plan", remedy)
    try:
        version = json.loads(text)["version"]
        if version != VERSION:
            what = f"{file} has schema version {version}, this normswap reads {VERSION}"
            raise SourceError(what, remedy="Upgrade it")
        return Header.model_validate_json(text)
    except (ValueError, KeyError, TypeError) as error:
        why = repr(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            why = f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}"
        raise SourceError(
            f"{file}: the header cannot be read", why, "The file is damaged: get it again"
        ) from None


def _check_the_same(header: Header, states: Mapping[str, Mapping[str, Tensor]], file: Path) -> None:
    for name, state in states.items():
        if name in header.hashes and weight_files.hash_tensors(state) != header.hashes[name]:
            what = (
                f"the tensors of {file if name == WEIGHTS else file.with_name(name)} are not those"
                " that were saved"
            )
            saved = header.tensors.get(name, {})
            now = weight_files.hash_each(state)
            others = [
                tensor for tensor in saved | now if saved and saved.get(tensor) != now.get(tensor)
            ]
            why = "missing, damaged, or changed by another program, and the proof is about others"
            remedy = "Get it again; `normswap.load(..., changed=True)` takes it as it is"
            raise SourceError(what, f"{weight_files.some(others or [name])}: {why}", remedy)


def is_checkpoint(place: Path) -> bool:
    """Tell whether normswap wrote this directory (by its config.json) or weights file (by its
    header).
    """
    try:
        if place.suffix == ".safetensors" and place.is_file():
            with safe_open(place, "pt") as file:
                return "normswap" in (file.metadata() or {})
        return "normswap" in json.loads((place / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, SafetensorError):
        return False


def _from_hub(source: str) -> Path | None:
    """Fetch a `hf-hub:owner/name` that `push` wrote, into the hub's cache; None for a source of
    another kind.
    """
    prefix, _, repo = source.partition(":")
    if prefix not in ("hf-hub", "hf_hub"):
        return None
    try:
        schemes = json.loads(hub.fetch(repo, (CONFIG,)).read_text(encoding="utf-8"))["normswap"][
            "schemes"
        ]
    # timm's reader says what is wrong with it.
    except (ValueError, KeyError, TypeError):
        return None
    if not schemes:
        return None
    with contextlib.suppress(SourceError):
        hub.fetch(repo, (NORMS,))
    return hub.fetch(repo, (WEIGHTS,)).parent


def _write(
    folder: Path, model: nn.Module, record: provenance.Provenance, report: Report | None
) -> None:
    state = {
        name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()
    }
    norms = {name: tensor.cpu().contiguous() for name, tensor in record.norms.items()}
    files = {WEIGHTS: state, **({NORMS: norms} if norms else {})}
    versions = {"normswap": __version__, "torch": torch.__version__, "timm": timm.__version__}
    header = {
        "version": VERSION,
        "source": record.source,
        "sha256": record.sha256,
        "arch": record.arch and asdict(record.arch),
        "pretrained_cfg": record.pretrained_cfg,
        "plan": json.loads(record.plan.to_json()),
        "report": report and asdict(report),
        "hashes": {name: weight_files.hash_tensors(tensors) for name, tensors in files.items()},
        "tensors": {name: weight_files.hash_each(tensors) for name, tensors in files.items()},
        "versions": {**versions, "python": platform.python_version()},
    }
    _save(state, folder / WEIGHTS, {"format": "pt", "normswap": json.dumps(header)})
    if norms:
        _save(norms, folder / NORMS, {"format": "pt"})
    config = config_of(model, record)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / CARD).write_text(model_card.render(record, report), encoding="utf-8")


def config_of(model: nn.Module, record: provenance.Provenance) -> dict[str, Any]:
    """Return what config.json says of a network: timm's layout, and the schemes that it went
    through.
    """
    arch = record.arch or Arch(type(model).__name__)
    return {
        "architecture": kinds.named(arch),
        "num_classes": getattr(model, "num_classes", None),
        "model_args": arch.kwargs,
        "pretrained_cfg": record.pretrained_cfg,
        "normswap": {
            "schemes": [step.scheme for step in record.plan.steps],
            "plan": record.plan.digest,
        },
    }


def _save(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
    addresses: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.data_ptr() in addresses and tensor.numel():
            tensors[name] = tensor.clone()
        addresses.add(tensor.data_ptr())
    try:
        save_file(tensors, file, metadata)
    except KeyError as error:
        remedy = "Convert model.to(torch.complex64)"
        raise OutputError(
            f"cannot write {file.name}", f"safetensors has no {error}", remedy
        ) from None
    except SafetensorError as error:
        raise OutputError(f"cannot write {file.name}", first_line(error)) from None


def _bare(folder: Path, arch: Arch | None, trusted: bool) -> nn.Module:
    if arch is None:
        remedy = "In Python: normswap.load(directory, skeleton=MyNetwork())"
        raise SourceError(f"{folder} does not say how its network is built", remedy=remedy)
    kind = kinds.by_builder(arch.builder)
    zoo.check_trust(
        f"{kinds.named(arch)}, which builds the network of {folder},", kind, trusted=trusted
    )
    return zoo.skeleton(arch)


def _take_dtypes(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give each parameter and buffer of the network the dtype that it has in the file."""
    for path, module in nn.Module.named_modules(model):
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                saved = state.get(dotted(path, name))
                if tensor is None or saved is None or not tensor.is_floating_point():
                    continue
                if saved.dtype != tensor.dtype and saved.is_floating_point():
                    tensor.data = tensor.data.to(saved.dtype)


def _dtype(state: Mapping[str, Tensor]) -> torch.dtype:
    """The widest floating-point dtype in the file, for buffers that the file does not hold."""
    floats = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    return functools.reduce(torch.promote_types, floats or {torch.float32})
