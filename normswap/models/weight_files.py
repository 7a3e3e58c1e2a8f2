"""Weight files: read them without running them, and load them into a bare network strictly."""

import argparse
import hashlib
import inspect
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from timm.models import adapt_input_conv
from torch import Tensor, nn

from normswap.errors import SourceError, WeightsNote, first_line, quiet
from normswap.models.hub import Cfg
from normswap.models.network_input import is_finite

# What training scripts wrap a state dict in; an averaged copy (EMA) comes first, as in timm's own
# loader.
_WRAPPERS = (
    "state_dict_ema",
    "model_ema",
    "ema",
    "state_dict",
    "model",
    "model_state_dict",
    "module",
)
# What torch.compile, FSDP and activation checkpointing put into the names of the layers that they
# wrap.
_INSIDE = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_FILTERS = (
    "checkpoint_filter_fn",
    "_filter_fn",
    "_filter_torchvision_pretrained",
    "pretrained_filter_fn",
)
# A training script keeps the averaged network, or the one that it trains.
_PLACES = ("ema", "model", "module")
# An error names so many tensors.
_SHOWN = 5
_TAKES_BROKEN_STATISTICS: ContextVar[bool] = ContextVar("_TAKES_BROKEN_STATISTICS", default=False)

State = dict[str, Tensor]


def hash_tensors(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over the sorted names, dtypes, shapes and each tensor's own SHA-256; all cores take
    part.
    """
    return hashlib.sha256(b"".join(_described(state).values())).hexdigest()


def hash_each(state: Mapping[str, Tensor]) -> dict[str, str]:
    """The beginning of each tensor's SHA-256, of its name, dtype, shape and values, by name."""
    return {
        name: hashlib.sha256(piece).hexdigest()[:16] for name, piece in _described(state).items()
    }


def _described(state: Mapping[str, Tensor]) -> dict[str, bytes]:
    names = sorted(state)
    with ThreadPoolExecutor() as pool:
        hashes = pool.map(lambda name: _own_hash(state[name]), names)
        pairs = zip(names, hashes, strict=True)
        return {
            name: f"{name}|{state[name].dtype}|{tuple(state[name].shape)}|".encode() + own
            for name, own in pairs
        }


def _own_hash(tensor: Tensor) -> bytes:
    """Return the hash of the bytes, as numpy has no bfloat16."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).digest()


def read(file: Path) -> State:
    """The state dict in a weights file by clean names; no code in it is run, and a warning says
    what was not taken.

    Raises SourceError: it is unreadable.
    """
    if not file.is_file():
        raise SourceError(f"{file} is a directory" if file.is_dir() else f"{file} does not exist")
    try:
        if file.suffix == ".safetensors":
            content: object = load_file(file)
        else:
            content = _unpickled(file)
    except Exception as error:
        names = re.findall(r"GLOBAL (\S+)", str(error))
        with suppress(Exception):
            names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(file))) or names
        if names:
            what = f"{file} is a pickle of Python objects, and normswap never executes those"
            remedy = (
                "Save the tensors alone: torch.save(model.state_dict(), file), or better as"
                " .safetensors."
            )
            raise SourceError(what, f"it needs {some(names)}", remedy) from None
        remedy = (
            "It may be empty, truncated, a page of text or a pointer of Git LFS: fetch or write it"
            " again."
        )
        # Of a text, the unpickler takes a letter for the key of an object that was not stored.
        why = "it is no pickle" if isinstance(error, KeyError) else first_line(error)
        raise SourceError(f"{file} is not a readable weights file", why, remedy) from None
    state = _unwrapped(content, file)
    for name, tensor in state.items():
        if tensor.is_quantized or tensor.layout is not torch.strided:
            remedy = "Save what it was made from: plain tensors of numbers."
            raise SourceError(f"{file} holds a sparse or quantized tensor", name, remedy)
    check_finite(state, str(file))
    return state


def _unpickled(file: Path) -> object:
    try:
        # timm's own training checkpoints carry their arguments as a Namespace, which is inert.
        with quiet(), torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception:
        with suppress(Exception):
            return read_pickled_network(file)[1]
        raise


class _Inert(dict[Any, Any]):
    """Any object of a pickle: it holds what the file says of its items and attributes, and does
    nothing.
    """

    attributes: Mapping[str, Any] = {}

    def __init__(self, *arguments: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        self.attributes = state if isinstance(state, dict) else {}


def read_pickled_network(file: Path) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    """Return the attributes and the tensors of a whole network that `torch.save` pickled, without
    any of its code.

    It stands alone in the file, or under a usual key. torch's own reader of weights makes the
    tensors, and calls nothing that it does not know. Each other name that the file calls for is
    given to it as an inert class.

    Raises TypeError, or what torch raises: it holds none, is damaged, or needs what torch refuses
    by its name.
    """
    names = torch.serialization.get_unsafe_globals_in_checkpoint(str(file))
    with (
        quiet(),
        torch.serialization.safe_globals([(type(name, (_Inert,), {}), name) for name in names]),
    ):
        content = torch.load(file, map_location="cpu", weights_only=True)
    places = (content, *map(content.get, _PLACES))
    network = next(
        (place for place in places if getattr(place, "attributes", {}).get("_modules")), None
    )
    if network is None:
        raise TypeError("it holds no whole network")
    return network.attributes, dict(_named(network, ""))


def _named(module: _Inert, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield what `state_dict` has, in its order."""
    inside = module.attributes
    transient = inside.get("_non_persistent_buffers_set", ())
    for name, tensor in {**inside["_parameters"], **inside["_buffers"]}.items():
        if tensor is not None and name not in transient:
            yield prefix + name, tensor.detach()
    for name, child in inside["_modules"].items():
        if child is not None:
            yield from _named(child, f"{prefix}{name}.")


def _unwrapped(content: object, file: Path) -> State:
    """Return the state dict in what a training script wrote, without what wrappers of a network put
    before names.
    """
    while isinstance(content, Mapping):
        inner = {
            key: value for key, value in content.items() if isinstance(value, Mapping) and value
        }
        states = [
            key
            for key, value in inner.items()
            if all(isinstance(entry, Tensor) for entry in value.values())
        ]
        key = next((key for key in _WRAPPERS if isinstance(content.get(key), Mapping)), None)
        if key is None and len(states) > 1:
            raise SourceError(
                f"{file} holds several state dicts",
                some(map(str, states)),
                "Save one of them by itself",
            )
        if key is None and len(states) != 1:
            break
        taken = key or states[0]
        if others := [str(other) for other in states if other != taken]:
            warnings.warn(
                f"{file} holds {some(others)} beside {taken}, which was taken",
                WeightsNote,
                stacklevel=3,
            )
        content = content[taken]
    if not isinstance(content, Mapping):
        raise SourceError(f"{file} holds a {type(content).__name__}, not a state dict")
    strangers = [str(key) for key, value in content.items() if not isinstance(value, Tensor)]
    if strangers or not content:
        raise SourceError(f"{file} is not a state dict", f"no tensors under {some(strangers)}")
    state: State = {}
    for key, tensor in content.items():
        name = ".".join(attribute for attribute in str(key).split(".") if attribute not in _INSIDE)
        if name in state:
            raise SourceError(f"{file} holds {name} twice", f"once as {key}")
        state[name] = tensor
    return state


def _without_prefix(state: State, bare: State) -> State:
    """Return the tensors by names without what wrappers put before all of them: `module.` is DDP's
    or AveragedModel's.

    Lightning puts what the attribute is called, which goes where more names fit without it.
    """
    while not _fits(state, bare):
        named = {
            name.partition(".")[::2]: tensor
            for name, tensor in state.items()
            if name != "n_averaged"
        }
        firsts = {first for first, _ in named}
        shorter = {name: tensor for (_, name), tensor in named.items()}
        fit_better = len(shorter.keys() & bare.keys()) > len(state.keys() & bare.keys())
        if len(firsts) != 1 or "" in shorter or not (fit_better or firsts == {"module"}):
            break
        state = shorter
    return state


@contextmanager
def with_broken_statistics() -> Iterator[None]:
    """Read running statistics that are not finite as they are, to look at them or to measure them
    anew.
    """
    token = _TAKES_BROKEN_STATISTICS.set(True)
    try:
        yield
    finally:
        _TAKES_BROKEN_STATISTICS.reset(token)


def check_finite(state: Mapping[str, Tensor], origin: str) -> None:
    """Raises SourceError naming the tensors that hold NaN or inf."""
    bad = [
        name
        for name, tensor in state.items()
        if tensor.is_floating_point() and not is_finite(tensor)
    ]
    statistics_only = all(name.endswith(("running_mean", "running_var")) for name in bad)
    if bad and not (statistics_only and _TAKES_BROKEN_STATISTICS.get()):
        remedy = (
            "`normswap recalibrate` measures statistics anew"
            if statistics_only
            else "These weights are broken."
        )
        raise SourceError(f"{origin} has NaN or inf in {some(bad)}", remedy=remedy)


def load_into(model: nn.Module, state: State, origin: str, cfg: Cfg) -> None:
    """Load `state` strictly, after timm's own conversions: foreign keys, another stem or head than
    the file's.

    `cfg` is timm's record of the weights: how stem and head are adapted; empty where they must be
    the file's. Raises SourceError: missing or unexpected keys, or other shapes, listed.
    """
    bare = model.state_dict()
    state = _without_prefix(state, bare)
    if not _fits(state, bare):
        state = _rehead(_restem(_native(state, model), bare, origin, cfg), bare, model, cfg)
    floats = [name for name in state.keys() & bare.keys() if bare[name].dtype == torch.float32]
    if halves := {state[name].dtype for name in floats} & {torch.half, torch.bfloat16}:
        shown = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in halves))
        note = f"{origin} is in {shown}, and becomes float32: the same numbers, in twice the size"
        warnings.warn(note, WeightsNote, stacklevel=2)
    check_fit(
        state,
        bare,
        origin,
        str(getattr(model, "pretrained_cfg", {}).get("architecture", "the network")),
    )
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise SourceError(f"{origin} does not load", " ".join(str(error).split())) from None


def _fits(state: State, bare: State) -> bool:
    return state.keys() == bare.keys() and all(
        state[name].shape == bare[name].shape for name in bare
    )


def _native(state: State, model: nn.Module) -> State:
    """Translate foreign keys (torchvision's, the authors') with the filter that timm keeps beside
    the model.
    """
    module = sys.modules[type(model).__module__]
    convert = next((getattr(module, name) for name in _FILTERS if hasattr(module, name)), None)
    if convert is None:
        return state
    try:
        with quiet():
            if len(inspect.signature(convert).parameters) > 1:
                return convert(dict(state), model)
            return convert(dict(state))
    # The filter expects keys that are not there. The strict comparison will list them.
    except Exception:
        return state


def _restem(state: State, bare: State, origin: str, cfg: Cfg) -> State:
    """Adapt the stem to another number of input channels: the only convs whose kernels differ in
    that alone.
    """
    base = (cfg.get("input_size") or (0,))[0]
    for name, kernel in state.items():
        target = bare.get(name, kernel).shape
        if len(target) != 4 or base not in kernel.shape[1:2] or target[1] == base:
            continue
        if kernel.shape[:1] + kernel.shape[2:] != target[:1] + target[2:]:
            continue
        if base != 3:
            raise SourceError(
                f"{origin}: cannot turn a stem of {base} channels into one of {target[1]}"
            )
        state = {**state, name: adapt_input_conv(target[1], kernel)}
    return state


def _rehead(state: State, bare: State, model: nn.Module, cfg: Cfg) -> State:
    fresh = cfg.get("num_classes") != getattr(model, "num_classes", None)
    offset = cfg.get("label_offset") or 0
    heads = cfg.get("classifier") or ()
    if isinstance(heads, str):
        heads = (heads,)
    for name in (f"{head}.{leaf}" for head in heads for leaf in ("weight", "bias")):
        # A new head keeps its random values, and the file's goes.
        if fresh and name in bare:
            state = {**state, name: bare[name]}
        elif fresh:
            state = {key: tensor for key, tensor in state.items() if key != name}
        elif offset and name in state:
            state = {**state, name: state[name][offset:]}
    return state


def some(items: Iterable[str]) -> str:
    """Return the first few items and a count of the rest."""
    listed = list(items)
    shown = ", ".join(listed[:_SHOWN])
    if len(listed) > _SHOWN:
        shown += f" and {len(listed) - _SHOWN} more"
    return shown


def listed(misfits: Mapping[str, Sequence[str]]) -> str:
    """Return how many names there are of each kind of misfit, and the first few of them."""
    return "; ".join(
        f"{len(names)} {kind}: {some(names)}" for kind, names in misfits.items() if names
    )


def check_fit(
    state: Mapping[str, Tensor], bare: Mapping[str, Tensor], origin: str, name: str
) -> None:
    """Check that a file's tensors are those of the bare network; or raises SourceError."""
    both = [(key, state[key], bare[key]) for key in bare if key in state]
    misfits = {
        # torch fills in num_batches_tracked, which files from before torch 0.4.1 do not have.
        "missing": [
            key for key in bare if key not in state and not key.endswith("num_batches_tracked")
        ],
        "unexpected": [key for key in state if key not in bare],
        "of another shape": [
            f"{key} is {tuple(tensor.shape)} in the file, {tuple(own.shape)} in the network"
            for key, tensor, own in both
            if tensor.shape != own.shape
        ],
        "not of real numbers": [
            f"{key} is {str(tensor.dtype).removeprefix('torch.')}"
            for key, tensor, own in both
            if own.is_floating_point() and not tensor.is_floating_point()
        ],
    }
    if any(misfits.values()):
        remedy = (
            "Check the architecture, its arguments, the number of classes and prefixes of names."
        )
        if misfits["missing"] and not any(key.endswith("running_mean") for key in state):
            remedy = (
                "It was fused: open it as the network without BatchNorm; `--to batchnorm --like"
                " ARCH` goes back"
            )
        raise SourceError(f"{origin} does not fit {name}", listed(misfits), remedy)
