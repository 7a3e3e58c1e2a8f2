"""Numbers that depend on no input, computed once: the anchors of detectors, grids of positions, biases from tables.

Tools that read a graph operator by operator need not know how such numbers come about, and no run computes them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import TypeVar

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.fx.node import Argument

from normswap.exporting import pt2
from normswap.exporting.exported_module import FileContents

T = TypeVar("T", bound=Argument)
_ATEN = torch.ops.aten
_FORM: dict[object, int] = {  # operators that read of one argument, the first or the second, its shape and dtype alone
    _ATEN.type_as.default: 1, _ATEN.new_full.default: 0, _ATEN.new_zeros.default: 0, _ATEN.new_ones.default: 0,
    _ATEN.zeros_like.default: 0, _ATEN.ones_like.default: 0, _ATEN.full_like.default: 0,
}  # fmt: skip


def without_checks(program: ExportedProgram) -> fx.GraphModule:
    """The module of a program, without torch's own checks of the inputs."""
    module = program.module()
    assert isinstance(module, fx.GraphModule)
    for node in list(module.graph.nodes):
        if node.op == "call_module":
            module.graph.erase_node(node)
    module.recompile()
    return module


def with_constants(contents: FileContents, network: nn.Module) -> nn.Module:
    """The network with the values of all that depends on no input; itself where all depends on one.

    Raises:
        RefusedError: torch.export cannot express it.
    """
    module = without_checks(pt2.traced(contents, network))
    return module if compute(module) else network


def compute(module: fx.GraphModule) -> bool:
    """Put into an exported graph, in place, the values of all that depends on no input.

    A graph that writes into such a value stays as it is.

    Returns:
        Whether there was more than the module's own tensors.
    """
    known = _known(module)
    used = {node: [user for user in node.users if user not in known] for node in known if node.op != "get_attr"}
    used = {node: users for node, users in used.items() if users and isinstance(known[node], Tensor | int | float)}
    for count, (node, users) in enumerate(used.items()):
        value = known[node]
        if isinstance(value, Tensor):
            module.register_buffer(f"constant_{count}", value.clone(memory_format=torch.contiguous_format))
            with module.graph.inserting_before(node):
                held = module.graph.get_attr(f"constant_{count}")
            held.meta["val"] = node.meta["val"]
            value = held
        for user in users:
            user.args, user.kwargs = _with({node: value}, user.args), _with({node: value}, user.kwargs)
    module.graph.eliminate_dead_code()
    module.recompile()
    return bool(used)


@torch.no_grad()
def _known(module: fx.GraphModule) -> dict[fx.Node, Argument]:
    """The values of the nodes that depend on no input; none where one of them is overwritten."""
    known: dict[fx.Node, Argument] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr" and isinstance(value := attrgetter(str(node.target))(module), Tensor):
            known[node] = value
        if not callable(node.target) or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            continue
        form = _form(node)
        read = [one for one in node.all_input_nodes if one not in form]
        if _writes(node) and any(one in known for one in read):
            return {}
        if all(one in known for one in read):
            values: dict[fx.Node, Argument] = {**form, **known}
            known[node] = node.target(*_with(values, node.args), **_with(values, node.kwargs))
    return known


def _writes(node: fx.Node) -> bool:
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def _form(node: fx.Node) -> dict[fx.Node, Tensor]:
    """The argument of which a node reads no more than shape and dtype, as a tensor of those."""
    place = _FORM.get(node.target)
    one = None if place is None else node.args[place]
    if not isinstance(one, fx.Node):
        return {}
    return {one: torch.empty(one.meta["val"].shape, dtype=one.meta["val"].dtype)}


def _with(values: Mapping[fx.Node, Argument], args: T) -> T:
    """Arguments with these values in the places of nodes."""
    return fx.node.map_arg(args, lambda one: values.get(one, one))
