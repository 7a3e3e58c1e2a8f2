"""The same network in operators that more tools have, for one that refuses it as it is.

All that depends on no input is computed (`constants`); an adaptive pool to one number is a mean; and what a transformer
cuts out of (N, L, 3 h d) by way of five dimensions is cut out of the last of three. None of them changes a sum.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch import fx, nn

from normswap.errors import RefusedError
from normswap.exporting import constants, pt2
from normswap.exporting.exported_module import FileContents, as_convolutions

T = TypeVar("T")
_ATEN = torch.ops.aten
_POOLS: dict[object, int] = {
    _ATEN.adaptive_avg_pool1d.default: 1,
    _ATEN.adaptive_avg_pool2d.default: 2,
    _ATEN.adaptive_avg_pool3d.default: 3,
}
_RESHAPES = (_ATEN.view.default, _ATEN.reshape.default, _ATEN.unflatten.int)


def or_simpler(contents: FileContents, convert: Callable[[nn.Module], T]) -> T:
    """Convert the network; where the tool refuses, the simpler one instead.

    Args:
        convert: raises `RefusedError` where the tool cannot read a network.

    Raises:
        RefusedError: it can read neither; says what it said of the network as it is.
    """
    try:
        return convert(as_convolutions(contents.network))
    except RefusedError as refusal:
        try:  # another copy: a network that keeps what it was called with keeps what tracing made of that
            return convert(simpler(contents, as_convolutions(contents.network)))
        except RefusedError:
            raise refusal from None


def simpler(contents: FileContents, network: nn.Module) -> fx.GraphModule:
    """The network, or what was made of it, in operators that more tools have.

    Raises:
        RefusedError: torch.export cannot express it.
    """
    module = constants.without_checks(pt2.traced(contents, network))
    constants.compute(module)
    for node in list(module.graph.nodes):
        _as_mean(node)
        _as_slices(node)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _as_mean(node: fx.Node) -> None:
    """Replace an adaptive pool whose result is one number per channel."""
    dims = _POOLS.get(node.target)
    if dims is not None and all(size == 1 for size in cast(list[int], node.args[1])):
        node.target, node.args = _ATEN.mean.dim, (node.args[0], [*range(-dims, 0)], True)


def _as_slices(node: fx.Node) -> None:
    """Replace what takes apart the first of the dimensions into which the last of another tensor was split.

    That is: (N, L, 3 h d) -> (N, L, 3, h, d) -> (3, N, h, L, d) -> three times (N, h, L, d).
    """
    picked = _picked(node)
    if not picked:
        return
    source, order = node.all_input_nodes[0], list(range(node.all_input_nodes[0].meta["val"].ndim))
    if source.target is _ATEN.permute.default:
        order = [one % len(order) for one in cast(list[int], source.args[1])]
        source = source.all_input_nodes[0]
    if source.target not in _RESHAPES:
        return
    tensor, sizes = source.all_input_nodes[0], list(source.meta["val"].shape)
    axis = order[cast(int, node.args[1]) if len(node.args) > 1 else 0]
    *outer, length = tensor.meta["val"].shape
    if sizes[:axis] != outer:
        return
    width, rest = length // sizes[axis], sizes[:axis] + sizes[axis + 1 :]
    turned = [one - (one > axis) for one in order if one != axis]
    call = node.graph.call_function
    for user, index in picked.items():
        start = index % sizes[axis] * width
        with node.graph.inserting_before(user):
            part = call(_ATEN.slice.Tensor, (tensor, axis, start, start + width))
            user.replace_all_uses_with(call(_ATEN.permute.default, (call(_ATEN.reshape.default, (part, rest)), turned)))


def _picked(node: fx.Node) -> dict[fx.Node, int]:
    """Which of the parts along a dimension each of these nodes is, where all of them are known."""
    if node.target is _ATEN.select.int:
        return {node: cast(int, node.args[2])}
    if node.target is _ATEN.unbind.int and all(user.target is operator.getitem for user in node.users):
        return {user: cast(int, user.args[1]) for user in node.users}
    return {}
