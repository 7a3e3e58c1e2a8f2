"""The tensors of a whole network that `torch.save` pickled, read without any of its code.

Each name that the pickle calls for, torch's own too, becomes a record that does nothing: nothing that the file names is
imported or called. The tensors are then cut out of the file's storages.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

_TYPES = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Bool")
_STORAGES = {f"{name}Storage": getattr(torch, name.lower()) for name in _TYPES} | {"ByteStorage": torch.uint8}
# A training script keeps the averaged network, or the one that it trains.
_PLACES = ("ema", "model", "module")


class _Inert(dict[Any, Any]):
    """Any object of a pickle: its class's own name, the arguments that would make it, its items, its attributes."""

    name = ""
    arguments: tuple[Any, ...] = ()
    attributes: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, *arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.attributes = state if isinstance(state, dict) else {}


class _Unpickler(pickle.Unpickler):
    """Storages are what the file says of them: ("storage", type, key, device, number of elements)."""

    def find_class(self, _module: str, name: str) -> type[_Inert]:
        return type(name, (_Inert,), {"name": name})

    def persistent_load(self, storage: Any) -> Any:
        return storage


def read(file: Path) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    """Return the attributes and the tensors of the network that a file holds whole, alone or under a usual key.

    Raises TypeError, or what zipfile, pickle and torch raise: it holds none, is damaged, or has unusual tensors.
    """
    with zipfile.ZipFile(file) as archive:
        (index,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        content = _Unpickler(io.BytesIO(archive.read(index))).load()
        places = (content, *map(content.get, _PLACES))
        network = next((place for place in places if "_modules" in getattr(place, "attributes", ())), None)
        if network is None:
            raise TypeError("it holds no whole network")
        folder = index.removesuffix("data.pkl") + "data/"
        return network.attributes, {name: _tensor(record, archive, folder) for name, record in _named(network, "")}


def _named(module: _Inert, prefix: str) -> Iterator[tuple[str, _Inert]]:
    """Yield what `state_dict` has, in its order."""
    inside = module.attributes
    transient = inside.get("_non_persistent_buffers_set", ())
    # Before protocol 4, a set is pickled as its type and a list.
    if isinstance(transient, _Inert):
        (transient,) = transient.arguments
    for name, record in {**inside["_parameters"], **inside["_buffers"]}.items():
        if record is not None and name not in transient:
            yield prefix + name, record
    for name, child in inside["_modules"].items():
        if child is not None:
            yield from _named(child, f"{prefix}{name}.")


def _tensor(record: _Inert, archive: zipfile.ZipFile, folder: str) -> Tensor:
    if record.name in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
        return _tensor(record.arguments[0], archive, folder)
    if record.name != "_rebuild_tensor_v2":
        raise TypeError(f"a tensor is made by {record.name}")
    (_, kind, key, _, _), offset, size, stride = record.arguments[:4]
    dtype = _STORAGES[kind.name]
    if not math.prod(size):
        return torch.empty(size, dtype=dtype)
    storage = torch.frombuffer(bytearray(archive.read(folder + key)), dtype=dtype)
    return storage.as_strided(size, stride, offset).clone(memory_format=torch.contiguous_format)
