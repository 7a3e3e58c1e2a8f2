"""SEE inside what cannot be traced: its parts that can be traced by themselves, such as a convolution with its norm.

What happens inside such a part is closed: whatever calls it, and however often, a norm that reads nothing but a
convolution of the same part can fold into it. That holds as long as the code around calls the part as a whole; code
that names the insides of the part, or reads weights, or passes options, gets its norms refused instead.
"""

from __future__ import annotations

import inspect
import re
from types import CodeType, FunctionType

from torch import nn

from normswap.errors import TraceError
from normswap.graph.tracing import Traced, trace
from normswap.layers import affine

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_TELLTALE = {"weight", "bias", "running_mean", "running_var", "parameters", "named_parameters", "buffers", "state_dict",
             "named_buffers", "modules", "named_modules", "children", "named_children", "get_submodule", "_modules",
             "getattr", "get_parameter"}  # fmt: skip


def read(traced: Traced) -> Traced:
    """`traced`, with the graphs of the parts of its opaque modules that hold BatchNorms, as far as they can be read."""
    called = {str(node.target) for node in traced.nodes if node.op == "call_module"}
    for path in [path for path in traced.opaque if path in called]:
        owner = traced.modules[path]
        _descend(traced, path, owner, [owner])
    return traced


def _descend(traced: Traced, path: str, module: nn.Module, around: list[nn.Module]) -> None:
    for name, part in module.named_children():
        inner = f"{path}.{name}"
        if affine.is_norm(part) or not any(affine.is_batchnorm(m) for m in part.modules()):
            continue
        if isinstance(part, _CONTAINERS):
            _descend(traced, inner, part, around)
            continue
        try:
            seen = None if _reached_into(traced, inner, part, around) else read(trace(part))
        except TraceError:
            seen = None
        if seen is None:
            _descend(traced, inner, part, [*around, part])
        else:
            traced.adopt(inner, seen)


def _reached_into(traced: Traced, path: str, part: nn.Module, around: list[nn.Module]) -> bool:
    """Whether code outside `part` may use what is inside it otherwise than by calling `part` on tensors."""
    name = path.split(".")[-1]
    if name.isdigit() and isinstance(part, nn.Sequential):  # whoever walks over the list may walk over this, too
        return True
    inside = {inner.split(".")[-1] for inner, _ in part.named_modules() if inner}
    telltale = _TELLTALE | {inner for inner in inside if not inner.isdigit()}
    for module in around:
        functions = _functions(module)
        if not functions or any(telltale & _words(function.__code__) for function in functions):
            return True
        if not name.isdigit() and any(_mentions(function, name) for function in functions):
            return True
    members = {id(module) for module in part.modules()} - {id(part)}
    if any(id(module) in members and not other.startswith(f"{path}.") for other, module in traced.modules.items()):
        return True
    parameters = inspect.signature(part.forward).parameters.values()
    return any(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in parameters)


def _functions(module: nn.Module) -> list[FunctionType]:
    """`forward`, and the methods and functions it may call, but torch's own; none if they cannot be found."""
    if "forward" in vars(module):
        return []
    kinds = [kind for kind in type(module).__mro__ if issubclass(kind, nn.Module) and kind is not nn.Module]
    found: list[FunctionType] = []
    waiting: list[object] = [vars(kind)["forward"] for kind in kinds if "forward" in vars(kind)]
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or function in found:
            continue
        found.append(function)
        for word in _words(function.__code__):
            waiting += [inspect.unwrap(vars(kind)[word]) for kind in kinds if callable(vars(kind).get(word))]
            other = function.__globals__.get(word)
            if isinstance(other, FunctionType) and not other.__module__.startswith("torch"):
                waiting.append(other)
    return found


def _words(code: CodeType) -> set[str]:
    """Every attribute and global that the code may name."""
    return set(code.co_names).union(*(_words(part) for part in code.co_consts if isinstance(part, CodeType)))


def _mentions(function: FunctionType, name: str) -> bool:
    """Whether the function does anything to the module `name` but call it, or ask for a setting or whether it is there.

    The settings' names are among the function's words, so one that is a module has been noticed before.
    """
    try:
        source = inspect.getsource(function)
    except OSError:
        return True
    return re.search(rf"\.{name}\b(?!\s*\(|\s+is\s|\.\w+\b(?!\s*[(\[]))", source) is not None
