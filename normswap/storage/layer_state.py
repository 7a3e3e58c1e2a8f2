"""What a network's state dict holds beside its tensors, and what it leaves out.

These are the versions of layers, extra state of layers that is no tensor, and the dtypes of buffers
that are not saved. A layer reads its version when it is loaded, to convert an old checkpoint.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from normswap import copying, reading
from normswap.copying import dotted
from normswap.errors import OutputError, first_few, first_line
from normswap.models import weight_files
from normswap.models.weight_files import StateDict
from normswap.storage.header import FLOATS, Header, Scalar

# The version of a layer that states none, as torch has it.
_USUAL: dict[str, Scalar] = {"version": 1}
# The attributes in which torch keeps the hooks that have to do with a module's state dict.
_HOOKS = (
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_NOT_LOADED = "cannot save the network: with its own hooks it would not come back as it is"
_ABOUT_HOOKS = (
    "Remove the hooks that `register_load_state_dict_pre_hook` and the like have put on it, or let"
    " them pass on what this network saves"
)


@dataclass(frozen=True)
class LayerState:
    """All that is saved of a network's state dict.

    Args:
        tensors: The tensors of the state dict.
        layers: The version of each layer that wrote tensors, and other plain metadata, by the
            layer's path. torch hands them to the layer that loads the tensors. A layer whose only
            entry is version 1 is left out.
        extra_state: The extra state of layers as JSON, by its name in the state dict.
        unsaved: The dtype of each floating-point buffer that is not saved, by its name.
    """

    tensors: dict[str, Tensor]
    layers: dict[str, dict[str, Scalar]]
    extra_state: dict[str, str]
    unsaved: dict[str, str]

    def record(self) -> dict[str, object]:
        """Return what the header of the weights file stores of a network's layers, by its keys.

        This is all of the state dict but the tensors. `extra_state` and `unsaved` are left out if
        they are empty.
        """
        optional = {"extra_state": self.extra_state, "unsaved": self.unsaved}
        non_empty = {name: entries for name, entries in optional.items() if entries}
        return {"layers": self.layers, **non_empty}


def of(model: nn.Module) -> LayerState:
    """Return all that is to be saved of a network's state dict.

    Raises:
        OutputError: A tensor, or the extra state of a layer, cannot be saved.
    """
    state = weight_files.state_dict(model)
    tensors: dict[str, Tensor] = {}
    extra_state: dict[str, str] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            _check_tensor(name, value)
            tensors[name] = value
        else:
            extra_state[name] = _as_json(name, value)
    _check_hooks(model, state)

    layers: dict[str, dict[str, Scalar]] = {}
    # torch keeps the layers' versions in an attribute of the state dict. A state dict that a
    # network makes itself may lack it.
    for path, entries in (getattr(state, "_metadata", None) or {}).items():
        plain = {key: value for key, value in entries.items() if isinstance(value, Scalar)}
        # Most layers only have version 1 (`_USUAL`). `restore` assumes it for layers that are not
        # in the record.
        if plain not in (_USUAL, {}):
            layers[path] = plain
    return LayerState(tensors, layers, extra_state, _unsaved(model, tensors))


def restore(model: nn.Module, state: StateDict, record: Header) -> None:
    """Add what a file's header says of layers to the file's tensors, as torch expects it.

    These are the versions of the layers (`_metadata`) and their extra state (`extras`).

    Args:
        model: The network, which is not changed. The header of an older file has no versions of
            layers. Then those of this network's layers are taken.
        state: The tensors of the file, which are written to.
        record: The header of the file.
    """
    layers: dict[str, dict[str, object]] = {}
    for path, module in copying.tree(model).items():
        if record.layers is None:
            layers[path] = {"version": module._version}
        # A layer that is not in the record has version 1.
        else:
            layers[path] = {**_USUAL, **record.layers.get(path, {})}
    state._metadata = layers
    state.extras = {name: json.loads(text) for name, text in record.extra_state.items()}


def _check_hooks(model: nn.Module, state: dict[str, Any]) -> None:
    """Raise OutputError if the network's own hooks would load something else than was saved.

    torch calls such hooks when a state dict is made and when it is loaded. They may rename tensors
    or change values, and a conversion may have taken a layer away that they ask for.

    Args:
        model: The network, which is not changed.
        state: Its state dict.
    """
    if not any(_has_hooks(module) for module in copying.tree(model).values()):
        return

    # A hook may write to what it is given, so it is given copies.
    copies = OrderedDict(
        (name, value.clone() if isinstance(value, Tensor) else value)
        for name, value in state.items()
    )
    copies._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined]
    loaded = copying.duplicate(model, {})
    try:
        loaded.load_state_dict(copies)
    # A hook is the user's code, which may raise anything.
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"
        raise OutputError(f"{_NOT_LOADED}: {why}", remedy=_ABOUT_HOOKS) from error

    read = copying.tensors(loaded)
    changed = [
        name
        for name, tensor in copying.tensors(model).items()
        if name not in read or not _is_same(tensor, read[name])
    ]
    if changed:
        why = f"{first_few(changed)} would have other values"
        raise OutputError(f"{_NOT_LOADED}: {why}", remedy=_ABOUT_HOOKS)


def _has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks that torch calls when a state dict is made or loaded."""
    return any(vars(module).get(name) for name in _HOOKS)


def _is_same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and numbers. NaN is the same as NaN."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    both_nan = (first != first) & (second != second)
    return bool(((first == second) | both_nan).all())


def _check_tensor(name: str, tensor: Tensor) -> None:
    """Raise OutputError for a tensor that is sparse, quantized, nested or of a class of its own.

    Args:
        name: The name of the tensor, for the message.
        tensor: The tensor.
    """
    is_plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    if not is_plain or is_traceable_wrapper_subclass(tensor):
        why = f"{name} is sparse, quantized or of another kind: {type(tensor).__name__}"
        remedy = "Save the network as it was before, with plain tensors"
        raise OutputError("cannot save the network", why, remedy)


def _as_json(name: str, value: object) -> str:
    """Return the extra state of a layer (what its `get_extra_state` returns) as JSON.

    Args:
        name: The name of the extra state in the state dict, for the message.
        value: The extra state.

    Raises:
        OutputError: The extra state is no plain data, so it would not be the same after loading.
    """
    try:
        text = json.dumps(value)
        same = reading.parse_json(text, finite=False) == value
    # JSON has no objects of other classes, and no value that holds itself. A comparison may fail,
    # too, as the user's classes decide how they compare.
    except (TypeError, ValueError, RecursionError) as error:
        text = ""
        same = False
        reason = first_line(error)
    else:
        reason = f"a {type(value).__name__} in it would not come back as it is"
    # The header takes no longer text (`header.JsonText`).
    if not same or len(text) > 1_000_000:
        remedy = (
            "Let get_extra_state return a tensor, or numbers, text, lists and dicts with text as"
            " keys"
        )
        raise OutputError(f"cannot save {name}, the extra state of a layer", reason, remedy)
    return text


def _unsaved(model: nn.Module, saved: dict[str, Tensor]) -> dict[str, str]:
    """Return the dtype of each floating-point buffer that is not saved, by the buffer's name.

    Args:
        model: The network.
        saved: The tensors that are saved, by name.
    """
    unsaved: dict[str, str] = {}
    for path, module in copying.tree(model).items():
        for name, buffer in module._buffers.items():
            full_name = dotted(path, name)
            if buffer is None or full_name in saved or not buffer.is_floating_point():
                continue
            dtype = str(buffer.dtype).removeprefix("torch.")
            if dtype in FLOATS:
                unsaved[full_name] = dtype
    return unsaved
