"""A whole network that `torch.save` pickled, read without any of its code.

torch's own reader of weights makes the tensors, and calls nothing that it does not know. Each other name that the file
calls for is given to it as an inert class: objects of it hold what the file says of them, and do nothing.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from normswap.errors import quiet

# A training script keeps the averaged network, or the one that it trains.
_PLACES = ("ema", "model", "module")


class _Inert(dict[Any, Any]):
    """Any object of a pickle: the arguments that would make it, its items, its attributes."""

    arguments: tuple[Any, ...] = ()
    attributes: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, *arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.attributes = state if isinstance(state, dict) else {}


def read(file: Path) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    """Return the attributes and the tensors of the network that a file holds whole, alone or under a usual key.

    Raises TypeError, or what torch raises: it holds none, is damaged, or needs what torch refuses by its name.
    """
    names = torch.serialization.get_unsafe_globals_in_checkpoint(str(file))
    with quiet(), torch.serialization.safe_globals([(type(name, (_Inert,), {}), name) for name in names]):
        content = torch.load(file, map_location="cpu", weights_only=True)
    places = (content, *map(content.get, _PLACES))
    network = next((place for place in places if getattr(place, "attributes", {}).get("_modules")), None)
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
