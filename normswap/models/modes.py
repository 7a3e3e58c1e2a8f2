"""Eval mode for a while, or nearly training mode; and how far a long piece of work has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
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


@contextmanager
def with_heads(*models: nn.Module) -> Iterator[None]:
    """As in training, where forward also runs auxiliary heads, but every layer computes what it does in eval mode; back
    in each module's own mode afterwards. What is drawn meanwhile is the same each time.
    """
    with evaluating(*models), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for model in models:
            show_heads(model)
        yield


def show_heads(model: nn.Module) -> None:
    """Let the modules that hold others, whose forward may ask for it, be in training mode; layers stay as they are."""
    for module in nn.Module.modules(model):
        if module._modules and not type(module).__module__.startswith("torch.nn"):
            module.__dict__["training"] = True
