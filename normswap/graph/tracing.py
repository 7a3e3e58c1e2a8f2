"""The recorded forward as a graph: its nodes, their readers, the modules they call; and questions
about a node.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx, nn

from normswap.layers import affine
from normswap.layers.activations import is_activation, is_activation_call
from normswap.layers.planned_layer import Linearity
from normswap.models.calling import Example

T = TypeVar("T")
LINEAR = (nn.Linear, nn.modules.conv._ConvNd)
_ADDS = (operator.add, operator.iadd, torch.add, "add", "add_")
MULTIPLICATIONS = (operator.mul, operator.imul, torch.mul, "mul", "mul_")
_SHAPE_LIKE = ("expand_as", "reshape_as", "view_as", "type_as")
_LIKE_FUNCTIONS = (torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like)
_LIKE = (*_LIKE_FUNCTIONS, "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")


@dataclass
class Traced:
    """A recorded model.

    Args:
        graph: the fx graph; `node.meta` has "inside", the paths of the modules around a node,
            outermost first, "shape", the shape of its value (of each tensor of a tuple), and
            "dtype", that of one tensor.
        modules: the *original* modules by every path.
        calls: nodes that call a leaf, by id of the module.
        outputs: for each node, the paths of the modules that return it, innermost first.
        opaque: paths that could not be looked into, with the reason.
        constants: tensors that forward makes itself, by their names in the graph.
        others: the same graph, node by node, recorded on other sizes.
        alternatives: records that took another way through the network, or reached auxiliary heads.
        alternative_nodes: their nodes.
        recorded: the sizes of the inputs, by record.
        remarks: what the user should know of the record.
        untracked: names of constants of unknown origin, with the paths of the modules that use
            them.
        branches: paths of the modules whose forward reads values.
        flexible: whether it is known to take more than one size.
        heads: whether alternative nodes include auxiliary heads, which only training runs.
        form: how the network is called, without values.
        size_dependent: whether it asked for a size, on which its way may depend.
    """

    graph: fx.Graph
    modules: dict[str, nn.Module]
    outputs: dict[fx.Node, list[str]]
    opaque: dict[str, str]
    constants: dict[str, Tensor] = field(default_factory=dict)
    others: list[Traced] = field(default_factory=list, repr=False)
    alternatives: list[Traced] = field(default_factory=list, repr=False)
    alternative_nodes: list[fx.Node] = field(default_factory=list)
    recorded: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    untracked: dict[str, str] = field(default_factory=dict)
    branches: list[str] = field(default_factory=list)
    flexible: bool = False
    size_dependent: bool = True
    heads: bool = False
    form: Example = field(default_factory=lambda: Example(()))
    nodes: list[fx.Node] = field(init=False)
    calls: dict[int, list[fx.Node]] = field(init=False)
    users: dict[fx.Node, list[fx.Node]] = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = list(self.graph.nodes)
        self.calls = {}
        self.users = {}
        self._index: dict[fx.Node, int] = {}
        self._above: list[int] = []
        self._connect(self.nodes)

    @functools.cached_property
    def owners(self) -> Counter[int]:
        """The number of modules that hold a parameter, by its id."""
        distinct = {id(module): module for module in self.modules.values()}.values()
        return Counter(
            parameter
            for module in distinct
            for parameter in {id(p) for p in module._parameters.values()}
        )

    @functools.cached_property
    def _attributes(self) -> dict[int, str]:
        """The paths of the tensors that a forward reads by itself, by their ids, in order."""
        paths: dict[int, str] = {}
        for node in [*self.nodes, *self.alternative_nodes]:
            if node.op == "get_attr" and self.users[node]:
                owner, _, name = str(node.target).rpartition(".")
                # Tensors that a forward makes itself are in no module.
                paths.setdefault(id(getattr(self.modules[owner], name, None)), str(node.target))
        return paths

    def read_directly(self, module: nn.Module) -> str | None:
        """The path of a tensor of `module` that some forward reads by itself, not by calling the
        module.
        """
        tensor_ids = {
            id(tensor)
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        }
        return next((path for key, path in self._attributes.items() if key in tensor_ids), None)

    @property
    def input_independent(self) -> bool:
        """Whether it takes the same way for every input: it asked neither for a size nor for a
        value.
        """
        return not (self.size_dependent or self.branches)

    def _connect(self, nodes: list[fx.Node]) -> None:
        for i, node in enumerate(nodes, len(self._above)):
            self.users[node] = []
            self._index[node] = i
            if node.op == "call_module":
                self.calls.setdefault(id(self.modules[str(node.target)]), []).append(node)
            mask = 1 << i
            for source in inputs(node):
                self.users[source].append(node)
                mask |= self._above[self._index[source]]
            self._above.append(mask)

    def add_alternative(self, other: Traced) -> None:
        """Add the graph of a record that took another way; a change of a module must be right
        there, too.
        """
        self._connect(other.nodes)
        self.outputs.update(other.outputs)
        self.opaque.update(other.opaque)
        self.constants = other.constants | self.constants
        self.alternatives.append(other)
        self.alternative_nodes += other.nodes

    def called(self, module: nn.Module) -> int:
        """How often a leaf is called, on the way that calls it most often."""
        return max(
            Counter(call.graph for call in self.calls.get(id(module), ())).values(), default=0
        )

    def index(self, node: fx.Node) -> int:
        """The place of `node` in the order of the forward pass (for alternative ones: within their
        own graph).
        """
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
            first, second = sources
            if self.depends(second, first):
                return first
            if not self.depends(first, second):
                return None
            return second
        return single(sources)

    def upwards(self, node: fx.Node | None) -> Iterator[fx.Node]:
        """The node and, one after the other, the inputs that carry its signal (`main_input`)."""
        while node is not None:
            yield node
            node = self.main_input(node)

    def module(self, node: fx.Node) -> nn.Module | None:
        """The leaf module that `node` calls, if it calls one."""
        if node.op != "call_module":
            return None
        return self.modules[str(node.target)]

    def linear(self, path: str) -> Linearity:
        return cast(Linearity, self.modules[path])

    def fetch(self, path: str) -> Tensor:
        """The tensor that a `get_attr` node names."""
        if path in self.constants:
            return self.constants[path]
        owner, _, name = path.rpartition(".")
        tensor: Tensor = getattr(self.modules[owner], name)
        return tensor


def single(items: Sequence[T]) -> T | None:
    """The only item; None where there are none, or several."""
    return items[0] if len(items) == 1 else None


def argument(node: fx.Node, place: int, *names: str, default: object = None) -> Any:
    """The argument of a node at a place, or by one of its names."""
    if len(node.args) > place:
        return node.args[place]
    return next((node.kwargs[name] for name in names if name in node.kwargs), default)


def inputs(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values (not only whose shapes) `node` reads, in order, each once."""
    if node.target in _LIKE:
        return []
    if node.op == "call_method" and node.target in _SHAPE_LIKE:
        return [arg for arg in node.args[:1] if isinstance(arg, fx.Node)]
    return list(node.all_input_nodes)


def listed(cat: fx.Node) -> list[fx.Node]:
    """The nodes whose values `cat` joins, as often as it does."""
    joined = argument(cat, 0, "tensors")
    if not isinstance(joined, list | tuple):
        return []
    return [node for node in joined if isinstance(node, fx.Node)]


def is_add(node: fx.Node) -> bool:
    """Whether `node` adds two tensors, by operator, function or method."""
    return (
        node.op in ("call_function", "call_method")
        and node.target in _ADDS
        and len(inputs(node)) == 2
    )


def is_mul(node: fx.Node) -> bool:
    """Whether `node` multiplies two tensors, by operator, function or method."""
    return (
        node.op in ("call_function", "call_method")
        and node.target in MULTIPLICATIONS
        and len(inputs(node)) == 2
    )


def is_constant_mul(node: fx.Node) -> bool:
    """Whether `node` multiplies one tensor by a number."""
    numbers = [arg for arg in node.args if isinstance(arg, int | float)]
    return node.target in (operator.mul, torch.mul) and len(inputs(node)) == len(numbers) == 1


def constant(node: fx.Node) -> float:
    """The number by which `node` multiplies."""
    return float(next(arg for arg in node.args if isinstance(arg, int | float)))


def apply(
    traced: Traced, node: fx.Node, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> object:
    """Do what `node` does to other values."""
    if node.op == "call_module":
        return traced.modules[str(node.target)](*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


class NodeReader:
    """Tells the kind of a record's nodes: a norm, a linear layer, an activation."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.nodes = traced.nodes

    def on(self, mask: int) -> list[fx.Node]:
        """The nodes of a mask, in order of the forward pass."""
        nodes = []
        while mask:
            low = mask & -mask
            nodes.append(self.nodes[low.bit_length() - 1])
            mask ^= low
        return nodes

    def is_norm(self, node: fx.Node) -> bool:
        module = self.traced.module(node)
        return module is not None and affine.is_norm(module)

    def is_linear(self, node: fx.Node) -> bool:
        module = self.traced.module(node)
        if module is None:
            return False
        return isinstance(module, LINEAR) or str(node.target) in self.traced.opaque

    def is_activation(self, node: fx.Node) -> bool:
        module = self.traced.module(node)
        if module is None:
            return is_activation_call(node.target)
        return is_activation(module)
