"""Eval mode for a while; and how far a long piece of work has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from torch import nn

Progress: TypeAlias = Callable[[int, int], None]  # called with what is done, and the total (0 where it is not known)


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """All of them in eval mode, and back in each module's own mode afterwards."""
    modes = [(module, module.training) for model in models for module in nn.Module.modules(model)]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode
