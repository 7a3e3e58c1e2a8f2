"""Weight files: read as tensors alone, and loaded into a bare network strictly."""

import hashlib
import inspect
import re
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from timm.models import adapt_input_conv
from torch import Tensor, nn

from normswap import copying
from normswap.errors import (
    NewHeadNote,
    SourceError,
    WeightsNote,
    first_few,
    first_line,
    quiet,
    spelled,
)
from normswap.models import safe_pickle
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
# The names of timm's functions that translate foreign state dicts, beside the models.
_FILTERS = (
    "checkpoint_filter_fn",
    "_filter_fn",
    "_filter_torchvision_pretrained",
    "pretrained_filter_fn",
)
# The size in bytes of a network whose tensors are hashed by several threads.
_BYTES_WORTH_THREADS = 8 * 2**20
# The most levels that are unwrapped. In real files a state dict lies under one or two keys.
_MOST_WRAPPERS = 8
_STATISTICS = ("running_mean", "running_var")
# The kind of misfit of a tensor whose name is there and whose shape is not.
_OTHER_SHAPE = "of another shape"
_Value = TypeVar("_Value")
_TAKES_BROKEN_STATISTICS: ContextVar[bool] = ContextVar("_TAKES_BROKEN_STATISTICS", default=False)

State = dict[str, Tensor]
# The last part of the name under which torch keeps a layer's own extra state.
EXTRA_STATE = "_extra_state"


class StateDict(State):
    """The tensors of a weights file, with the rest of what torch keeps in a state dict.

    Attributes:
        _metadata: What `load_state_dict` tells each layer, by the layer's path. Above all it is the
            version of the layer that wrote the tensors. None if the file does not say it.
        extras: The extra state of layers that is no tensor, by its name in the state dict.
    """

    _metadata: dict[str, dict[str, object]] | None = None
    extras: Mapping[str, object] = {}


def hash_tensors(state: Mapping[str, Tensor]) -> str:
    """Return one hash (SHA-256) over the names, dtypes, shapes and values of all tensors.

    The tensors may come in any order.
    """
    hash_over_all, _ = hash_all(state)
    return hash_over_all


def hash_each(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a short hash of each tensor, by its name.

    It is the first 16 digits of the SHA-256 over the tensor's name, dtype, shape and values.
    """
    _, hashes = hash_all(state)
    return hashes


def hash_all(state: Mapping[str, Tensor]) -> tuple[str, dict[str, str]]:
    """Return the hash over all tensors, and a dict with a short hash of each tensor by its name.

    They are the same as those of `hash_tensors` and `hash_each`, but each value is read only once.
    """
    descriptions = _descriptions(state)
    hashes = {
        name: hashlib.sha256(description).hexdigest()[:16]
        for name, description in descriptions.items()
    }
    return hashlib.sha256(b"".join(descriptions.values())).hexdigest(), hashes


def _descriptions(state: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Return the bytes by which each tensor is hashed, by its name, sorted by name.

    The bytes are the name, dtype and shape, followed by the SHA-256 of the values. The values are
    hashed by several threads, unless the network is so small that starting threads takes longer.
    """
    names = sorted(state)
    tensors = [state[name] for name in names]
    if sum(tensor.nbytes for tensor in tensors) < _BYTES_WORTH_THREADS:
        hashes = [_hash_of_values(tensor) for tensor in tensors]
    else:
        with ThreadPoolExecutor() as pool:
            hashes = [*pool.map(_hash_of_values, tensors)]

    descriptions: dict[str, bytes] = {}
    for name, tensor, own_hash in zip(names, tensors, hashes, strict=True):
        header = f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|"
        descriptions[name] = header.encode() + own_hash
    return descriptions


def _hash_of_values(tensor: Tensor) -> bytes:
    """Return the SHA-256 of a tensor's values.

    The values are viewed as bytes, because numpy has no bfloat16.
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).digest()


def read(file: Path) -> StateDict:
    """Return the state dict in a weights file. No code in the file is run.

    Parts that torch.compile and other wrappers put into names are taken out. If the file holds
    several state dicts, a warning names those that are not returned. Numbers are not checked for
    NaN here: `load_into` checks them, because it knows which tensors are parameters.

    Args:
        file: A safetensors file, or one that `torch.save` wrote.

    Raises:
        SourceError: The file is unreadable, or holds something else.
    """
    if not file.is_file():
        raise SourceError(f"{file} is a directory" if file.is_dir() else f"{file} does not exist")

    state = _unwrapped(_content(file), file)
    for name, tensor in state.items():
        _check_plain_tensor(name, tensor, file)
    try:
        safe_pickle.check_sizes(state, file)
    except safe_pickle.OutgrownFileError as error:
        raise SourceError(f"{file} is not a readable weights file", str(error)) from None
    return state


def _content(file: Path) -> object:
    """Return what a weights file holds, as safetensors or torch reads it.

    Raises:
        SourceError: The file cannot be read. The message gives the reason and what to do.
    """
    _check_no_text(file)
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        return safe_pickle.unpickle(file)
    # safetensors and torch raise many kinds of errors for a file that is none of their own.
    except Exception as error:
        # Find the names of the Python objects that a pickle needs. torch's message names the first
        # one: "Unsupported global: GLOBAL my_package.MyNetwork was not an allowed global".
        names = re.findall(r"GLOBAL (\S+)", str(error))
        if file.suffix != ".safetensors":
            names = safe_pickle.unknown_names(file) or names
        if names:
            what = f"{file} is a pickle of Python objects, and normswap never executes those"
            remedy = (
                "Save the tensors alone: torch.save(model.state_dict(), file), or better as"
                " .safetensors."
            )
            raise SourceError(what, f"it needs {first_few(names)}", remedy) from None

        remedy = (
            "It may be empty, truncated, a page of text or a pointer of Git LFS: fetch or write it"
            " again."
        )
        # For a text or an empty file the unpickler raises one of these, with a message that tells a
        # user nothing.
        is_no_pickle = isinstance(error, KeyError | IndexError | EOFError)
        why = "it is no pickle" if is_no_pickle else first_line(error)
        raise SourceError(f"{file} is not a readable weights file", why, remedy) from None


def _check_no_text(file: Path) -> None:
    """Raise SourceError if a weights file is a text, and say which kind of text it is."""
    # A text may begin with a byte-order mark (EF BB BF) or with blanks.
    with file.open("rb") as opened:
        begin = opened.read(2048).lstrip(b"\xef\xbb\xbf \t\r\n").lower()

    if begin.startswith((b"<!doctype", b"<html", b"<?xml")):
        remedy = "Fetch the file again: a server gave its page, such as an error or a login"
        raise SourceError(f"{file} is no weights file", "it is a page of text: HTML", remedy)
    if begin.startswith(b"version https://git-lfs"):
        remedy = "Fetch the file itself: `git lfs pull`"
        raise SourceError(f"{file} is no weights file", "it is a pointer of Git LFS", remedy)
    if file.suffix == ".json" or begin.startswith((b'{"metadata"', b'{"weight_map"')):
        why = "it is JSON"
        remedy = "Name the file that holds the tensors"
        if file.name.endswith(".index.json") or b'"weight_map"' in begin:
            why = "it is the index of weights in several files, and holds no tensors itself"
            remedy = "Write the tensors of all its files into one (safetensors), and name that"
        raise SourceError(f"{file} is no weights file", why, remedy)


def _check_plain_tensor(name: str, tensor: Tensor, file: Path) -> None:
    """Raise SourceError for a tensor that is sparse, quantized, nested, or has no values.

    Args:
        name: The name of the tensor, for the message.
        tensor: The tensor.
        file: The file that holds the tensor, for the message.
    """
    remedy = "Save what it was made from: plain tensors of numbers."
    if tensor.is_quantized or tensor.is_nested or tensor.layout is not torch.strided:
        raise SourceError(f"{file} holds a sparse or quantized tensor", name, remedy)
    if tensor.is_meta:
        raise SourceError(f"{file} holds a tensor without values", f"{name} is a meta tensor")


def _unwrapped(content: object, file: Path) -> StateDict:
    """Return the state dict in the content of a weights file.

    A training script may store it inside other dicts, as in `{"model": state_dict, "epoch": 9}`.
    torch.compile, FSDP and activation checkpointing put parts into the names of tensors, such as
    `_orig_mod`. These parts are taken out.
    """
    # Go from dict to dict, until no key leads further in.
    for _ in range(_MOST_WRAPPERS):
        if not isinstance(content, Mapping):
            break
        key = _wrapped_under(content, file)
        if key is None:
            break
        content = content[key]

    if not isinstance(content, Mapping):
        raise SourceError(f"{file} holds a {type(content).__name__}, not a state dict")
    # A state dict holds only tensors, by name or number, and under `*._extra_state` anything else.
    strangers = [
        _shown_key(key)
        for key, value in content.items()
        if not isinstance(key, str | int) or not (isinstance(value, Tensor) or _is_extra(str(key)))
    ]
    if strangers or not content:
        raise SourceError(f"{file} is not a state dict", f"no tensors under {first_few(strangers)}")

    # Sort tensors and extra state, by clean names.
    state = StateDict()
    extras: dict[str, object] = {}
    for key, value in content.items():
        name = _without_wrappers(str(key))
        if name in state or name in extras:
            raise SourceError(f"{file} holds {name} twice", f"once as {key}")
        if isinstance(value, Tensor):
            state[name] = value
        else:
            extras[name] = value

    # torch keeps the versions of the layers in an attribute of the state dict.
    metadata = getattr(content, "_metadata", None)
    if isinstance(metadata, Mapping):
        state._metadata = {_without_wrappers(str(path)): entry for path, entry in metadata.items()}
    state.extras = extras
    return state


def _without_wrappers(name: str) -> str:
    """Return the path of a layer or tensor without the parts that wrappers put into it.

    The path `_orig_mod.conv1.weight`, which torch.compile has made, becomes `conv1.weight`.
    """
    return ".".join(attribute for attribute in name.split(".") if attribute not in _INSIDE)


def _is_extra(name: str) -> bool:
    """Return whether a name in a state dict is that of a layer's extra state: `*._extra_state`."""
    return name.rpartition(".")[2] == EXTRA_STATE


def _wrapped_under(content: Mapping[object, object], file: Path) -> object:
    """Return the key under which a training script has put its state dict.

    The result is None if the content is a state dict itself, or holds none.

    Args:
        content: The dict that the file holds, or a dict in it.
        file: The file, for messages.
    """
    # Find the keys of state dicts, and the first of the keys that training scripts usually take.
    inner = {key: value for key, value in content.items() if isinstance(value, Mapping) and value}
    states = [key for key, value in inner.items() if _holds_tensors_alone(value)]
    usual = next((key for key in _WRAPPERS if isinstance(content.get(key), Mapping)), None)
    if usual is None and len(states) > 1:
        shown = first_few(map(_shown_key, states))
        raise SourceError(f"{file} holds several state dicts", shown, "Save one of them by itself")
    if usual is None and not states:
        return None

    # A usual key is preferred. Without one, `states` has exactly one entry here.
    chosen = usual or states[0]
    passed_over = [_shown_key(key) for key in states if key != chosen]
    if passed_over:
        note = f"{file} holds {first_few(passed_over)} beside {_shown_key(chosen)}, which was taken"
        # With this level, Python names the line that called `read`.
        warnings.warn(note, WeightsNote, stacklevel=4)
    return chosen


def _holds_tensors_alone(values: Mapping[object, object]) -> bool:
    """Return whether every value of a mapping is a tensor."""
    return all(isinstance(value, Tensor) for value in values.values())


def _shown_key(key: object) -> str:
    """Return a key of a dict as an error shows it: the key itself, or only its class.

    Only the class is shown if the text could be endlessly long, as that of a nested tuple in an
    untrusted file.
    """
    if isinstance(key, str | int | float | bool | None):
        return str(key)
    return f"a {type(key).__name__}"


def _without_prefix(state: StateDict, bare: State) -> StateDict:
    """Return the tensors by their names without a prefix that all names have.

    DDP and AveragedModel put `module.` before all names. It is always dropped. Lightning puts the
    name of an attribute there, as in `backbone.conv1.weight`. It is dropped if more names are those
    of the network without it.

    Args:
        state: The file's tensors by name.
        bare: The tensors of the network that is to be filled.
    """
    while not _fits(state, bare):
        first_parts: set[str] = set()
        shorter = StateDict()
        for name, tensor in state.items():
            # The counter of AveragedModel stands beside the network.
            if name == "n_averaged":
                continue
            # `module.conv1.weight` has the first part `module`.
            first_part, _, rest = name.partition(".")
            first_parts.add(first_part)
            shorter[rest] = tensor

        # A prefix is dropped if all names have it, and if each name goes on behind it: a name
        # without a dot has become "". Without the prefix more names must fit, unless it is
        # `module`.
        more_names_fit = len(shorter.keys() & bare.keys()) > len(state.keys() & bare.keys())
        is_dropped = more_names_fit or first_parts == {"module"}
        if len(first_parts) != 1 or "" in shorter or not is_dropped:
            break
        if state._metadata is not None:
            shorter._metadata = _below(state._metadata)
        shorter.extras = _below(state.extras)
        state = shorter
    return state


def _below(named: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return the values by shorter names, without the part before the first dot.

    A value named `module.conv1.weight` gets the name `conv1.weight`.
    """
    return {name.partition(".")[2]: value for name, value in named.items()}


@contextmanager
def with_broken_statistics() -> Iterator[None]:
    """Inside a `with` block, let networks be loaded whose running statistics hold NaN or inf.

    Commands that inspect the statistics, or measure them anew, use it.
    """
    token = _TAKES_BROKEN_STATISTICS.set(True)
    try:
        yield
    finally:
        _TAKES_BROKEN_STATISTICS.reset(token)


def check_network(model: nn.Module, origin: str) -> None:
    """Raise SourceError if a network's parameters or running statistics hold NaN or inf.

    Args:
        model: The network.
        origin: The name of the network's source in the error.
    """
    _check_state(model, copying.state_tensors(model), origin)


def _check_state(model: nn.Module, state: Mapping[str, Tensor], origin: str) -> None:
    """Raise SourceError if parameters or running statistics of a state dict hold NaN or inf.

    Other buffers may hold them, as masks and observers do.

    Args:
        model: The network that the state dict is for. It tells which tensors are buffers.
        state: The tensors of the state dict by name.
        origin: The name of the file in the error.
    """
    buffers = {name for name, tensor in copying.tensors(model).items() if _is_buffer(name, tensor)}
    check_finite({name: state[name] for name in state if name not in buffers}, origin)


def _is_buffer(name: str, tensor: Tensor) -> bool:
    """Return whether a tensor of a network is a buffer other than a running mean or variance.

    Args:
        name: The name of the tensor, which tells a running mean or variance.
        tensor: The tensor.
    """
    return not isinstance(tensor, nn.Parameter) and not name.endswith(_STATISTICS)


def check_finite(state: Mapping[str, Tensor], origin: str) -> None:
    """Raise SourceError if tensors hold NaN or inf. The message names these tensors.

    Inside `with_broken_statistics`, running statistics may hold them.

    Args:
        state: The tensors by name.
        origin: The name of their file in the error.
    """
    bad = [name for name, tensor in state.items() if not _has_finite_numbers(name, tensor, origin)]
    # If anything beside running statistics is broken, it is an error in any case.
    are_statistics = all(name.endswith(_STATISTICS) for name in bad)
    if bad and not (are_statistics and _TAKES_BROKEN_STATISTICS.get()):
        remedy = "These weights are broken."
        if are_statistics:
            remedy = "`normswap recalibrate` measures statistics anew"
        raise SourceError(f"{origin} has NaN or inf in {first_few(bad)}", remedy=remedy)


def _has_finite_numbers(name: str, tensor: Tensor, origin: str) -> bool:
    """Return whether a tensor holds neither NaN nor inf. Whole numbers never do.

    Args:
        name: The name of the tensor, for the message.
        tensor: The tensor.
        origin: The file's name, for the message.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    try:
        return is_finite(tensor)
    # torch can store numbers of some dtypes but not compute with them.
    except (RuntimeError, TypeError) as error:
        why = f"{name} is {str(tensor.dtype).removeprefix('torch.')}: {first_line(error)}"
        raise SourceError(f"{origin} holds numbers that torch does not compute with", why) from None


def state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a network.

    Raises:
        SourceError: A hook, or another part of the network's own code, fails while it is made.
    """
    try:
        return model.state_dict()
    # The hooks are the user's code, which may raise anything.
    except Exception as error:
        raise _error_of_hook("the network makes no state dict", error) from error


def _error_of_hook(what: str, error: Exception) -> SourceError:
    """Return the error for a failure of the network's own code while a state dict is made or read.

    Args:
        what: What could not be done.
        error: What the code raised.
    """
    return SourceError(
        what,
        f"its own code fails with {type(error).__name__}: {first_line(error)}",
        "If a hook asks for a norm that is gone, remove the hook, or let it skip what is not there",
    )


def load_into(model: nn.Module, state: State, origin: str, cfg: Cfg) -> None:
    """Load tensors into a network. Every name and shape must fit.

    If they do not fit as they are, the names that another library gives them are translated as timm
    does it, and stem and head are adapted to the network.

    Args:
        model: The network that is filled.
        state: The tensors by name.
        origin: The name of the tensors' file in errors.
        cfg: timm's record of the weights, which says how stem and head are adapted. If it is empty,
            they are not adapted.

    Raises:
        SourceError: Names are missing or unexpected, or have other shapes. The message lists them.
    """
    # Bring names and shapes to those of the network. First a prefix of all names is taken off.
    bare = {name: own for name, own in state_dict(model).items() if isinstance(own, Tensor)}
    named = state if isinstance(state, StateDict) else StateDict(state)
    as_it_is = _without_prefix(named, bare)
    state = as_it_is
    if not _fits(state, bare):
        # Translate the names as timm does it, then adapt the stem and the head.
        state = _native(state, model)
        state = _restem(state, bare, origin, cfg)
        state = _rehead(state, bare, model, cfg)
    _check_state(model, state, origin)

    # Compare names and shapes with the network's, so that an error lists all that do not fit.
    _note_halves(state, bare, origin)
    architecture = getattr(model, "pretrained_cfg", {}).get("architecture", "the network")
    try:
        check_fit(state, bare, origin, str(architecture))
    except SourceError:
        # The layers themselves may know the names of older files, and load the tensors by them.
        has_loaded = _loads_older_names(model, as_it_is)
        if not has_loaded:
            raise
        return

    # `_metadata` has the versions of the layers, by the names in the file. So it is passed on only
    # if no tensor was renamed.
    filled: dict[str, object] = OrderedDict({**state, **as_it_is.extras})
    if state is as_it_is and as_it_is._metadata is not None:
        filled._metadata = as_it_is._metadata  # type: ignore[attr-defined]
    try:
        model.load_state_dict(filled)
    except RuntimeError as error:
        raise SourceError(f"{origin} does not load", " ".join(str(error).split())) from None
    # A hook is the user's code, which may raise anything.
    except Exception as error:
        raise _error_of_hook(f"{origin} does not load", error) from error


def _loads_older_names(model: nn.Module, state: StateDict) -> bool:
    """Load a state dict whose names do not fit, if the network's own layers can translate them.

    A layer may translate the names of an older checkpoint while it loads them, in its method
    `_load_from_state_dict`. The state dict tells it the version of the layer that wrote them.

    Args:
        model: The network, which is filled.
        state: The state dict.

    Returns:
        Whether the state dict was loaded.
    """
    own = copying.state_tensors(model)
    shared = state.keys() & own.keys()
    # torch would cast integers to floating-point numbers, or the other way round, without an error.
    if any(
        state[name].dtype.is_floating_point != own[name].dtype.is_floating_point for name in shared
    ):
        return False
    # Where all names and shapes are the same, there is nothing that a layer could mend.
    if _fits(state, own):
        return False

    filled: dict[str, object] = OrderedDict({**state, **state.extras})
    filled._metadata = state._metadata  # type: ignore[attr-defined]
    try:
        model.load_state_dict(filled)
    # The layers may be the user's code, and torch raises an error if names or shapes do not fit.
    except Exception:
        return False
    return True


def _note_halves(state: State, bare: State, origin: str) -> None:
    """Warn if numbers of 16 bits in the file become float32 in the network.

    Args:
        state: The file's tensors by name.
        bare: The network's tensors by name.
        origin: The file's name, for the message.
    """
    floats = [name for name in state.keys() & bare.keys() if bare[name].dtype == torch.float32]
    halves = {state[name].dtype for name in floats} & {torch.half, torch.bfloat16}
    if halves:
        shown = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in halves))
        note = f"{origin} is in {shown}, and becomes float32: the same numbers, in twice the size"
        # With this level, Python names the line that called `load_into`.
        warnings.warn(note, WeightsNote, stacklevel=3)


def _fits(state: State, bare: State) -> bool:
    """Return whether the file's tensors have the names and shapes of the network's.

    Args:
        state: The file's tensors by name.
        bare: The network's tensors by name.
    """
    same_names = state.keys() == bare.keys()
    return same_names and all(state[name].shape == bare[name].shape for name in bare)


def _native(state: State, model: nn.Module) -> State:
    """Return the tensors of a file by the names that timm gives them.

    Names of torchvision or of a network's authors are translated by a function of timm that stands
    in the same Python module as the network's class. If there is no such function, or it fails, the
    tensors are returned as they are.

    Args:
        state: The file's tensors by name.
        model: The network of timm that is to be filled.
    """
    module = sys.modules[type(model).__module__]
    convert = next((getattr(module, name) for name in _FILTERS if hasattr(module, name)), None)
    if convert is None:
        return state

    try:
        with quiet():
            # Some of these functions take the network, too.
            if len(inspect.signature(convert).parameters) > 1:
                return convert(dict(state), model)
            return convert(dict(state))
    # The function expects names that are not there. `check_fit` will list them.
    except Exception:
        return state


def _restem(state: State, bare: State, origin: str, cfg: Cfg) -> State:
    """Return the tensors with the stem adapted to the network's number of input channels.

    The stem is found by its shape: its kernel has the input channels of the weights' images, and
    differs from the network's kernel in that number alone.

    Args:
        state: The file's tensors by name.
        bare: The tensors of the network that is to be filled.
        origin: The file's name, for the message.
        cfg: timm's record of the weights. Empty if nothing may be adapted.
    """
    # Without a record the number is 0. No kernel has 0 channels, so nothing is adapted then.
    channels_of_weights = (cfg.get("input_size") or (0,))[0]
    for name, kernel in state.items():
        # A tensor that the network does not have stays as it is.
        target = bare.get(name, kernel).shape
        # A vector has no second dimension: then the slice is empty, and holds no channels.
        has_channels_of_weights = channels_of_weights in kernel.shape[1:2]
        is_kernel = len(target) == 4 and has_channels_of_weights
        if not is_kernel or target[1] == channels_of_weights:
            continue
        # The other dimensions must be the network's, or it is another convolution than the stem.
        if kernel.shape[:1] + kernel.shape[2:] != target[:1] + target[2:]:
            continue

        if channels_of_weights != 3:
            raise SourceError(
                f"{origin}: cannot turn a stem of {channels_of_weights} channels into one of"
                f" {target[1]}"
            )
        state = {**state, name: adapt_input_conv(target[1], kernel)}
    return state


def _rehead(state: State, bare: State, model: nn.Module, cfg: Cfg) -> State:
    """Return the tensors with a head of as many classes as the network has.

    If the file's head has another number of classes, the network's own new head is taken. If the
    file's head has outputs before the first class, such as one for background, they are cut off.

    Args:
        state: The file's tensors by name.
        bare: The tensors of the network that is to be filled.
        model: The network.
        cfg: timm's record of the weights. Empty if nothing may be adapted.
    """
    is_new = cfg.get("num_classes") != getattr(model, "num_classes", None)
    # How many outputs the file's head has before the first class of the network's head.
    offset = cfg.get("label_offset") or 0
    # A network may have several heads. The record names one as a plain text.
    heads = cfg.get("classifier") or ()
    if isinstance(heads, str):
        heads = (heads,)

    classes = getattr(model, "num_classes", None)
    if is_new and heads and classes:
        note_new_head(heads[0], classes)

    adapted = dict(state)
    for head in heads:
        for name in (f"{head}.weight", f"{head}.bias"):
            # A new head keeps its random values, and the file's tensors are dropped.
            if is_new and name in bare:
                adapted[name] = bare[name]
            elif is_new:
                adapted.pop(name, None)
            elif offset and name in adapted:
                adapted[name] = adapted[name][offset:]
    return adapted


def note_new_head(path: str, classes: int) -> None:
    """Warn that the head of a network is new, with random values.

    Args:
        path: The path of the head, as far as it is known.
        classes: The number of its classes.
    """
    note = f"{path}: new, random. The weights have another number of classes than {classes}"
    warnings.warn(note, NewHeadNote, stacklevel=3)


def listed(misfits: Mapping[str, Sequence[str]]) -> str:
    """Return a text about the tensors of a file that do not fit the network.

    It has the number and the first few names of each kind of misfit, such as
    `2 missing: fc.weight, fc.bias; 1 unexpected: head.weight`.

    Args:
        misfits: The names of the tensors that do not fit, by the kind of misfit.
    """
    parts: list[str] = []
    for kind, names in misfits.items():
        if names:
            # Names that come with their shapes are long, so only one of them is shown.
            most = 1 if kind == _OTHER_SHAPE else 3
            parts.append(f"{len(names)} {kind}: {first_few(names, most)}")
    return "; ".join(parts)


def check_fit(
    state: Mapping[str, Tensor], bare: Mapping[str, Tensor], origin: str, name: str
) -> None:
    """Raise SourceError if names, shapes or kinds of a file's tensors are not the network's.

    Args:
        state: The file's tensors by name.
        bare: The tensors of the network that is to be filled, by name.
        origin: The name of the file in the error.
        name: The name of the network in the error.
    """
    misfits: dict[str, list[str]] = {
        "missing": [],
        "unexpected": [key for key in state if key not in bare],
        _OTHER_SHAPE: [],
        "not of real numbers": [],
    }
    for key, own in bare.items():
        tensor = state.get(key)
        if tensor is None:
            # torch fills in num_batches_tracked, which files from before torch 0.4.1 do not have.
            if not key.endswith("num_batches_tracked"):
                misfits["missing"].append(key)
            continue
        if tensor.shape != own.shape:
            shapes = f"{tuple(tensor.shape)} in the file, {tuple(own.shape)} in the network"
            misfits[_OTHER_SHAPE].append(f"{key} is {shapes}")
        if own.is_floating_point() and not tensor.is_floating_point():
            dtype = str(tensor.dtype).removeprefix("torch.")
            misfits["not of real numbers"].append(f"{key} is {dtype}")
    if not any(misfits.values()):
        return

    remedy = _remedy(misfits, state, bare, origin)
    raise SourceError(f"{origin} does not fit {name}", listed(misfits), remedy)


def _remedy(
    misfits: Mapping[str, Sequence[str]],
    state: Mapping[str, Tensor],
    bare: Mapping[str, Tensor],
    origin: str,
) -> str:
    """Return what a user should do about a file whose tensors are not those of the network.

    Args:
        misfits: The names of the tensors that do not fit, by the kind of misfit.
        state: The file's tensors by name.
        bare: The tensors of the network that is to be filled, by name.
        origin: The name of the file.
    """
    remedy = "Check the architecture, its arguments, the number of classes and prefixes of names"
    # If only the number of classes differs, that number can be asked for.
    classes = _classes_of(state, bare)
    if classes and not (misfits["missing"] or misfits["unexpected"]):
        remedy = f"`{spelled('num_classes', classes)}` gives the network such a head"
    # The name is that of one shard, such as model-00001-of-00003.safetensors.
    elif re.search(r"-\d+-of-\d+\.", origin):
        remedy = "It is one of several files: write the tensors of all of them into one"
    # Without running statistics, the BatchNorms were folded away, or only parameters were saved.
    elif misfits["missing"] and not any(key.endswith("running_mean") for key in state):
        remedy = (
            "It was converted or fused. Of a converted network, name the directory of the"
            " conversion: `DIR --weights FILE`. Open a fused one as the network without BatchNorm;"
            " `--to batchnorm --like ARCH` goes back"
        )
        if all(_has_its_gamma(key, state) for key in misfits["missing"]):
            remedy = (
                "It holds parameters alone, as an average of parameters does. Save"
                " model.state_dict(), which has the running statistics, too; in Python,"
                " load_state_dict(..., strict=False) and normswap.recalibrate measure them"
            )
    return remedy


def _classes_of(state: Mapping[str, Tensor], bare: Mapping[str, Tensor]) -> int:
    """Return the number of classes of the file's network, if only that number differs.

    Args:
        state: The file's tensors by name.
        bare: The tensors of the network that is to be filled, by name.

    Returns:
        The number of classes in the file. 0 if no shape differs, or if other shapes differ, too.
    """
    # Another number of classes changes the first dimension of one layer's tensors: the head's.
    differing = [key for key in bare if key in state and state[key].shape != bare[key].shape]
    first_dimensions = {state[key].shape[0] for key in differing if state[key].ndim}
    layers = {key.rpartition(".")[0] for key in differing}
    is_head = len(layers) == 1 and all(
        state[key].shape[1:] == bare[key].shape[1:] for key in differing
    )
    if not is_head or len(first_dimensions) != 1:
        return 0
    return first_dimensions.pop()


def _has_its_gamma(missing: str, state: Mapping[str, Tensor]) -> bool:
    """Return whether a missing tensor is a running statistic of a norm, and the file has its gamma.

    Args:
        missing: The name of the missing tensor, such as `layer1.0.bn1.running_mean`.
        state: The file's tensors by name.
    """
    path, _, leaf = missing.rpartition(".")
    is_statistic = leaf in (*_STATISTICS, "num_batches_tracked")
    return is_statistic and copying.dotted(path, "weight") in state
