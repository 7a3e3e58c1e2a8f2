"""Copies of a network: one to run, with the same parameters, and one of everything.

Forward may write to attributes and buffers (caches, counters); what is run must not be the user's
network. Whatever cannot be copied (a lock, a Python module, a tensor with a history) is shared.
"""

import copy
import functools
from collections import ChainMap, OrderedDict
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

_NUMBERS = (type(None), bool, int, float, complex, str, bytes)
_ATOMS = {*_NUMBERS, type, FunctionType, BuiltinFunctionType, torch.dtype, torch.device}
# The copy of each object, by the object's identity.
Memo: TypeAlias = dict[int, Any]
Module = TypeVar("Module", bound=nn.Module)


def dotted(path: str, name: str) -> str:
    """The path of what is called `name` in the module at `path`; the network's own path is empty."""
    return f"{path}.{name}".removeprefix(".")


def doubled(tensor: Tensor | None, default: Tensor) -> Tensor:
    """A parameter's values in float64; `default` where the layer has none."""
    if tensor is None:
        return default
    return tensor.detach().double()


def tree(model: nn.Module) -> dict[str, nn.Module]:
    """Every module by every path, as `named_modules` says it, whatever a class may have put in that
    method's place.
    """
    modules: dict[str, nn.Module] = {}
    ahead: list[tuple[str, nn.Module]] = [("", model)]
    while ahead:
        path, module = ahead.pop()
        modules[path] = module
        children = [(name, child) for name, child in module._modules.items() if child is not None]
        ahead += [(dotted(path, name), child) for name, child in reversed(children)]
    return modules


def twin(model: Module) -> Module:
    """A copy in eval mode, for one run."""
    copied = _copy(model, {}, _shared, whole=False)
    for module in tree(copied).values():
        if not isinstance(module, torch.jit.ScriptModule):
            module.__dict__["training"] = False
    return copied


def duplicate(model: Module, memo: Memo) -> Module:
    """`copy.deepcopy`, several times as fast; what cannot be copied is shared.

    `memo` gives, by identity, what takes the place of what is not to be copied; what was copied is
    added.
    """
    return _copy(model, memo, _cloned, whole=True)


def to_double(model: Module, memo: Memo | None = None) -> Module:
    """A float64 copy of `model`, cast while copying; like `copy.deepcopy`, what `memo` holds is not
    copied again.
    """
    if memo is None:
        memo = {}
    for module in tree(model).values():
        if id(module) in memo:
            continue
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_floating_point() and id(tensor) not in memo:
                double = tensor.detach().double()
                if isinstance(tensor, nn.Parameter):
                    double = nn.Parameter(double, tensor.requires_grad)
                memo[id(tensor)] = double
    return duplicate(model, memo)


def _copy(
    model: Module, memo: Memo, own: Callable[[Tensor, Memo], Tensor], *, whole: bool
) -> Module:
    """A copy of the network, but of what `memo` holds; `own` copies parameters and buffers.

    With `whole`, other tensors are copied, too, and a module whose class says how it is copied, in
    that way.
    """
    fresh: list[tuple[nn.Module, nn.Module]] = []
    ahead: list[nn.Module] = [model]
    while ahead:
        module = ahead.pop()
        if id(module) in memo or (whole and _copies_itself(module) and _deeply(module, memo)):
            continue
        shell = (
            module if isinstance(module, torch.jit.ScriptModule) else object.__new__(type(module))
        )
        memo[id(module)] = shell
        if shell is not module:
            fresh.append((module, shell))
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = own(tensor, memo)
        ahead += [child for child in module._modules.values() if child is not None]
    for module, shell in fresh:
        shell.__dict__.update(
            {name: _copied(value, memo, whole) for name, value in vars(module).items()}
        )
    copied: Module = memo[id(model)]
    return copied


def _copies_itself(module: nn.Module) -> bool:
    kind = type(module)
    return hasattr(kind, "__deepcopy__") or any(
        getattr(kind, name, None) is not getattr(nn.Module, name, None)
        for name in ("__getstate__", "__reduce__", "__reduce_ex__")
    )


def _deeply(value: object, memo: Memo) -> bool:
    """Whether `copy.deepcopy` copies it; then `memo` holds the copy."""
    # A copy that fails half-way leaves nothing in `memo`.
    attempt: ChainMap[int, Any] = ChainMap({}, memo)
    try:
        attempt[id(value)] = copy.deepcopy(value, cast(Memo, attempt))
    except Exception:
        return False
    # deepcopy keeps these alive, so that no other object gets their identities.
    alive = attempt.maps[0].pop(id(attempt), [])
    memo.setdefault(id(memo), []).extend(alive)
    memo.update(attempt.maps[0])
    return True


def _shared(tensor: Tensor, memo: Memo) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return tensor
    return tensor.detach().clone()


def _cloned(tensor: Tensor, memo: Memo) -> Tensor:
    try:
        copied: Tensor = copy.deepcopy(tensor, memo)
    except Exception:
        copied = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            copied = nn.Parameter(copied, tensor.requires_grad)
    return copied


def _copied(value: Any, memo: Memo, whole: bool) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return value
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, Tensor) and not whole:
        return value
    if kind in (dict, OrderedDict):
        table: dict[object, object] = kind()
        memo[id(value)] = table
        table.update(
            (_copied(key, memo, whole), _copied(entry, memo, whole)) for key, entry in value.items()
        )
        return table
    if kind is list:
        row: list[object] = []
        memo[id(value)] = row
        row += [_copied(entry, memo, whole) for entry in value]
        return row
    if kind in (tuple, set):
        return kind(_copied(entry, memo, whole) for entry in value)
    if kind is MethodType:
        return MethodType(value.__func__, _copied(value.__self__, memo, whole))
    if kind is functools.partial:
        func, args, keywords = (
            _copied(entry, memo, whole) for entry in (value.func, value.args, value.keywords)
        )
        return functools.partial(func, *args, **keywords)
    return memo[id(value)] if _deeply(value, memo) else value
