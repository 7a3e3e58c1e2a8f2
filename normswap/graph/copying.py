"""A copy of a network to run: its own modules and containers, the same parameters, buffers of its own.

Forward may write to attributes and buffers (caches, counters); what is run must not be the user's network. Whatever
cannot be copied (a lock, a Python module, a tensor with a history) is shared.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
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
    """A copy in eval mode."""
    memo: dict[int, Any] = {}
    modules = list({id(module): module for module in tree(model).values()}.values())
    shells = []
    for module in modules:
        shell = module if isinstance(module, torch.jit.ScriptModule) else object.__new__(type(module))
        memo[id(module)] = shell
        shells.append(shell)
        memo.update({id(buffer): buffer.detach().clone() for buffer in module._buffers.values() if buffer is not None})
    for module, shell in zip(modules, shells, strict=True):
        if shell is not module:
            shell.__dict__.update({name: _copied(value, memo) for name, value in vars(module).items()})
            shell.__dict__["training"] = False
    return memo[id(model)]


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
