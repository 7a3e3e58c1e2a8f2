"""Eval mode for a while, or nearly training mode, hooks, full precision; and how far a long piece
of work has come.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normswap.layers.seeding import seeded

# Called with the number of steps so far, and the total (0 where it is not known).
Progress: TypeAlias = Callable[[int, int], None]


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Put all of them in eval mode, and each module back in its own mode afterwards."""
    modes = [(module, module.training) for model in models for module in nn.Module.modules(model)]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def undisturbed(*models: nn.Module) -> Iterator[None]:
    """Eval mode for networks that belong to somebody: whatever a forward writes meanwhile is undone
    afterwards.

    Counters, caches, a first batch that sets a scale: attributes and tensors of modules whose class
    is not torch's own.
    """
    with ExitStack() as stack:
        for module in {module for model in models for module in nn.Module.modules(model)}:
            if not type(module).__module__.startswith("torch."):
                stack.callback(_restore, module, dict(vars(module)), list(_contents(module)))
        stack.enter_context(evaluating(*models))
        yield


# What every module has beside its tensors and children: hooks, which no forward registers.
_HOOKS = vars(nn.Module()).keys() - {"_parameters", "_buffers", "_modules"}
# An object, a copy of its contents, and the memory of a tensor.
Contents: TypeAlias = tuple[Any, Any, Tensor | None]


def _contents(module: nn.Module) -> Iterator[Contents]:
    """What the module holds itself and may write into: tensors and plain collections, those inside
    of others too.
    """
    values = [value for name, value in vars(module).items() if name not in _HOOKS]
    values += [*module._parameters.values(), *module._buffers.values()]
    visited = set[int]()
    while values:
        value = values.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, Tensor) and not value.is_meta:
            yield value, value.detach().clone(), value.data
        elif type(value) in (dict, OrderedDict, list, set, tuple):
            values += value.values() if isinstance(value, dict) else value
            if not isinstance(value, tuple):
                yield value, copy.copy(value), None


@torch.no_grad()
def _restore(module: nn.Module, attributes: dict[str, object], contents: list[Contents]) -> None:
    for value, before, memory in contents:
        if memory is not None:
            value.data = memory
            if not torch.equal(memory, before):
                memory.copy_(before)
        elif isinstance(value, list):
            value[:] = before
        else:
            value.clear()
            value.update(before)
    vars(module).clear()
    vars(module).update(attributes)


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Keep hooks for a while: all are removed afterwards, and where registering one of them fails."""
    with ExitStack() as hooks:
        for handle in handles:
            hooks.enter_context(handle)
        yield


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute float32 as it is written: a GPU's TF32, which torch allows in convolutions, keeps 10
    bits of a factor.

    Tensors that are made meanwhile can be trained, also where the caller is in
    `torch.inference_mode`.
    """
    cudnn = torch.backends.cudnn
    products = torch.backends.cuda.matmul
    holders: list[Any] = [cudnn, products]
    switch = "allow_tf32"
    off = cast(object, False)
    try:
        before = [getattr(holder, switch) for holder in holders]
    # Values that were set by torch's newer names cannot be read by the older ones.
    except RuntimeError:
        holders = [cast(Any, cudnn).conv, products]
        switch = "fp32_precision"
        off = "ieee"
        before = [getattr(holder, switch) for holder in holders]
    try:
        for holder in holders:
            setattr(holder, switch, off)
        with torch.inference_mode(False):
            yield
    finally:
        for holder, value in zip(holders, before, strict=True):
            setattr(holder, switch, value)


@contextmanager
def with_heads(*models: nn.Module) -> Iterator[None]:
    """Let forward run auxiliary heads as in training, with layers in eval mode and the same random
    draws each time.
    """
    with undisturbed(*models):
        for model in models:
            show_heads(model)
        with seeded(*{p.device for model in models for p in model.parameters()}):
            yield


def show_heads(model: nn.Module) -> None:
    """Let the modules that hold others, whose forward may ask for it, be in training mode; layers
    stay as they are.
    """
    for module in nn.Module.modules(model):
        if module._modules and not type(module).__module__.startswith("torch.nn"):
            module.__dict__["training"] = True
