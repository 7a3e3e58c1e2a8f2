"""The recorded forward as a graph: its nodes, their readers, and the modules that they call.

`Traced` is the record. The functions below it answer questions about one node.
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

from normswap.layers.planned_layer import Linearity
from normswap.models.calling import Example
from normswap.sites.activations import is_activation, is_activation_call
from normswap.sites.site import Site

Item = TypeVar("Item")
LINEAR = (nn.Linear, nn.modules.conv._ConvNd)
_ADDS = (operator.add, operator.iadd, torch.add, "add", "add_")
MULTIPLICATIONS = (operator.mul, operator.imul, torch.mul, "mul", "mul_")
# These read the values of their first argument, and only the shape or dtype of the others.
_SHAPE_LIKE = ("expand_as", "reshape_as", "view_as", "type_as")
# These read no value of any argument.
_LIKE_FUNCTIONS = (torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like)
_LIKE = (*_LIKE_FUNCTIONS, "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")


@dataclass
class Traced:
    """A recorded forward of a network, as a graph in which each operation is a node.

    `node.meta` of the graph's nodes has three keys:

    - "inside": the paths of the modules around the node, outermost first.
    - "shape": the shape of the node's value, or a tuple of the shapes of the tensors in it.
    - "dtype": the dtype of the node's value, if the value is one tensor.

    A network may be recorded several times, each time as a `Traced` of its own. The first one is
    the main record, which keeps the further ones in `others` and `alternatives`. The path of a
    module or tensor is its dotted name, such as `layer1.0.conv1`.

    Args:
        graph: The fx graph.
        modules: The original modules, by every path that leads to them.
        outputs: For each node, the paths of the modules that return its value, innermost first.
        opaque: Paths of the modules whose operations cannot be seen, with the reason.
        constants: Tensors that the forward makes itself, by their names in the graph.
        others: Further records with the same nodes in the same order, made on another input.
        alternatives: Further records with other nodes: the forward ran other lines of its code for
            another input, or ran its auxiliary heads.
        alternative_nodes: The nodes of all `alternatives`.
        recorded: The shapes of the inputs, as text: of this record, and of the record that was made
            to try another input size.
        remarks: Sentences about the recording that the user should read.
        untracked: Names of constants whose origin is unknown, each with the path of the module
            that uses it.
        branches: Paths of the modules whose forward reads numbers of a tensor into Python. An `if`
            may depend on these numbers.
        flexible: Whether the network is known to take more than one input size.
        size_dependent: Whether the forward asked for the size of a tensor. An `if` may depend on
            the size.
        is_small: Whether the recorded input is smaller than those that the network is used on.
        heads: Whether `alternatives` has auxiliary heads, which only training runs.
        form: The recorded call of the network, with empty tensors in place of the arguments.
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
    is_small: bool = False
    heads: bool = False
    form: Example = field(default_factory=lambda: Example(()))
    nodes: list[fx.Node] = field(init=False)
    calls: dict[int, list[fx.Node]] = field(init=False)
    users: dict[fx.Node, list[fx.Node]] = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = list(self.graph.nodes)
        # The nodes that call each module, by the module's id.
        self.calls = {}
        # The nodes that read each node's value.
        self.users = {}
        self._sites: dict[tuple[int, int, int], Site] = {}
        # The position of each node, and its ancestors as a bit mask over positions.
        self._index: dict[fx.Node, int] = {}
        self._above: list[int] = []
        self._connect(self.nodes)

    @functools.cached_property
    def owners(self) -> Counter[int]:
        """A Counter from the id of each parameter to the number of modules that hold it.

        A number above 1 means that the parameter is shared between modules.
        """
        distinct_modules = {id(module): module for module in self.modules.values()}

        counts: Counter[int] = Counter()
        for module in distinct_modules.values():
            counts.update({id(parameter) for parameter in module._parameters.values()})
        return counts

    @functools.cached_property
    def _attributes(self) -> dict[int, str]:
        """A dict from a tensor's id to its dotted path, such as `conv.weight`.

        It has the parameters and buffers that the network's forward reads as attributes, without
        calling the module that holds them.
        """
        paths: dict[int, str] = {}
        for node in [*self.nodes, *self.alternative_nodes]:
            if node.op == "get_attr" and self.users[node]:
                owner, _, name = str(node.target).rpartition(".")
                # Tensors that a forward makes itself are in no module.
                tensor = getattr(self.modules[owner], name, None)
                paths.setdefault(id(tensor), str(node.target))
        return paths

    def read_directly(self, module: nn.Module) -> str | None:
        """Return the path of a parameter or buffer that forward reads without calling its module.

        Args:
            module: The module whose own parameters and buffers are looked at.

        Returns:
            The dotted path of one such tensor, or None if forward reads none of them that way.
        """
        tensors = [
            *nn.Module.parameters(module, recurse=False),
            *nn.Module.buffers(module, recurse=False),
        ]
        tensor_ids = {id(tensor) for tensor in tensors}
        return next((path for key, path in self._attributes.items() if key in tensor_ids), None)

    @property
    def input_independent(self) -> bool:
        """Whether every input takes the same path through the code of the forward.

        This is so if the forward asked for no tensor's size and read no tensor's value in Python,
        as an `if` on either could lead another way.
        """
        return not (self.size_dependent or self.branches)

    def _connect(self, nodes: list[fx.Node]) -> None:
        """Note the readers, calls and ancestors of the nodes of one whole graph.

        Args:
            nodes: All nodes of the graph, in order of the forward pass.
        """
        # Positions go on after the nodes of the graphs that were noted before.
        for position, node in enumerate(nodes, len(self._above)):
            self.users[node] = []
            self._index[node] = position
            if node.op == "call_module":
                module = self.modules[str(node.target)]
                self.calls.setdefault(id(module), []).append(node)

            # Bit i of the mask stands for the node at position i. A node counts as its own
            # ancestor.
            ancestors = 1 << position
            for source in inputs(node):
                self.users[source].append(node)
                ancestors |= self._above[self._index[source]]
            self._above.append(ancestors)

    def add_alternative(self, other: Traced) -> None:
        """Add a record of the same network whose forward took another path through its code.

        A conversion's change of a module must then be right on both paths.

        Args:
            other: The record, whose graph has nodes of its own.
        """
        self._connect(other.nodes)
        self.outputs.update(other.outputs)
        self.opaque.update(other.opaque)
        self.constants = other.constants | self.constants
        self.alternatives.append(other)
        self.alternative_nodes += other.nodes

    def called(self, module: nn.Module) -> int:
        """Return how often one forward calls a module, as far as it was recorded.

        The network may have been recorded on several paths. The largest number of calls on one of
        them is returned, and 0 if no record calls the module.
        """
        calls_by_record = Counter(call.graph for call in self.calls.get(id(module), ()))
        return max(calls_by_record.values(), default=0)

    def site(self, path: str) -> Site:
        """Return the site of a module: a record of what it is, and how forward reaches it.

        Args:
            path: A path of the module.
        """
        module = self.modules[path]
        # A site is kept only as long as no record is added, since a further record may change how
        # often the module is called, and the sizes that it reads.
        key = (id(module), len(self.others), len(self.alternatives))
        if key not in self._sites:
            self._sites[key] = self._new_site(module, path)
        return self._sites[key]

    def site_at(self, node: fx.Node) -> Site | None:
        """Return the site of the module that `node` calls, or None if it calls no module.

        A site says what a module is, and how forward reaches it.
        """
        if node.op != "call_module":
            return None
        return self.site(str(node.target))

    @property
    def sites(self) -> list[Site]:
        """The site of every module: what the module is, and how forward reaches it.

        Each module has one. The modules that forward calls come first, in the order of the calls.
        A module with several paths has the path by which forward calls it first.
        """
        nodes = (*self.nodes, *self.alternative_nodes)
        called = [str(node.target) for node in nodes if node.op == "call_module"]
        paths: dict[int, str] = {}
        for path in (*called, *self.modules):
            paths.setdefault(id(self.modules[path]), path)
        return [self.site(path) for path in paths.values()]

    def _new_site(self, module: nn.Module, path: str) -> Site:
        """Return a new record of what a module is, and how forward reaches it.

        Args:
            module: The module.
            path: A path of the module. It is used if forward does not call the module.
        """
        # A module with several paths is named by the one that forward calls first.
        calls = self.calls.get(id(module), [])
        if calls:
            path = str(calls[0].target)

        # Collect the shapes of its inputs. The records of other sizes have the same modules.
        all_calls = list(calls)
        for record in self.others:
            all_calls += record.calls.get(id(module), [])
        shapes: list[torch.Size] = []
        for call in all_calls:
            # The shape of the first input. A collection of tensors has no shape.
            read_shapes = [source.meta["shape"] for source in inputs(call)[:1]]
            shapes += [shape for shape in read_shapes if isinstance(shape, torch.Size)]

        # A module inside of a scripted one (`opaque`) is hidden: its calls are not recorded.
        outer = next((outer for outer in self.opaque if path.startswith(f"{outer}.")), None)
        hidden: str | None = None
        if outer is not None:
            hidden = f"it is inside {outer}, which cannot be looked into: {self.opaque[outer]}"

        # The holder is the module that has this one as an attribute. The network itself has none.
        return Site(
            module=module,
            path=path,
            called=self.called(module),
            shapes=tuple(shapes),
            sizes_are_known=bool(self.others) or not self.is_small,
            tensor_read=self.read_directly(module),
            hidden=hidden,
            holder=self.modules.get(path.rpartition(".")[0]) if path else None,
        )

    def index(self, node: fx.Node) -> int:
        """Return the position of `node` in the order of the forward pass, counted from 0.

        If the forward was recorded on several paths, only the positions of nodes of one record can
        be compared. The nodes of further records have the higher numbers.
        """
        return self._index[node]

    def above(self, node: fx.Node) -> int:
        """Return the nodes that the value of `node` is computed from, and `node` itself.

        They are a bit mask: bit i is 1 if the node at position i (`index`) is one of them.
        """
        return self._above[self._index[node]]

    def depends(self, node: fx.Node, on: fx.Node) -> bool:
        """Whether the value of `node` is computed from the value of `on`, or is that value."""
        # `on` is among the ancestors of `node` if its bit is set in their mask.
        return bool(self.above(node) >> self._index[on] & 1)

    def depends_on_inputs(self, node: fx.Node) -> bool:
        """Whether the value of a node is computed from an input of the network.

        It is not if it is computed from parameters, buffers and constants alone.
        """
        entries = (other for other in self.nodes if other.op == "placeholder")
        return any(self.depends(node, entry) for entry in entries)

    def main_input(self, node: fx.Node) -> fx.Node | None:
        """Return the input of `node` that carries the signal, or None if that is not clear.

        It is the only input, or x if `node` is a gate x g(x).
        """
        sources = inputs(node)
        # In a gate, g(x) is computed from x, and not the other way round.
        if len(sources) == 2 and is_mul(node):
            first, second = sources
            if self.depends(second, first):
                return first
            if not self.depends(first, second):
                return None
            return second
        return single(sources)

    def upwards(self, node: fx.Node | None) -> Iterator[fx.Node]:
        """Yield a node, then its `main_input`, then the main input of that node, and so on.

        The main input carries the signal: it is the only input, or x in a gate x g(x). The walk
        ends at a node without one, such as a sum.

        Args:
            node: The node to begin with. None yields nothing.
        """
        while node is not None:
            yield node
            node = self.main_input(node)

    def module(self, node: fx.Node) -> nn.Module | None:
        """Return the module that `node` calls, or None if the node is no call of a module.

        The nodes of functions, methods, parameters, inputs and the output call none.
        """
        if node.op != "call_module":
            return None
        return self.modules[str(node.target)]

    def linear(self, path: str) -> Linearity:
        """Return the module at `path`, which must be a convolution or a linear layer.

        This is not checked. The return type tells the type checker of its weight and bias.
        """
        return cast(Linearity, self.modules[path])

    def fetch(self, path: str) -> Tensor:
        """Return the tensor that a `get_attr` node of the graph reads.

        Args:
            path: The node's target: the name of a constant that forward made, or the dotted path of
                a parameter or buffer, such as `layer1.0.conv1.weight`.
        """
        if path in self.constants:
            return self.constants[path]
        owner, _, name = path.rpartition(".")
        tensor: Tensor = getattr(self.modules[owner], name)
        return tensor


def single(items: Sequence[Item]) -> Item | None:
    """Return the only item, or None if there are none or several."""
    return items[0] if len(items) == 1 else None


def argument(node: fx.Node, position: int, *names: str, default: object = None) -> Any:
    """Return an argument of a node.

    Args:
        node: The node of a call.
        position: The argument's position, if it is given by position.
        names: The argument's names, if it is given by keyword.
        default: The value to return if the call does not give the argument.
    """
    if len(node.args) > position:
        return node.args[position]
    return next((node.kwargs[name] for name in names if name in node.kwargs), default)


def inputs(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose values `node` reads, in order, each once.

    A node is left out if only its shape or dtype is read, like y in `x.view_as(y)`.
    """
    if node.target in _LIKE:
        return []
    if node.op == "call_method" and node.target in _SHAPE_LIKE:
        return [source for source in node.args[:1] if isinstance(source, fx.Node)]
    return list(node.all_input_nodes)


def listed(cat: fx.Node) -> list[fx.Node]:
    """Return the nodes of the tensors that a `torch.cat` joins, in order.

    A node appears as often as it is joined.

    Args:
        cat: The node of the `torch.cat`.
    """
    joined = argument(cat, 0, "tensors")
    if not isinstance(joined, list | tuple):
        return []
    return [node for node in joined if isinstance(node, fx.Node)]


def is_add(node: fx.Node) -> bool:
    """Whether `node` adds two tensors, by operator, function or method."""
    is_call = node.op in ("call_function", "call_method")
    return is_call and node.target in _ADDS and len(inputs(node)) == 2


def is_mul(node: fx.Node) -> bool:
    """Whether `node` multiplies two tensors, by operator, function or method."""
    is_call = node.op in ("call_function", "call_method")
    return is_call and node.target in MULTIPLICATIONS and len(inputs(node)) == 2


def is_constant_mul(node: fx.Node) -> bool:
    """Whether a node multiplies a single tensor by a Python number, as in 2 * x."""
    numbers = [factor for factor in node.args if isinstance(factor, int | float)]
    return node.target in (operator.mul, torch.mul) and len(inputs(node)) == len(numbers) == 1


def constant(node: fx.Node) -> float:
    """Return the number by which a node multiplies its tensor.

    Args:
        node: A product of one tensor and one number (`is_constant_mul`).
    """
    return float(next(factor for factor in node.args if isinstance(factor, int | float)))


def apply(
    traced: Traced, node: fx.Node, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> object:
    """Call the module, method or function of a node with other arguments, and return the result.

    Args:
        traced: The record of the network, which has its modules.
        node: The node of the call.
        args: The positional arguments. For a method, the first one is the tensor.
        kwargs: The keyword arguments.
    """
    if node.op == "call_module":
        return traced.modules[str(node.target)](*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


class NodeReader:
    """Answers what kind of layer a node of a recorded network calls.

    Its methods tell norms, linear layers and activations.

    Args:
        traced: The recorded network.
    """

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.nodes = traced.nodes

    def on(self, mask: int) -> list[fx.Node]:
        """Return the nodes whose bits are 1 in a mask, in order of the forward pass.

        Args:
            mask: The mask, in which bit i stands for node i (`Traced.above`).
        """
        # Take the lowest bit out of the mask until none is left.
        nodes = []
        while mask:
            lowest_bit = mask & -mask
            nodes.append(self.nodes[lowest_bit.bit_length() - 1])
            mask ^= lowest_bit
        return nodes

    def is_norm(self, node: fx.Node) -> bool:
        """Whether a node calls a norm."""
        site = self.traced.site_at(node)
        return site is not None and site.is_norm

    def is_linear(self, node: fx.Node) -> bool:
        """Whether a node calls a linear layer or convolution.

        A scripted module, whose operations cannot be seen, counts as one.
        """
        module = self.traced.module(node)
        if module is None:
            return False
        return isinstance(module, LINEAR) or str(node.target) in self.traced.opaque

    def is_activation(self, node: fx.Node) -> bool:
        """Whether a node calls an activation, as a module or as a function."""
        module = self.traced.module(node)
        if module is None:
            return is_activation_call(node.target)
        return is_activation(module)
