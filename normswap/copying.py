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
    """Return a parameter or buffer of a layer in float64, without its autograd history.

    Args:
        tensor: The parameter or buffer. None if the layer has none, such as a convolution without
            a bias.
        default: What is returned in place of None.
    """
    if tensor is None:
        return default
    return tensor.detach().double()


def tree(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a network by their paths, in the order of `named_modules`.

    A module that is used at several paths stands at each of them. `named_modules` itself is not
    called, because a network's class may have a method or attribute of that name.
    """
    modules: dict[str, nn.Module] = {}
    pending: list[tuple[str, nn.Module]] = [("", model)]
    while pending:
        path, module = pending.pop()
        modules[path] = module

        children = [(name, child) for name, child in module._modules.items() if child is not None]
        # The last entry is taken first, so the children are reversed to be visited in their order.
        pending += [(dotted(path, name), child) for name, child in reversed(children)]
    return modules


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a network by their names.

    A tensor that is used under several names stands under each of them. Unlike in a state dict, all
    are the network's own tensors, and buffers that are not saved are there, too.
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
    """Return a copy of a network in eval mode, for one forward pass. It shares the parameters.

    Buffers and attributes are copied, so that the forward pass does not change those of `model`.
    Attributes that are plain tensors, neither parameters nor buffers, are shared.
    """
    # `_share_parameter` copies buffers, and returns a parameter itself.
    copied = _copy(model, {}, _share_parameter, deep=False)
    for module in tree(copied).values():
        # A ScriptModule is shared, not copied, so its mode must stay.
        if not isinstance(module, torch.jit.ScriptModule):
            module.__dict__["training"] = False
    return copied


def duplicate(model: Module, memo: Memo) -> Module:
    """Return a deep copy of a network, several times as fast as `copy.deepcopy`.

    An object that cannot be copied is shared.

    Args:
        model: The network to copy.
        memo: The copy of each object, by the object's `id`. An object that is in it already is not
            copied again. Every copy that is made is added. An empty dict copies everything.
    """
    return _copy(model, memo, _clone_tensor, deep=True)


def to_double(model: Module, memo: Memo | None = None) -> Module:
    """Return a copy of `model` in which all floating-point parameters and buffers are float64.

    Args:
        model: The network to copy.
        memo: The copy of each object, by the object's `id`, as in `duplicate`. None stands for an
            empty dict.
    """
    if memo is None:
        memo = {}

    # Put a float64 copy of each tensor into `memo`, where `duplicate` then finds it.
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


def _copy(model: Module, memo: Memo, copy_tensor: CopyTensor, *, deep: bool) -> Module:
    """Return a copy of a network, for `twin` and `duplicate`.

    Args:
        model: The network to copy.
        memo: The copy of each object, by the object's `id`, as in `duplicate`.
        copy_tensor: Returns the copy of a parameter or buffer.
        deep: Whether tensors that are neither parameters nor buffers are copied too, and whether
            a module whose class defines how it is copied is copied in that way.
    """
    # A shell is an instance of a module's class without attributes. All shells are made first, so
    # that attributes that point to modules find their copies in `memo`.
    shells: list[tuple[nn.Module, nn.Module]] = []
    pending: list[nn.Module] = [model]
    while pending:
        module = pending.pop()
        if id(module) in memo:
            continue
        # If its class defines how it is copied, and this copying has worked, nothing is left to do.
        if deep and _defines_copying(module) and _deepcopied(module, memo):
            continue

        # A ScriptModule that is not copied by then is shared.
        shell = module
        if not isinstance(module, torch.jit.ScriptModule):
            shell = object.__new__(type(module))
            shells.append((module, shell))
        memo[id(module)] = shell
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = copy_tensor(tensor, memo)
        pending += [child for child in module._modules.values() if child is not None]

    # Fill the shells with copies of the modules' attributes.
    for module, shell in shells:
        shell.__dict__.update(_copied_entries(vars(module), memo, deep))
    copied: Module = memo[id(model)]
    return copied


def _defines_copying(module: nn.Module) -> bool:
    """Return whether the module's class itself defines how it is copied or pickled."""
    kind = type(module)
    if hasattr(kind, "__deepcopy__"):
        return True

    # These are the methods of pickling, by which `copy.deepcopy` copies, too.
    hooks = ("__getstate__", "__reduce__", "__reduce_ex__")
    return any(getattr(kind, name, None) is not getattr(nn.Module, name, None) for name in hooks)


def _deepcopied(value: object, memo: Memo) -> bool:
    """Copy a value with `copy.deepcopy`, put the copy into `memo`, and return whether that worked.

    Args:
        value: The value.
        memo: The copy of each object, by the object's `id`.
    """
    # The copies are collected in a dict of their own, so that copying that fails half-way leaves
    # nothing in `memo`.
    new: Memo = {}
    attempt = cast(Memo, ChainMap(new, memo))
    # torch copies a compiled module with a plain dict alone. Such modules are few, so `memo` may be
    # copied for each.
    if isinstance(value, torch.jit.ScriptModule):
        new = dict(memo)
        attempt = new
    try:
        attempt[id(value)] = copy.deepcopy(value, attempt)
    # The copying is a user's or another library's code, which may raise anything.
    except Exception:
        return False

    # deepcopy keeps the originals in a list under the id of its memo, so that no other object gets
    # their ids. The list belongs under the id of `memo` now.
    alive = new.pop(id(attempt), [])
    memo.setdefault(id(memo), []).extend(alive)
    memo.update(new)
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
        memo: The copies so far, by the original's `id`. `copy.deepcopy` takes and extends it.
    """
    # In an expanded tensor, one number in memory stands in several places (stride 0), and torch
    # would refuse to write to it. So its copy gets memory for each place.
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


def _copied_entries(table: dict[Any, Any], memo: Memo, deep: bool) -> dict[Any, Any]:
    """Return a dict with copies of the keys and values of another dict, in the same order.

    Args:
        table: The dict to copy.
        memo: The copies so far, by the original's `id`.
        deep: Whether tensors that are neither parameters nor buffers are copied too.
    """
    entries = {}
    # Copying spends most of its time here, so no function is called for a value that never changes.
    for key, value in table.items():
        if type(key) not in _ATOMS:
            key = _copied(key, memo, deep)
        if type(value) not in _ATOMS:
            value = _copied(value, memo, deep)
        entries[key] = value
    return entries


def _copied(value: Any, memo: Memo, deep: bool) -> Any:
    """Return the copy of the value of a module's attribute, whatever class it is of.

    Args:
        value: The value.
        memo: The copies so far, by the original's `id`. The copies that are made here are added.
        deep: Whether a tensor is copied too. Otherwise the copy shares it.
    """
    kind = type(value)
    # Numbers, functions and other values that never change need no copy.
    if kind in _ATOMS:
        return value
    # An object that stands in two places has one copy, as has a module or a parameter.
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, Tensor) and not deep:
        return value

    # The copy of a container goes into `memo` before it is filled, since the container may hold
    # itself.
    if kind in (dict, OrderedDict):
        table: dict[object, object] = kind()
        memo[id(value)] = table
        table.update(_copied_entries(value, memo, deep))
        return table
    if kind is list:
        row: list[object] = []
        memo[id(value)] = row
        row += [_copied(entry, memo, deep) for entry in value]
        return row

    if kind in (tuple, set):
        return kind(_copied(entry, memo, deep) for entry in value)
    if kind is MethodType:
        return MethodType(value.__func__, _copied(value.__self__, memo, deep))
    if kind is functools.partial:
        function = _copied(value.func, memo, deep)
        arguments = _copied(value.args, memo, deep)
        keywords = _copied(value.keywords, memo, deep)
        return functools.partial(function, *arguments, **keywords)
    # Any other object is copied by Python's `copy.deepcopy`. If that fails, the copy shares it.
    return memo[id(value)] if _deepcopied(value, memo) else value
