"""Copies of a network: `twin` is one to run, on the same parameters; `duplicate` copies everything.

A forward pass may write to attributes and buffers (caches, counters), and the user's network must
stay as it is, so a twin is run in its place. What cannot be copied (a lock, a Python module, a
tensor with a history) is shared between network and copy.
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
# Values of these classes never change, so a copy may share them.
_ATOMS = {*_NUMBERS, type, FunctionType, BuiltinFunctionType, torch.dtype, torch.device}
# The copy of each object, by the object's identity, as `copy.deepcopy` keeps it.
Memo: TypeAlias = dict[int, Any]
Module = TypeVar("Module", bound=nn.Module)
# Returns the copy of a parameter or buffer.
CopyTensor: TypeAlias = Callable[[Tensor, Memo], Tensor]


def dotted(path: str, name: str) -> str:
    """Return the path of the child `name` of the module at `path`. The network has the path ""."""
    return f"{path}.{name}".removeprefix(".")


def doubled(tensor: Tensor | None, default: Tensor) -> Tensor:
    """Return a parameter's values in float64, or `default` if the layer has no such parameter."""
    if tensor is None:
        return default
    return tensor.detach().double()


def tree(model: nn.Module) -> dict[str, nn.Module]:
    """Return every module by every path, in the order of `named_modules`.

    A class may have put a method of its own in the place of `named_modules`, so it is not called.
    """
    modules: dict[str, nn.Module] = {}
    pending: list[tuple[str, nn.Module]] = [("", model)]
    while pending:
        path, module = pending.pop()
        modules[path] = module

        children = [(name, child) for name, child in module._modules.items() if child is not None]
        pending += [(dotted(path, name), child) for name, child in reversed(children)]
    return modules


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer of a network by every name.

    In a state dict, hooks may replace tensors, and non-persistent buffers are missing. Here all are
    the network's own tensors.
    """
    named: dict[str, Tensor] = {}
    for path, module in tree(model).items():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                named[dotted(path, name)] = tensor
    return named


def state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a network's state dict, without the extra state of its layers."""
    state = model.state_dict()
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def twin(model: Module) -> Module:
    """Return a copy in eval mode for one run, which shares the parameters of `model`."""
    copied = _copy(model, {}, _share_parameter, whole=False)
    for module in tree(copied).values():
        if not isinstance(module, torch.jit.ScriptModule):
            module.__dict__["training"] = False
    return copied


def duplicate(model: Module, memo: Memo) -> Module:
    """Return a deep copy of a network, several times as fast as `copy.deepcopy`.

    An object that cannot be copied is shared.

    Args:
        model: The network to copy.
        memo: The copy of each object, by the object's identity. An object that is in it already is
            not copied again. Every copy that is made is added.
    """
    return _copy(model, memo, _clone_tensor, whole=True)


def to_double(model: Module, memo: Memo | None = None) -> Module:
    """Return a copy of `model` in float64, cast while it is copied.

    Args:
        model: The network to copy.
        memo: The copy of each object, by the object's identity, as in `duplicate`. None stands for
            an empty one.
    """
    if memo is None:
        memo = {}

    for module in tree(model).values():
        if id(module) in memo:
            continue
        # Not `module.parameters()`, as a network may have an attribute of that name.
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is None:
                continue
            if tensor.is_floating_point() and id(tensor) not in memo:
                double = tensor.detach().double()
                if isinstance(tensor, nn.Parameter):
                    double = nn.Parameter(double, tensor.requires_grad)
                memo[id(tensor)] = double

    return duplicate(model, memo)


def _copy(model: Module, memo: Memo, copy_tensor: CopyTensor, *, whole: bool) -> Module:
    """Return a copy of the network.

    Args:
        model: The network to copy.
        memo: The copy of each object, by the object's identity, as in `duplicate`.
        copy_tensor: Returns the copy of a parameter or buffer.
        whole: Whether tensors that are neither parameters nor buffers are copied too, and whether
            a module whose class defines how it is copied is copied in that way.
    """
    shells: list[tuple[nn.Module, nn.Module]] = []
    pending: list[nn.Module] = [model]
    while pending:
        module = pending.pop()
        if id(module) in memo:
            continue
        if whole and _defines_copying(module) and _deepcopied(module, memo):
            continue

        # A shell is an instance of the module's class without attributes. All shells are made
        # first, so that attributes that point to modules find their copies in `memo`.
        shell = module
        if not isinstance(module, torch.jit.ScriptModule):
            shell = object.__new__(type(module))
            shells.append((module, shell))
        memo[id(module)] = shell
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = copy_tensor(tensor, memo)
        pending += [child for child in module._modules.values() if child is not None]

    for module, shell in shells:
        shell.__dict__.update(_copied_entries(vars(module), memo, whole))
    copied: Module = memo[id(model)]
    return copied


def _defines_copying(module: nn.Module) -> bool:
    """Return whether the module's class itself defines how it is copied or pickled."""
    kind = type(module)
    if hasattr(kind, "__deepcopy__"):
        return True

    hooks = ("__getstate__", "__reduce__", "__reduce_ex__")
    return any(getattr(kind, name, None) is not getattr(nn.Module, name, None) for name in hooks)


def _deepcopied(value: object, memo: Memo) -> bool:
    """Copy `value` by `copy.deepcopy` into `memo`, and return whether that was possible."""
    # A copy that fails half-way leaves nothing in `memo`.
    attempt: ChainMap[int, Any] = ChainMap({}, memo)
    try:
        attempt[id(value)] = copy.deepcopy(value, cast(Memo, attempt))
    # The copying is a user's or another library's code, which may raise anything.
    except Exception:
        return False

    # deepcopy keeps these alive, so that no other object gets their identities.
    alive = attempt.maps[0].pop(id(attempt), [])
    memo.setdefault(id(memo), []).extend(alive)
    memo.update(attempt.maps[0])
    return True


def _share_parameter(tensor: Tensor, memo: Memo) -> Tensor:
    """Return a parameter itself, or the copy of a buffer.

    Args:
        tensor: The parameter or buffer.
        memo: Not used. `_clone_tensor` takes the same arguments.
    """
    if isinstance(tensor, nn.Parameter):
        return tensor
    return tensor.detach().clone()


def _clone_tensor(tensor: Tensor, memo: Memo) -> Tensor:
    """Return the copy of a parameter or buffer, without its autograd history.

    Args:
        tensor: The parameter or buffer.
        memo: The copies so far, by the original's identity, as `copy.deepcopy` keeps them.
    """
    # An expanded tensor has one number in several places, and could not be written to.
    is_expanded = tensor.layout is torch.strided and any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    if is_expanded and type(tensor) in (Tensor, nn.Parameter):
        dense = tensor.detach().clone(memory_format=torch.contiguous_format)
        if isinstance(tensor, nn.Parameter):
            dense = nn.Parameter(dense, tensor.requires_grad)
        return dense
    try:
        copied: Tensor = copy.deepcopy(tensor, memo)
    # A subclass of Tensor may raise anything, and torch refuses a tensor with a history.
    except Exception:
        copied = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            copied = nn.Parameter(copied, tensor.requires_grad)
    return copied


def _copied_entries(table: dict[Any, Any], memo: Memo, whole: bool) -> dict[Any, Any]:
    """Return the copies of the entries of a dict, in their order.

    Args:
        table: The dict.
        memo: The copies so far, by the original's identity.
        whole: Whether tensors that are neither parameters nor buffers are copied too.
    """
    entries = {}
    # Copying spends most of its time here, so no function is called for a value that never changes.
    for key, value in table.items():
        if type(key) not in _ATOMS:
            key = _copied(key, memo, whole)
        if type(value) not in _ATOMS:
            value = _copied(value, memo, whole)
        entries[key] = value
    return entries


def _copied(value: Any, memo: Memo, whole: bool) -> Any:
    """Return the copy of an attribute's value, whatever it is.

    Args:
        value: The value.
        memo: The copies so far, by the original's identity.
        whole: Whether a tensor is copied too. Otherwise it is shared.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, Tensor) and not whole:
        return value

    # The copy of a container goes into `memo` before it is filled, since the container may hold
    # itself.
    if kind in (dict, OrderedDict):
        table: dict[object, object] = kind()
        memo[id(value)] = table
        table.update(_copied_entries(value, memo, whole))
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
        function = _copied(value.func, memo, whole)
        arguments = _copied(value.args, memo, whole)
        keywords = _copied(value.keywords, memo, whole)
        return functools.partial(function, *arguments, **keywords)
    return memo[id(value)] if _deepcopied(value, memo) else value
