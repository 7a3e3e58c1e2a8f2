"""Running statistics that are not finite: refused where a network is to be used, taken where they are to be mended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

_NAMES = ("running_mean", "running_var")
_TAKEN: ContextVar[bool] = ContextVar("_TAKEN", default=False)


@contextmanager
def taken() -> Iterator[None]:
    """Broken statistics are read as they are, for whoever looks at them or measures them anew."""
    token = _TAKEN.set(True)
    try:
        yield
    finally:
        _TAKEN.reset(token)


def are_taken() -> bool:
    """Whether they are read as they are."""
    return _TAKEN.get()


def are_all(names: Sequence[str]) -> bool:
    """Whether tensors by these names are running statistics, all of them."""
    return all(name.endswith(_NAMES) for name in names)
