"""The same network in operators that more tools have.

Some tools refuse operators of torch.export's graph, or compute constants at each run.

Whatever depends on no input becomes a constant: the anchors of detectors, grids of positions,
biases from tables. The queries, keys and values that a transformer takes from (N, L, 3 h d) by way
of five dimensions become slices of the last dimension. The values stay the same.
"""

import operator
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import TypeVar, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Argument

from normswap import copying
from normswap.errors import RefusedError
from normswap.exporting import pt2_file
from normswap.exporting.exported_module import FileContents
from normswap.graph.tracing import argument

T = TypeVar("T")
A = TypeVar("A", bound=Argument)
_ATEN = torch.ops.aten
_NEW = (_ATEN.new_full.default, _ATEN.new_zeros.default, _ATEN.new_ones.default)
_LIKE = (_ATEN.zeros_like.default, _ATEN.ones_like.default, _ATEN.full_like.default)
# Operators that read only the shape and dtype of one argument, with the position of that argument.
_SHAPE_ARGUMENTS: dict[object, int] = {
    **dict.fromkeys((*_NEW, *_LIKE), 0),
    _ATEN.type_as.default: 1,
}
_RESHAPES = (_ATEN.view.default, _ATEN.reshape.default, _ATEN.unflatten.int)


def or_simpler(contents: FileContents, convert: Callable[[nn.Module], T]) -> T:
    """Convert a network by a tool, or the same network as a simpler graph if the tool refuses it.

    Args:
        contents: The network and its example inputs.
        convert: A function that has the tool convert a network, and returns the result. It raises
            RefusedError if the tool cannot read the network.

    Returns:
        What `convert` returned.

    Raises:
        RefusedError: The tool refuses both. The error is the one for the network itself.
    """
    try:
        return convert(copying.duplicate(contents.network, {}))
    except RefusedError as refusal:
        try:
            return convert(simpler(contents))
        except RefusedError:
            raise refusal from None


def simpler(contents: FileContents) -> fx.GraphModule:
    """Return a network as a graph of operators that more converters know.

    Values that depend on no input are stored as constants. Queries, keys and values of attention
    are taken as slices.

    Args:
        contents: The network and its example inputs.

    Raises:
        RefusedError: torch.export cannot express the network.
    """
    module = with_constants(contents)
    for node in list(module.graph.nodes):
        _as_slices(node)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def with_constants(contents: FileContents) -> fx.GraphModule:
    """Return a network as a graph of torch.export in which constants are computed beforehand.

    Each value that depends on no input is computed here and stored. If the graph writes into such a
    value, none is stored.

    Args:
        contents: The network and its example inputs.

    Raises:
        RefusedError: torch.export cannot express the network.
    """
    module = pt2_file.traced(contents, copying.duplicate(contents.network, {})).module()
    assert isinstance(module, fx.GraphModule)
    for node in list(module.graph.nodes):
        # The only modules in this graph are torch.export's checks of the inputs.
        if node.op == "call_module":
            module.graph.erase_node(node)

    # The values of the nodes that depend on no input.
    constants = _constants(module)
    for count, (node, value) in enumerate(constants.items()):
        readers = [user for user in node.users if user not in constants]
        # Parameters and buffers (`get_attr`) are stored already. A value that only constants read
        # is not needed. Only tensors and numbers are stored.
        if node.op == "get_attr" or not readers or not isinstance(value, Tensor | int | float):
            continue

        # A tensor becomes a buffer of the module. A number is written into the readers' arguments.
        if isinstance(value, Tensor):
            module.register_buffer(
                f"constant_{count}", value.clone(memory_format=torch.contiguous_format)
            )
            with module.graph.inserting_before(node):
                value = module.graph.get_attr(f"constant_{count}")
            # Later steps read the shape of a value in its `meta`.
            value.meta["val"] = node.meta["val"]
        for reader in readers:
            reader.args = _with({node: value}, reader.args)
            reader.kwargs = _with({node: value}, reader.kwargs)

    module.graph.eliminate_dead_code()
    module.recompile()
    return module


@torch.no_grad()
def _constants(module: fx.GraphModule) -> dict[fx.Node, Argument]:
    """Return the values of all nodes of a graph that depend on no input, by node.

    The dict is empty if the graph writes into such a value, which then is no constant.

    Args:
        module: The module of torch.export that has the graph.
    """
    constants: dict[fx.Node, Argument] = {}
    for node in module.graph.nodes:
        # Parameters and buffers are constants.
        if node.op == "get_attr" and isinstance(
            value := attrgetter(str(node.target))(module), Tensor
        ):
            constants[node] = value

        # Inputs, stored tensors and the output have a string as target and compute nothing. Random
        # operators give another value at each run.
        is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if not callable(node.target) or is_random:
            continue

        # An argument whose shape and type alone are read need not be constant: an empty tensor of
        # that shape takes its place.
        stand_ins = _stand_ins(node)
        read = [argument for argument in node.all_input_nodes if argument not in stand_ins]
        writes = getattr(getattr(node.target, "_schema", None), "is_mutable", False)
        if writes and any(argument in constants for argument in read):
            return {}

        # A node that reads only constants is a constant. Its value is computed here.
        if all(argument in constants for argument in read):
            values: dict[fx.Node, Argument] = {**stand_ins, **constants}
            constants[node] = node.target(*_with(values, node.args), **_with(values, node.kwargs))
    return constants


def _stand_ins(node: fx.Node) -> dict[fx.Node, Tensor]:
    """Return a tensor to use in place of an argument whose numbers an operator does not read.

    An example is x in `torch.zeros_like(x)`, of which only the shape and dtype are read.

    Args:
        node: The node of the operator.

    Returns:
        A dict from the node of the argument to an uninitialized tensor of its shape and dtype. The
        dict is empty if the operator reads the numbers of all its arguments.
    """
    if node.target not in _SHAPE_ARGUMENTS:
        return {}
    tensor = node.args[_SHAPE_ARGUMENTS[node.target]]
    if not isinstance(tensor, fx.Node):
        return {}
    return {tensor: torch.empty(tensor.meta["val"].shape, dtype=tensor.meta["val"].dtype)}


def _with(values: Mapping[fx.Node, Argument], args: A) -> A:
    """Return the arguments of a node, with some nodes among them replaced by values.

    Args:
        values: The value of each node that is replaced.
        args: The arguments. Nodes inside of lists and dicts are replaced, too.
    """
    return fx.node.map_arg(args, lambda argument: values.get(argument, argument))


def _as_slices(node: fx.Node) -> None:
    """Change a graph in place so that queries, keys and values are slices of the last dimension.

    A transformer takes them by way of five dimensions: (N, L, 3 h d) is reshaped to
    (N, L, 3, h, d), permuted to (3, N, h, L, d), and split into three of (N, h, L, d). Here each of
    the three becomes a slice of (N, L, 3 h d), reshaped and permuted.

    Args:
        node: A node of the graph. Nothing is done if it is not the last step of such a split.
    """
    picked = _picked(node)
    if not picked:
        return

    # The parts are taken from the permuted tensor, or from the reshaped one if there is no
    # permutation. `order` is the permutation: at each position, the dimension of the reshaped
    # tensor.
    source = node.all_input_nodes[0]
    order = list(range(node.all_input_nodes[0].meta["val"].ndim))
    if source.target is _ATEN.permute.default:
        order = [dim % len(order) for dim in cast(list[int], source.args[1])]
        source = source.all_input_nodes[0]
    if source.target not in _RESHAPES:
        return

    # `axis` is the dimension of the reshaped tensor that counts the parts: the 3 of (N, L, 3, h,
    # d). Only a split of the last dimension becomes slices, so N and L must stand before `axis`.
    tensor = source.all_input_nodes[0]
    sizes = list(source.meta["val"].shape)
    axis = order[argument(node, 1, "dim", default=0)]
    *outer, length = tensor.meta["val"].shape
    if sizes[:axis] != outer:
        return

    # Each part is a slice of `width` numbers of the last dimension. It is reshaped and permuted as
    # before, but without `axis`. Dimensions behind `axis` move forward by one.
    width = length // sizes[axis]
    other_sizes = sizes[:axis] + sizes[axis + 1 :]
    other_order = [dim - (dim > axis) for dim in order if dim != axis]
    call = node.graph.call_function
    for user, index in picked.items():
        # A negative index counts from the end.
        start = index % sizes[axis] * width
        with node.graph.inserting_before(user):
            section = call(_ATEN.slice.Tensor, (tensor, axis, start, start + width))
            user.replace_all_uses_with(
                call(
                    _ATEN.permute.default,
                    (call(_ATEN.reshape.default, (section, other_sizes)), other_order),
                )
            )


def _picked(node: fx.Node) -> dict[fx.Node, int]:
    """Return which nodes take x[i] along a dimension of a tensor x, each with its index i.

    For `x.select(dim, i)` it is the node itself. For `x.unbind(dim)`, which returns all x[i], they
    are the nodes that read one of them. The dict is empty if `node` is neither.

    Args:
        node: A node of a graph of torch.export.
    """
    if node.target is _ATEN.select.int:
        return {node: cast(int, node.args[2])}
    if node.target is _ATEN.unbind.int and all(
        user.target is operator.getitem for user in node.users
    ):
        return {user: cast(int, user.args[1]) for user in node.users}
    return {}
