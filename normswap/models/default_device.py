"""Under `torch.set_default_device` normswap makes its tensors on the CPU; a forward makes its own beside its images.

torch's default device takes every tensor that is made without `device=`, also one that is drawn by a CPU generator. So
the functions that a user calls set it to the CPU for their duration. What is the user's own, a forward or a loader that
is read meanwhile, has another default again. Where nobody has set one, nothing is switched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TypeVar

import torch

T = TypeVar("T")
_CPU = torch.device("cpu")
_users: ContextVar[torch.device | None] = ContextVar("_users", default=None)  # what it was before `cpu_by_default`


@contextmanager
def cpu_by_default() -> Iterator[None]:
    """Make tensors on the CPU where no device is named."""
    users = torch.get_default_device()
    if users == _CPU:
        yield
        return
    before = _users.set(users)
    try:
        with _CPU:
            yield
    finally:
        _users.reset(before)


def in_forward(device: torch.device) -> AbstractContextManager[object]:
    """While a network runs whose images are on `device`: what its forward makes is there.

    A user who set a default device wrote the forward for a network on it; it is run on copies elsewhere, too.
    """
    return nullcontext() if _users.get() is None else device


def called(function: Callable[[], T]) -> T:
    """Call a function of the user's while the default device is the user's."""
    with _users.get() or nullcontext():
        return function()


def read(batches: Iterable[T]) -> Iterator[T]:
    """The user's batches, each made while the default device is the user's: a loader's generator is of that device."""
    return _each(batches, lambda: _users.get() or nullcontext())


def read_on_cpu(batches: Iterable[T]) -> Iterator[T]:
    """Batches of our own, whose generators are the CPU's, whoever reads them."""
    return _each(batches, cpu_by_default)


def _each(batches: Iterable[T], around: Callable[[], AbstractContextManager[object]]) -> Iterator[T]:
    """Every batch, made inside `around`; what reads it is outside."""
    with around():
        iterator = iter(batches)
    while True:
        try:
            with around():
                batch = next(iterator)
        except StopIteration:
            return
        yield batch
