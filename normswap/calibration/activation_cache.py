"""Values in files of a temporary folder, read when they are asked for.

A file that holds nothing any more is written over, for a page that the system has at hand takes a tenth of the time of
a new one. So plain tensors are written as their bytes, without a frame that says how long they are.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

Values: TypeAlias = MutableMapping[str, Any]
Form: TypeAlias = tuple[torch.dtype, torch.Size, torch.device]


@dataclass(frozen=True, eq=False)
class CacheEntry:
    """Where something lies.

    Args:
        forms: of plain tensors, one behind the other; None: what torch.save wrote.
    """

    file: Path
    forms: tuple[Form, ...] | None = None


class TensorFiles:
    """A temporary folder of files that are used again."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="normswap-")
        self.made = 0
        self.spare: dict[Path, int] = {}  # files that hold nothing any more, and their lengths

    def put(self, tensors: Sequence[Tensor]) -> CacheEntry:
        """Write plain tensors."""
        rows = _on_cpu([tensor.detach() for tensor in tensors])
        wanted = sum(tensor.nbytes for tensor in rows)
        # the shortest that is long enough; else the longest
        file = min(self.spare, key=lambda one: (self.spare[one] < wanted, abs(self.spare[one] - wanted)), default=None)
        if file is None:
            file = self._new()
            file.touch()
        else:
            del self.spare[file]
        with file.open("r+b") as opened:
            for tensor in rows:
                opened.write(_bytes(tensor))
        return CacheEntry(file, tuple((tensor.dtype, tensor.shape, tensor.device) for tensor in tensors))

    def put_anything(self, value: object) -> CacheEntry:
        """Write whatever torch.save takes, views of the same memory as such."""
        file = self._new()
        torch.save(value, file)
        return CacheEntry(file)

    def read(self, entry: CacheEntry) -> Any:
        """The values that were put: a list of tensors, or anything."""
        if entry.forms is None:
            return torch.load(entry.file, weights_only=False)
        tensors = []
        with entry.file.open("rb") as opened:
            for dtype, shape, device in entry.forms:
                tensor = torch.empty(shape, dtype=dtype)
                opened.readinto(_bytes(tensor))
                tensors.append(tensor.to(device))
        return tensors

    def free(self, entry: CacheEntry) -> None:
        """It is not read any more."""
        if entry.forms is None:
            entry.file.unlink()
        else:
            self.spare[entry.file] = entry.file.stat().st_size

    def close(self) -> None:
        self.folder.cleanup()

    def _new(self) -> Path:
        self.made += 1
        return Path(self.folder.name) / str(self.made)


def _on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The values on the CPU; those of a device come as bytes in one copy, for each copy is a wait."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [*tensors]
    rows = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return [*torch.cat(rows).cpu().split([len(row) for row in rows])]


def _bytes(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else bytearray()


class ActivationCache(Values):
    """Values by name; those that lie in files are read when they are asked for.

    Args:
        entries: where each lies, in a dict or, a tensor, in a list of one; those that share memory lie together.
        held: those in memory.
    """

    def __init__(self, store: TensorFiles, entries: Mapping[str, CacheEntry]) -> None:
        self.store, self.entries, self.held = store, dict(entries), dict[str, object]()

    def __getitem__(self, name: str) -> object:
        if name not in self.held:
            entry = self.entries[name]
            values = self.store.read(entry)
            together = {name: values[0]} if entry.forms else values
            self.held |= {one: together[one] for one in together if self.entries.get(one) is entry}
        return self.held[name]

    def __setitem__(self, name: str, value: object) -> None:
        self.held[name] = value

    def __delitem__(self, name: str) -> None:
        self.entries.pop(name, None)
        self.held.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter({**self.entries, **self.held})

    def __len__(self) -> int:
        return len({**self.entries, **self.held})

    def keep(self, before: Mapping[str, CacheEntry]) -> dict[str, CacheEntry]:
        """Where the values lie now that lay in `before`: what is new is written, what nobody reads any more is gone."""
        unwritten = [*self._unwritten()]
        written = {name for together in unwritten for name in together}
        now = {name: entry for name, entry in self.entries.items() if name not in written}
        for entry in {*before.values()} - {*now.values()}:  # first, so that what is new can lie there
            self.store.free(entry)
        for together in unwritten:
            now.update(dict.fromkeys(together, self._put(together)))
        return now

    def _unwritten(self) -> Iterator[dict[str, object]]:
        """Those that are to be written, together what shares memory."""
        shared: dict[object, dict[str, object]] = {}
        for name, value in self.held.items():
            memory = value.untyped_storage().data_ptr() if isinstance(value, Tensor) and value.numel() else name
            shared.setdefault(memory, {})[name] = value
        for together in shared.values():
            if len({self.entries.get(name) for name in together}) > 1 or not together.keys() <= self.entries.keys():
                yield together

    def _put(self, together: dict[str, object]) -> CacheEntry:
        (first, *more) = together.values()
        if not more and type(first) is Tensor and first.layout == torch.strided and first.is_contiguous():
            return self.store.put([first])
        return self.store.put_anything(together)
