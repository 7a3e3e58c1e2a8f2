"""Save and load: a directory of weights, plan and measured proof. Nothing is pickled.

`model.safetensors` has the tensors, and in its header the record of `storage/header.py`.
`config.json` has timm's hub layout. `norms.safetensors` has the tensors of the source's norms, from
which `--to unfold` brings the norms back. `README.md` is a model card. The directory is written
beside its place and then renamed.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from normswap import copying, provenance
from normswap.copying import dotted
from normswap.errors import OutputError, PlanError, SourceError, first_few, first_line
from normswap.models import hub, kinds, network_input, weight_files, zoo
from normswap.models.records import image_record
from normswap.models.weight_files import StateDict
from normswap.plan import Arch, Body
from normswap.proof.verdict import Report
from normswap.storage import atomic_write, header, layer_state, model_card, network_folder
from normswap.storage.header import (
    Header,
    is_checkpoint as is_checkpoint,
    read_header as read_header,
)
from normswap.storage.network_folder import CARD, CONFIG, NORMS, WEIGHTS
from normswap.surgery import applying, unfolding
from normswap.surgery.carrying_out import Conversion
from normswap.version import __version__

if TYPE_CHECKING:
    from typing_extensions import Unpack


def open_model(
    source: str,
    *,
    input_size: Sequence[int] | None = None,
    inputs: Mapping[str, Sequence[object]] | None = None,
    trust_factory: bool = False,
    named: bool = True,
    **asked: Unpack[zoo.Asked],
) -> nn.Module:
    """Open a network by its name: one that `save` wrote, or one of any library that is supported.

    Args:
        source: A network that `save` wrote (a directory, its weights file alone, or a repository of
            the hub), or any other source that `zoo.open_source` takes.
        input_size: The size (C, H, W) of the network's images, if it states another or none.
        inputs: Shape and type of each input, by name, if the network takes no image.
        trust_factory: Whether a factory (the user's own function that builds the network) may be
            imported, which runs its code.
        named: Whether the user typed `source` for this very call. Then a factory that it names may
            be imported, too. A name in a recipe does not count.
        asked: The options weights, arch, arch_args, num_classes, in_chans of `zoo.open_source`.

    Returns:
        The network in eval mode, on the CPU, carrying its provenance.

    Raises:
        SourceError: The source cannot be found, read or understood.
    """
    # A process that was killed may have moved the network away. Then an error says where it is.
    folder = Path(source.removeprefix("local-dir:"))
    network_folder.check_not_moved_aside(folder)

    saved, weights, rest = _saved_network(source, asked)
    if saved is None:
        model = zoo.open_source(source, trust_factory=named or trust_factory, **asked)
    else:
        zoo.check_unasked(str(saved), rest)
        model = load(saved, trust_factory=trust_factory, weights=weights)

    # Write down what inputs the network takes, if the user says it.
    if inputs:
        model = zoo.for_inputs(model, inputs)
    if input_size is None:
        return model
    return zoo.for_size(model, input_size)


def _saved_network(source: str, asked: zoo.Asked) -> tuple[Path | None, Path | None, zoo.Asked]:
    """Find the network that `save` wrote, if the user asks for one, and the weights that fill it.

    Args:
        source: What the user named: a network that `save` wrote, or a weights file for the saved
            network that the option `arch` names.
        asked: The options of `zoo.open_source`.

    Returns:
        A triple. First the directory or file of the saved network, or None if the user asks for no
        saved network. Second the weights file, or None if the network keeps its own weights. Third
        the options that have not been used.
    """
    rest = asked.copy()
    # If `arch` names a saved network, `source` is a weights file for it.
    arch = asked.get("arch")
    if arch is not None:
        saved = _found_network(arch)
        if saved is None:
            return _found_network(source), None, rest
        _, file = kinds.parts(source, asked.get("weights") or "pretrained", arch)
        rest.pop("arch")
        return saved, file, rest

    # Without `arch`, `source` itself may be a saved network. `weights` fills it if it is a file.
    saved = _found_network(source)
    weights = asked.get("weights")
    if saved is None or weights in (None, "pretrained", "random"):
        return saved, None, rest
    # `parts` checks that `weights` is a weights file. It would take a file in place of the network
    # for another weights file, so it gets the folder.
    _, file = kinds.parts(str(saved.parent if saved.is_file() else saved), weights, None)
    rest.pop("weights")
    return saved, file, rest


def _found_network(source: str) -> Path | None:
    """Return the directory or file of a network that `save` wrote, or None if there is none.

    If the user names a repository of the hub, its files are downloaded.

    Args:
        source: What the user named: a path, perhaps as `local-dir:DIR` or `hf:DIR`, or any other
            name of a network.
    """
    folder = Path(source)
    prefix, _, path = source.partition(":")
    if prefix in ("local-dir", kinds.TRANSFORMERS.prefix):
        folder = Path(path)
    if folder.exists() and is_checkpoint(folder):
        return folder
    return _from_hub(source)


def save(
    result: Conversion | nn.Module,
    directory: str | Path,
    *,
    arch: Arch | None = None,
    force: bool = False,
) -> Path:
    """Write the result of a conversion, or a network that was loaded (and perhaps fine-tuned).

    A network that normswap cannot build again is saved, too. Then `load` must be given its source
    architecture.

    Args:
        result: The conversion, or the network, also inside of DDP, DataParallel, AveragedModel,
            torch.compile, Opacus' GradSampleModule or a module of Lightning.
        directory: The path of the new directory.
        arch: How to build the architecture, if the network does not know it itself. A function of
            your own that builds it is `Arch("package.module:function", kwargs, "factory")`.
        force: Whether the files of a network that normswap or timm wrote there before are replaced.
            If the path is a link, they are replaced in the directory that it points to. Whatever
            lies beside these files stays.

    Returns:
        The directory.

    Raises:
        OutputError: The directory exists already, or cannot be written.
        SourceError: Weights are NaN, infinite, or missing.
    """
    place = Path(directory)
    report = result.report if isinstance(result, Conversion) else None
    model = network_input.unwrapped(network_input.require_module(result))
    network_input.check_values(model)
    network_folder.check_writable(place, force=force)
    # Complete what the network carries of its origin: how it was built, and what its images are.
    record = provenance.of(model)
    images = record.pretrained_cfg or hub.unlicensed_record(model)
    record = replace(record, arch=arch or unfolding.architecture(model), pretrained_cfg=images)

    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {place}", error.strerror or str(error)) from None

    # If the place is a link, the directory that it points to is written.
    target = place.resolve()
    if target.is_dir():
        # Only the files of a network are replaced. Whatever else lies there stays. A network
        # without replaced norms has no file of them, so an older one is removed.
        names = [CONFIG, CARD, *([NORMS] if record.norms else [])]
        obsolete = [] if record.norms else [NORMS]
        with atomic_write.writing(target / WEIGHTS, names, obsolete) as aside:
            _write(aside.parent, model, record, report)
            # Another process may have written to the directory since it was checked.
            network_folder.check_writable(place, force=force)
        return place

    with atomic_write.writing(target) as aside:
        aside.mkdir()
        _write(aside, model, record, report)
        # Another process may have made the directory meanwhile, and put anything into it.
        network_folder.check_writable(place, force=False)
    return place


def load(
    directory: str | Path,
    skeleton: nn.Module | None = None,
    *,
    weights: str | Path | None = None,
    trust_factory: bool = False,
    changed: bool = False,
) -> nn.Module:
    """Return the network that `save` wrote: in eval mode, on the CPU, carrying its provenance.

    The source's architecture is built without weights, the saved plan of its conversions is carried
    out again, and the saved tensors are loaded. Every name and shape must fit.

    Args:
        directory: The directory, or its weights file alone.
        skeleton: A network of the source's architecture with any weights, if normswap cannot build
            it. It is not changed.
        weights: A weights file that fills the network in place of its own tensors, such as one that
            another program's training wrote. Its names may have the prefixes of wrappers.
        trust_factory: Whether a factory (the user's own function that builds the network) may be
            imported, which runs its code.
        changed: Whether tensors are accepted that differ from those that were saved.

    Raises:
        SourceError: `save` did not write the directory, or it is damaged, or it needs a skeleton or
            trust in a factory.
        PlanError: The plan does not fit the architecture (another version of timm may build it
            differently).
    """
    place = Path(directory)
    file = place if place.is_file() else place / WEIGHTS
    record = read_header(place)
    plan = record.read_plan(file)
    if record.plan.get("digest") != plan.digest:
        raise PlanError(f"{file}: the plan does not have the digest it was saved with")

    states = _read_tensors(place, file)
    state = states[WEIGHTS]

    # Build the source's architecture, and convert it as it was converted before.
    if skeleton is not None:
        bare = _with_values(copying.duplicate(network_input.unwrapped(skeleton), {}))
    else:
        bare = _build_bare(place, record.arch, trusted=trust_factory)
    model = applying.apply(bare, plan.steps)

    # Load the tensors.
    _take_dtypes(model, state, record.unsaved)
    layer_state.restore(model, state, record)
    if weights is None:
        weight_files.load_into(model, state, str(file), {})
    else:
        trained = weight_files.read(Path(weights))
        # If the weights file lacks the extra state of a layer, the directory's is taken.
        trained.extras = {**state.extras, **trained.extras}
        # The directory's own weights are not used, so `_check_the_same` need not check them.
        del states[WEIGHTS]
        weight_files.load_into(model, trained, str(weights), {})
    if not changed:
        _check_the_same(record, states, file)
    model.eval()

    images = _state_images(model, record)
    origin = provenance.Provenance(
        arch=record.arch,
        source=record.source,
        sha256=record.sha256,
        pretrained_cfg=images,
        plan=plan,
        # A plain dict, which is also read from a pickle of the whole network.
        norms=dict(states.get(NORMS, {})),
        changed=weights is not None,
    )
    loaded = provenance.attach(model, origin)
    if plan.steps:
        kinds.mark_converted(loaded)
    return loaded


def _state_images(model: nn.Module, record: Header) -> Body:
    """Set a network's `pretrained_cfg` to what its saved file says of images and classes.

    timm puts the record of its default weights on each network that it builds. The file's record
    replaces it. Only entries stay that hold for any weights of the architecture, such as the names
    of stem and head. If the file has no record, as older files do, timm's record stays.

    Args:
        model: The network, which is changed.
        record: The header of its saved file.

    Returns:
        The record of images and classes in the file, which may be empty.
    """
    images = record.images
    # timm's record is taken whole if the file has none, or else only what holds for any weights.
    own_cfg = hub.own_cfg(model)
    if images:
        own_cfg = hub.of_architecture(model)
    cfg = {**own_cfg, **images}
    model.__dict__.update(pretrained_cfg=cfg, default_cfg=cfg)
    return images


def _read_tensors(place: Path, file: Path) -> dict[str, StateDict]:
    """Return the tensors of each file of a saved network, by the file's name.

    Args:
        place: The directory of the network, or its weights file alone.
        file: The weights file.
    """
    states: dict[str, StateDict] = {WEIGHTS: weight_files.read(file)}
    norms_file = file.with_name(NORMS)

    # The file of the replaced norms lies beside the weights. If the user named a weights file that
    # has another name than ours, the norms beside it may be those of another network.
    if place.is_dir() or (file.name == WEIGHTS and norms_file.is_file()):
        states[NORMS] = StateDict()
        if norms_file.is_file():
            states[NORMS] = weight_files.read(norms_file)
            # The momentum is stored as NaN if a norm has none (`affine.tensors`).
            to_check = {
                name: tensor
                for name, tensor in states[NORMS].items()
                if not name.endswith("momentum")
            }
            weight_files.check_finite(to_check, str(norms_file))
    return states


def _check_the_same(record: Header, states: Mapping[str, StateDict], file: Path) -> None:
    """Raise SourceError with the names of the tensors that differ from those that were saved.

    Args:
        record: The header of the weights file, which has the hashes of the saved tensors.
        states: The tensors of each file, by the file's name. Only these files are checked.
        file: The path of the weights file.
    """
    for name, state in states.items():
        saved_hash = record.hashes.get(name)
        # A network without replaced norms has no hash of them, and no such tensors.
        if saved_hash is None and not state:
            continue
        if weight_files.hash_tensors(state) == saved_hash:
            continue

        # Find the tensors that differ. Files of older versions have no hash of each tensor, so the
        # message names the file.
        saved = record.tensors.get(name, {})
        now = weight_files.hash_each(state)
        differing = [tensor for tensor in saved | now if saved.get(tensor) != now.get(tensor)]
        named = first_few(differing) if saved and differing else name
        changed_file = file if name == WEIGHTS else file.with_name(name)
        raise SourceError(
            f"the tensors of {changed_file} are not those that were saved",
            f"{named}: missing, damaged, or changed by another program, and the proof is about"
            " others",
            "Get it again; `normswap.load(..., changed=True)` takes it as it is",
        )


def _from_hub(source: str) -> Path | None:
    """Download a converted network that `push` wrote to the hub, into the hub's cache.

    Args:
        source: What the user named, such as `hf-hub:owner/name` or `hf:owner/name`.

    Returns:
        The directory of the network in the cache. None if `source` names no repository of the hub,
        or one that holds no converted network.
    """
    prefix, _, repo = source.partition(":")
    is_repo_of_transformers = prefix == kinds.TRANSFORMERS.prefix and repo.count("/") == 1
    if prefix not in ("hf-hub", "hf_hub") and not is_repo_of_transformers:
        return None
    if is_repo_of_transformers:
        # A folder of this name on the disk goes before the repository.
        if Path(repo).is_dir():
            return None
        # If transformers is not installed, this raises the error that says so.
        kinds.TRANSFORMERS.load()

    config = header.read_config(hub.fetch(repo, (CONFIG,)).parent)
    entry = (config or {}).get(header.KEY)
    # Any other repository is opened by timm or transformers, which say what is wrong with its
    # config. So is a network of `push` that no scheme converted.
    if not isinstance(entry, dict) or not entry.get("schemes"):
        return None

    # A network has no such file if none of its norms was replaced.
    with suppress(SourceError):
        hub.fetch(repo, (NORMS,))
    return hub.fetch(repo, (WEIGHTS,)).parent


def _write(
    folder: Path, model: nn.Module, record: provenance.Provenance, report: Report | None
) -> None:
    """Write the files of a network into a new folder.

    Args:
        folder: The folder, which is empty.
        model: The network.
        record: The provenance of the network.
        report: The measurements of the conversion. None if the network was only loaded.
    """
    # Collect the tensors of each file, and hash them.
    layers = layer_state.of(model)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in layers.tensors.items()}
    norms = {name: tensor.cpu().contiguous() for name, tensor in record.norms.items()}
    files = {WEIGHTS: state}
    if norms:
        files[NORMS] = norms

    hashes: dict[str, str] = {}
    tensor_hashes: dict[str, dict[str, str]] = {}
    for name, tensors in files.items():
        hashes[name], tensor_hashes[name] = weight_files.hash_all(tensors)

    # Write the tensors, with the record in the header of the weights file. The architecture and the
    # report are stored as null if they are None.
    versions = {"normswap": __version__, "torch": torch.__version__, "timm": timm.__version__}
    header_text = header.record_to_write(
        {
            "version": header.VERSION,
            "source": record.source,
            "sha256": record.sha256,
            "arch": record.arch and asdict(record.arch),
            "pretrained_cfg": image_record(record.pretrained_cfg),
            "plan": json.loads(record.plan.to_json()),
            "report": report and asdict(report),
            "hashes": hashes,
            "tensors": tensor_hashes,
            "versions": {**versions, "python": platform.python_version()},
            **layers.record(),
        },
        folder / WEIGHTS,
    )
    _save(state, folder / WEIGHTS, {"format": "pt", header.KEY: header_text})
    if norms:
        _save(norms, folder / NORMS, {"format": "pt"})

    # Write the config, which has the header's digest, so that a changed header is noticed.
    config = config_of(model, record, json.loads(header_text)["digest"])
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / CARD).write_text(model_card.render(record, report), encoding="utf-8")


def config_of(model: nn.Module, record: provenance.Provenance, digest: str | None) -> Body:
    """Return the contents of config.json: timm's layout, and the names of the conversions' schemes.

    Args:
        model: The network.
        record: The network's provenance.
        digest: The digest of the header of its weights, so that a changed header is noticed.
    """
    arch = record.arch or Arch(type(model).__name__)
    # An entry that keeps transformers from opening the converted network as one of its own.
    # transformers may read the whole file as its config, or the object `model_args` in it if that
    # has a model_type, so the entry is put in both.
    stop: Body = {}
    if arch.builder == kinds.TRANSFORMERS.builder:
        stop = dict(network_folder.NOT_OF_TRANSFORMERS)
    return {
        **stop,
        "architecture": kinds.named(arch),
        "num_classes": getattr(model, "num_classes", None),
        "model_args": {**arch.kwargs, **stop},
        "pretrained_cfg": image_record(record.pretrained_cfg),
        header.KEY: {
            "schemes": [step.scheme for step in record.plan.steps],
            "plan": record.plan.digest,
            "header": digest,
        },
    }


def _save(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file.

    safetensors refuses tensors that share memory, so a copy takes the place of the second one.

    Args:
        tensors: The tensors by name. Copies are put into this dict.
        file: The path of the file.
        metadata: The texts that are stored in the file, by their keys.

    Raises:
        OutputError: The file cannot be written.
    """
    addresses: set[int] = set()
    for name, tensor in tensors.items():
        # An empty tensor has no memory that it could share.
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


def _build_bare(folder: Path, arch: Arch | None, *, trusted: bool) -> nn.Module:
    """Build the network of a directory as it was before its conversions, without its weights.

    Args:
        folder: The directory, for messages.
        arch: How the network is built. None if the directory does not say it.
        trusted: Whether the user's own function that builds the network may be imported.

    Raises:
        SourceError: The directory does not say how its network is built, or it cannot be built.
    """
    if arch is None:
        remedy = "In Python: normswap.load(directory, skeleton=MyNetwork())"
        raise SourceError(f"{folder} does not say how its network is built", remedy=remedy)

    kind = kinds.by_builder(arch.builder)
    what = f"{kinds.named(arch)}, which builds the network of {folder},"
    zoo.check_trust(what, kind, trusted=trusted)
    return zoo.skeleton(arch)


def _with_values(skeleton: nn.Module) -> nn.Module:
    """Put zeros in the place of a network's tensors on the meta device, and return the network.

    The values of the weights file overwrite the zeros later.

    Args:
        skeleton: The network, which is changed.

    Raises:
        SourceError: A buffer on the meta device is one that no weights file holds.
    """
    without_values: list[str] = []
    zeros: dict[int, Tensor] = {}
    for path, module in copying.tree(skeleton).items():
        unsaved = module._non_persistent_buffers_set
        own_tensors: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in own_tensors:
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_meta:
                    continue
                # No file holds such a buffer, so nothing would overwrite the zeros.
                if name in unsaved:
                    without_values.append(dotted(path, name))
                # A tensor that several modules share stays shared.
                if id(tensor) not in zeros:
                    zeros[id(tensor)] = torch.zeros_like(tensor, device="cpu")
                    if isinstance(tensor, nn.Parameter):
                        values = zeros[id(tensor)]
                        zeros[id(tensor)] = nn.Parameter(values, tensor.requires_grad)
                tensors[name] = zeros[id(tensor)]

    if without_values:
        what = f"{first_few(without_values)}: no values"
        why = "the skeleton is on the meta device, and the file does not hold such buffers"
        raise SourceError(what, why, "Build the skeleton on the CPU")
    return skeleton


def _take_dtypes(model: nn.Module, state: Mapping[str, Tensor], unsaved: Mapping[str, str]) -> None:
    """Cast each floating-point parameter and buffer to the dtype that it had when it was saved.

    Args:
        model: The network, which is changed.
        state: The tensors of the file.
        unsaved: The dtype of each buffer that the file does not hold, by its name.
    """
    for path, module in copying.tree(model).items():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_floating_point():
                    continue
                # A buffer that is not saved has its dtype in the header.
                full_name = dotted(path, name)
                dtype = tensor.dtype
                if full_name in state:
                    dtype = state[full_name].dtype
                elif full_name in unsaved:
                    dtype = getattr(torch, unsaved[full_name])
                if dtype != tensor.dtype and dtype.is_floating_point:
                    tensor.data = tensor.data.to(dtype)
