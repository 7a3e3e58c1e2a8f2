"""The tracer: a symbolic trace whose leaves are norms and childless modules, and which survives what it cannot trace.

A module whose forward cannot be traced becomes an opaque leaf, as long as it is not the model itself. The trace is
made on a copy: tracing can dirty a module (timm's levit caches keep proxies).
"""

from __future__ import annotations

import copy
import inspect
import operator
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from normswap.errors import TraceError
from normswap.layers import affine
from normswap.layers.placeholders import Copy

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_ADDS = (operator.add, operator.iadd, torch.add, "add", "add_")
_MULS = (operator.mul, operator.imul, torch.mul, "mul", "mul_")
_SHAPE_ATTRIBUTES = ("shape", "dtype", "device", "ndim")
_SHAPE_METHODS = ("size", "dim", "numel", "stride", "type")
_SHAPE_LIKE = ("expand_as", "reshape_as", "view_as", "type_as")


@dataclass
class Traced:
    """A traced model.

    Args:
        graph: the fx graph; `node.meta["inside"]` holds the paths of the modules around a node, outermost first.
        modules: the *original* modules by every path.
        calls: nodes that call a leaf, by id of the module.
        outputs: for each node, the paths of the modules that return it, innermost first.
        opaque: paths that could not be traced, with the reason.
        constants: tensors that forward makes itself and the graph refers to by name.
        hidden: nodes of graphs of their own, of parts of opaque modules (`adopt`).
    """

    graph: fx.Graph
    modules: dict[str, nn.Module]
    calls: dict[int, list[fx.Node]]
    outputs: dict[fx.Node, list[str]]
    opaque: dict[str, str]
    constants: dict[str, Any] = field(default_factory=dict)
    hidden: list[fx.Node] = field(default_factory=list)
    nodes: list[fx.Node] = field(init=False)
    users: dict[fx.Node, list[fx.Node]] = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = list(self.graph.nodes)
        self.users = {}
        self._index: dict[fx.Node, int] = {}
        self._above: list[int] = []  # ancestors of each node, itself included, as bit masks
        self._connect(self.nodes)

    def _connect(self, nodes: list[fx.Node]) -> None:
        for i, node in enumerate(nodes, len(self._above)):
            self.users[node], self._index[node] = [], i
            mask = 1 << i
            for source in inputs(node):
                self.users[source].append(node)
                mask |= self._above[self._index[source]]
            self._above.append(mask)

    def adopt(self, path: str, part: Traced) -> None:
        """Take in the graph of the module at `path` inside an opaque one, which was traced by itself."""
        nodes = [*part.nodes, *part.hidden]
        for node in nodes:
            node.meta["inside"] = (path, *(f"{path}.{inner}" for inner in node.meta["inside"]))
            if node.op in ("call_module", "get_attr"):
                node.target = f"{path}.{node.target}"
            if node.op == "call_module":
                self.calls.setdefault(id(self.modules[str(node.target)]), []).append(node)
        self._connect(nodes)
        self.hidden += nodes

    def index(self, node: fx.Node) -> int:
        """The place of `node` in the order of the forward pass (for hidden ones: within their own graph)."""
        return self._index[node]

    def above(self, node: fx.Node) -> int:
        """The nodes that `node` is computed from, itself included, as a bit mask over `nodes`."""
        return self._above[self._index[node]]

    def depends(self, node: fx.Node, on: fx.Node) -> bool:
        """Whether the value of `node` is computed from that of `on` (or is it)."""
        return bool(self.above(node) >> self._index[on] & 1)

    def main_input(self, node: fx.Node) -> fx.Node | None:
        """The input that carries the signal: the only one, or, for a gate x * g(x), x."""
        sources = inputs(node)
        if len(sources) == 2 and is_mul(node):
            one, two = sources
            return one if self.depends(two, one) else two if self.depends(one, two) else None
        return sources[0] if len(sources) == 1 else None

    def module(self, node: fx.Node) -> nn.Module | None:
        """The leaf module that `node` calls, if it calls one."""
        return self.modules[str(node.target)] if node.op == "call_module" else None


class _Tracer(fx.Tracer):
    def __init__(self) -> None:
        super().__init__(param_shapes_constant=True)
        self.around: list[str] = []
        self.outputs: dict[fx.Node, list[str]] = {}
        self.opaque: dict[str, str] = {}
        self.forced: set[int] = set()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if id(m) in self.forced or affine.is_norm(m) or affine.is_affine(m):
            return True
        if next(m.children(), None) is None:
            return not isinstance(m, _CONTAINERS)
        return m.__module__.startswith("torch.nn") and not isinstance(m, _CONTAINERS)

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(kind, *args, **kwargs)
        leaf = kind == "call_module"
        node.meta["inside"] = tuple(self.around[:-1] if leaf else self.around)
        return node

    def call_module(self, m: nn.Module, forward: Any, args: tuple, kwargs: dict) -> Any:
        path = self.path_of_module(m)
        last, scope, stack = self.graph._root._prev, copy.copy(self.scope), copy.copy(self.module_stack)
        self.around.append(path)
        depth = len(self.around)
        try:
            result = super().call_module(m, forward, args, kwargs)
        except Exception as error:
            if self.is_leaf_module(m, path):
                raise
            self._erase_after(last)
            del self.around[depth:]
            self.scope, self.module_stack = scope, stack
            self.opaque[path] = _where(error)
            self.forced.add(id(m))
            result = super().call_module(m, forward, args, kwargs)
        finally:
            del self.around[depth - 1 :]
        if isinstance(result, fx.Proxy):
            self.outputs.setdefault(result.node, []).append(path)
        return result

    def _erase_after(self, last: fx.Node) -> None:
        while self.graph._root._prev is not last:
            node = self.graph._root._prev
            self.outputs.pop(node, None)
            self.graph.erase_node(node)


def trace(model: nn.Module) -> Traced:
    """Trace `model`, which is not changed, in eval mode; optional arguments of forward are pinned to their defaults.

    Raises:
        TraceError: the model's own forward depends on the values of its input; says where.
    """
    try:
        tensors = [*model.parameters(), *model.buffers()]
        twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})  # the values are only passed by
        twin.eval()  # apart: some models' own `train` returns nothing
    except Exception as error:
        raise TraceError(f"{type(model).__name__} cannot be copied", str(error)) from None
    if isinstance(getattr(twin, "drop_rate", None), float | int):
        twin.__dict__["drop_rate"] = 0.5  # timm hides F.dropout behind `if self.drop_rate`: make it show
    tracer = _Tracer()
    parameters = inspect.signature(twin.forward).parameters.values()
    pinned = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
    try:
        graph = tracer.trace(twin, concrete_args=pinned or None)
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} cannot be traced",
            _where(error),
            "Its forward must not branch on tensor values; move such code into a submodule of its own",
        ) from None
    modules = dict(model.named_modules(remove_duplicate=False))
    _leave_out_ones(graph, tracer.outputs, modules)
    calls: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls.setdefault(id(modules[str(node.target)]), []).append(node)
    constants = {name: value for name, value in vars(twin).items() if name.startswith("_tensor_constant")}
    return Traced(graph, modules, calls, tracer.outputs, tracer.opaque, constants)


def _leave_out_ones(graph: fx.Graph, outputs: dict[fx.Node, list[str]], modules: Mapping[str, nn.Module]) -> None:
    """Products with the number 1 and copies are not there: what makes or returns the value makes or returns them."""
    for node in list(graph.nodes):
        if node.op == "call_module" and isinstance(modules.get(str(node.target)), Copy):
            value: Any = node.args[0]
        elif node.target in (operator.mul, torch.mul) and len(node.args) == 2 and not node.kwargs:
            one, two = node.args
            value = two if isinstance(one, float) and one == 1 else one if isinstance(two, float) and two == 1 else None
        else:
            continue
        if isinstance(value, fx.Node):
            node.replace_all_uses_with(value)
            outputs.setdefault(value, []).extend(outputs.pop(node, []))
            graph.erase_node(node)


def inputs(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values (not only whose shapes) `node` reads, in order, each once."""
    if is_shape(node):
        return []
    if node.op == "call_method" and node.target in _SHAPE_LIKE:
        return [arg for arg in node.args[:1] if isinstance(arg, fx.Node)]
    return [source for source in node.all_input_nodes if not is_shape(source)]


def is_shape(node: fx.Node) -> bool:
    """Whether `node` only asks for a shape, dtype or device (or computes with one)."""
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] in _SHAPE_ATTRIBUTES
    if node.op == "call_method" and node.target in _SHAPE_METHODS:
        return True
    sources = node.all_input_nodes
    return node.op == "call_function" and bool(sources) and all(is_shape(source) for source in sources)


def is_add(node: fx.Node) -> bool:
    """Whether `node` adds two tensors, by operator, function or method."""
    return node.op in ("call_function", "call_method") and node.target in _ADDS and len(inputs(node)) == 2


def is_mul(node: fx.Node) -> bool:
    """Whether `node` multiplies two tensors, by operator, function or method."""
    return node.op in ("call_function", "call_method") and node.target in _MULS and len(inputs(node)) == 2


def is_constant_mul(node: fx.Node) -> bool:
    """Whether `node` multiplies one tensor by a number."""
    return node.target in (operator.mul, torch.mul) and len(inputs(node)) == 1 and len(node.args) == 2


def constant(node: fx.Node) -> float:
    """The number by which `node` multiplies."""
    return float(next(arg for arg in node.args if isinstance(arg, int | float)))  # type: ignore[arg-type]


def _where(error: Exception) -> str:
    """The reason, with the last line of the model's own code that led to it."""
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/torch/" not in f.filename and "/normswap/" not in f.filename]
    return f"{reason} (at {own[-1].filename}:{own[-1].lineno}, `{own[-1].line}`)" if own else reason
