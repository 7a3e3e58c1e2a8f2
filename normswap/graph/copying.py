"""Copies of a network: one to run, with the same parameters, and one of everything.

Forward may write to attributes and buffers (caches, counters); what is run must not be the user's network. Whatever
cannot be copied (a lock, a Python module, a tensor with a history) is shared.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


def tree(model: nn.Module) -> dict[str, nn.Module]:
    """Every module by every path, as `named_modules` says it, whatever a class may have put in that method's place."""
    found: dict[str, nn.Module] = {}
    ahead: list[tuple[str, nn.Module]] = [("", model)]
    while ahead:
        path, module = ahead.pop()
        found[path] = module
        children = [(name, child) for name, child in module._modules.items() if child is not None]
        ahead += [(f"{path}.{name}" if path else name, child) for name, child in reversed(children)]
    return found


def twin(model: nn.Module) -> nn.Module:
    """A copy in eval mode, for one run."""
    copied = _copy(model, {}, lambda tensor: tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone())
    for module in tree(copied).values():
        if not isinstance(module, torch.jit.ScriptModule):
            module.__dict__["training"] = False
    return copied


def duplicate(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """`copy.deepcopy`, also of a network that holds what cannot be copied: that is shared."""
    attempt = dict(memo)
    try:
        copied: nn.Module = copy.deepcopy(model, attempt)
    except Exception:  # whatever it holds raises
        return _copy(model, memo, _cloned)
    memo.update(attempt)
    return copied


def _copy(model: nn.Module, memo: dict[int, Any], own: Callable[[Tensor], Tensor]) -> nn.Module:
    fresh: list[tuple[nn.Module, nn.Module]] = []
    for module in tree(model).values():
        if id(module) in memo:
            continue
        shell = module if isinstance(module, torch.jit.ScriptModule) else object.__new__(type(module))
        memo[id(module)] = shell
        if shell is not module:
            fresh.append((module, shell))
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = own(tensor)
    for module, shell in fresh:
        shell.__dict__.update({name: _copied(value, memo) for name, value in vars(module).items()})
    copied: nn.Module = memo[id(model)]
    return copied


def _cloned(tensor: Tensor) -> Tensor:
    value = tensor.detach().clone()
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, Tensor):
        return value
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _copied(part, memo)) for key, part in value.items())
    if type(value) in (list, tuple, set):
        return type(value)(_copied(part, memo) for part in value)
    if type(value) is MethodType:
        return MethodType(value.__func__, _copied(value.__self__, memo))
    if type(value) is functools.partial:
        return functools.partial(_copied(value.func, memo), *_copied(value.args, memo), **_copied(value.keywords, memo))
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # whatever its class raises
        return value
