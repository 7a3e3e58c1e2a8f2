"""Pickles of torch, read without running anything in them.

torch's own reader of weights (`weights_only`) makes the tensors, and calls nothing that it does not
know. Each other name that a pickled network calls for is given to it as an inert class.
"""

import argparse
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normswap.errors import quiet

# The keys under which training scripts keep a network: the averaged one, or the one in training.
_KEYS_OF_NETWORKS = ("ema", "model", "module")
# More modules than this has no network. One that holds itself has no end.
_MOST_MODULES = 100_000
_MOST_LEVELS = 200
# torch stores archives uncompressed. In a compressed one, a few bytes may unpack to terabytes.
_MOST_TIMES_LARGER = 16
_ALWAYS_ALLOWED = 2**28


class OutgrownFileError(ValueError):
    """A file states a content that is far larger than the file itself, and is not read."""


def unpickle(file: Path) -> object:
    """Return what a file of `torch.save` holds: tensors and plain containers.

    If the file holds a whole network, its tensors are returned by name. For a file that is damaged,
    or needs other Python objects, torch's own errors are raised.
    """
    _check_archive(file)
    try:
        # timm's own training checkpoints carry their arguments as a Namespace, which is inert.
        with quiet(), torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(file, map_location="cpu", weights_only=True)
    # torch raises many kinds of errors for a file that is none of its own.
    except Exception:
        # The file may hold a whole network. If it does not, torch's own error tells more.
        # `read_pickled_network` returns a pair: the network's attributes and its tensors.
        with suppress(Exception):
            return read_pickled_network(file)[1]
        raise


def unknown_names(file: Path) -> list[str]:
    """Return the names of the Python classes and functions that a pickle needs and torch refuses.

    The list is empty if the file cannot be read.
    """
    # torch raises many kinds of errors for a file that is none of its own.
    with suppress(Exception):
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(file)))
    return []


def check_sizes(state: Mapping[str, Tensor], file: Path) -> None:
    """Raise OutgrownFileError if tensors have far more bytes than their file.

    A tensor whose stride is 0 repeats one number of the file as often as its shape says.
    """
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    if size > _MOST_TIMES_LARGER * file.stat().st_size + _ALWAYS_ALLOWED:
        raise OutgrownFileError(f"its tensors have {size} bytes, more than the file can hold")


def _check_archive(file: Path) -> None:
    """Raise OutgrownFileError if a file is a zip archive that unpacks to far more than its size."""
    if not zipfile.is_zipfile(file):
        return
    with zipfile.ZipFile(file) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    if size > _MOST_TIMES_LARGER * file.stat().st_size + _ALWAYS_ALLOWED:
        raise OutgrownFileError(f"it unpacks to {size} bytes")


class _Inert(dict[object, object]):
    """An object that stands for one of an unknown class in a pickle, whose code must not be run.

    It is a dict of that object's items, and `attributes` has that object's attributes.
    """

    attributes: Mapping[str, Any] = {}

    def __init__(self, *arguments: object) -> None:
        super().__init__()

    def __setstate__(self, state: object) -> None:
        self.attributes = state if isinstance(state, dict) else {}


def read_pickled_network(file: Path) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    """Return the attributes and the tensors of a whole network that `torch.save` pickled.

    None of the network's code is run.

    Args:
        file: The file. It holds the network alone, or a dict with the network under a key that
            training scripts use, such as `model`.

    Raises:
        TypeError: The file holds no network. Torch raises errors of its own where the file is
            damaged, or needs a class that torch refuses by its name.
    """
    _check_archive(file)
    names = torch.serialization.get_unsafe_globals_in_checkpoint(str(file))
    # For each class or function that the file names, and that torch does not know, torch gets an
    # empty class in its place.
    inert: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
        (type(name, (_Inert,), {}), name) for name in names
    ]
    with quiet(), torch.serialization.safe_globals(inert):
        content = torch.load(file, map_location="cpu", weights_only=True)

    # A network is a dict as well (`_Inert`), in which no such key is found.
    candidates = (content, *map(content.get, _KEYS_OF_NETWORKS))
    network = next((each for each in candidates if _is_network(each)), None)
    if network is None:
        raise TypeError("it holds no whole network")

    state = dict(_named_tensors(network))
    check_sizes(state, file)
    return network.attributes, state


def _is_network(candidate: object) -> bool:
    """Return whether an object that was read from a pickle stands for a network.

    It must stand for a torch module that holds other modules.
    """
    return isinstance(candidate, _Inert) and bool(candidate.attributes.get("_modules"))


def _named_tensors(network: _Inert) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of a pickled network with its name, as its `state_dict` would have them.

    Args:
        network: The object that stands for the network. None of the network's code is run.
    """
    # A stack, not a recursion, because a damaged file may say that a network holds itself.
    pending = [(network, "", 0)]
    count = 0
    while pending:
        module, prefix, level = pending.pop()
        count += 1
        if count > _MOST_MODULES or level > _MOST_LEVELS:
            raise ValueError("it has more modules than a network has")

        inside = module.attributes
        transient = inside.get("_non_persistent_buffers_set", ())
        for name, tensor in {**inside["_parameters"], **inside["_buffers"]}.items():
            if tensor is not None and name not in transient:
                yield prefix + name, tensor.detach()

        children = inside["_modules"].items()
        below = [
            (child, f"{prefix}{name}.", level + 1) for name, child in children if child is not None
        ]
        pending += reversed(below)
