"""What one part of a program hands to another: calls across a border, with their arguments.

with calls_across("normswap/cli/", "normswap/") as calls:
    main(["inspect", "demo"])
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from normswap.models.preprocessing import stated

# A function's name with its arguments by name.
Call = tuple[str, dict[str, object]]
_PLAIN = (str, int, float, bool, type(None), complex, torch.dtype, torch.device, torch.Size)
_LEVELS = 4


def told(value: object, levels: int = _LEVELS) -> object:
    """Return a value as plain data, so that two values can be compared.

    Of a network it is what it states of its images, of other objects their type alone.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, nn.Module):
        return type(value).__name__, told(dict(stated(value)), levels - 1)
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape)
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, Path):
        return str(value)

    parts = _parts(value)
    if not levels or parts is None:
        return type(value).__name__
    return type(value).__name__, {name: told(part, levels - 1) for name, part in parts.items()}


def _parts(value: object) -> dict[str, object] | None:
    """Return the parts of a collection or a record by name, or None for another object."""
    if isinstance(value, Mapping):
        return {str(key): part for key, part in value.items()}
    if isinstance(value, list | tuple | range):
        return {str(number): part for number, part in enumerate(value)}
    if isinstance(value, set | frozenset):
        return {part: part for part in sorted(map(str, value))}
    if isinstance(value, functools.partial):
        owner = getattr(value.func, "__self__", None)
        return {"owner": owner, "given": value.args, **value.keywords}
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    return None


def arguments(frame: FrameType) -> dict[str, object]:
    """Return the arguments of a call that has just begun, by name, as plain data."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)
    return {name: told(frame.f_locals.get(name)) for name in code.co_varnames[:count]}


@contextmanager
def calls_across(
    caller: str, callee: str, *, without: tuple[str, ...] = ()
) -> Iterator[list[Call]]:
    """Yield a list that receives each call from one part of a program into another.

    Args:
        caller: A part of the paths of the files that call.
        callee: A part of the paths of the files that are called. Those that call are not among
            them.
        without: Parts of the paths of files whose calls say nothing.
    """
    calls: list[Call] = []

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_back is None:
            return
        called = frame.f_code.co_filename
        if (
            callee not in called
            or caller in called
            or caller not in frame.f_back.f_code.co_filename
        ):
            return
        if not any(part in called for part in without):
            calls.append((frame.f_code.co_qualname, arguments(frame)))

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield calls
    finally:
        sys.setprofile(before)
