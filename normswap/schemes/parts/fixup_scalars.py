"""Dress in Fixup's scalars: where they sit, and the paper's reset (Zhang et al. 2019, arXiv:1901.09321, section 3)."""

from __future__ import annotations

from torch import fx, nn

from normswap.folding.canonical_form import undress
from normswap.folding.draft import Draft
from normswap.folding.passage import Blocked, check_linear, distinct, last_linear
from normswap.graph.inspection import LINEAR, Anatomy, Block
from normswap.layers import affine, reparametrized
from normswap.layers.activations import is_activation, is_activation_call
from normswap.layers.scalars import Scale
from normswap.schemes.parts.branch_scale import demand_blocks, seat_scale


def add_scalars(anatomy: Anatomy, *, fresh: bool) -> Draft:
    """Undress, then seat multipliers (1) at the branches' ends and biases (0) before layers and activations.

    Args:
        fresh: apply the paper's reset to the weights.

    Raises:
        RefusedError: no residual blocks, or a branch that ends where no module can be seated.
    """
    demand_blocks(anatomy)
    draft = undress(anatomy)
    if fresh:
        _reset(draft)
    _shift_layers(draft)
    _seat_scales(draft)
    _seat_biases(draft)
    return draft


def _seat_scales(draft: Draft) -> None:
    modules = draft.anatomy.traced.modules
    for block in draft.anatomy.part():
        if block.tail is None:
            draft.refusals[block.path] = "its branch ends in a function of the block itself, where no module can sit"
        elif isinstance(modules[block.tail], Scale) and block.tail not in draft.seats:
            draft.notes.append(f"{block.path} keeps its scalar")
        else:
            seat_scale(draft, block.tail, 1.0, block.order == "post")


def _seat_biases(draft: Draft) -> None:
    modules = draft.anatomy.traced.modules
    for path, module in modules.items():
        if draft.empty(path, module) and draft.anatomy.takes_part(path) and _before_activation(draft, module):
            draft.seat(path, "ScalarBias")


def _shift_layers(draft: Draft) -> None:
    """A bias before each layer; first of all, since a layer that ends a branch then takes its scalar in."""
    modules = draft.anatomy.traced.modules
    for path in linear_paths(draft.anatomy):
        kind = reparametrized.plain_class(modules[path])
        try:
            check_linear(draft, path, modules[path])
        except Blocked as why:
            draft.notes.append(f"{path} gets no bias before it: {why}")
            continue
        if kind not in reparametrized.SHIFTED and not isinstance(modules[path], reparametrized.Shifted):
            draft.notes.append(f"{path} gets no bias before it: it is a {kind.__name__}")
        else:
            draft.take(path).layer = "Shifted"


def linear_paths(anatomy: Anatomy) -> list[str]:
    """Every convolution and linear layer that forward calls and that takes part, each once."""
    traced = anatomy.traced
    paths = [str(node.target) for node in traced.nodes if isinstance(traced.module(node), LINEAR)]
    return distinct(traced.modules, [path for path in dict.fromkeys(paths) if anatomy.takes_part(path)])


def _before_activation(draft: Draft, module: nn.Module) -> bool:
    """Whether nothing but activations reads the site."""
    traced = draft.anatomy.traced
    if affine.activation(module) is not None:
        return True
    readers = [user for call in traced.calls.get(id(module), ()) for user in traced.users[call]]
    return bool(readers) and all(_is_activation(draft, node) for node in readers)


def _is_activation(draft: Draft, node: fx.Node) -> bool:
    module = draft.anatomy.traced.module(node)
    return is_activation_call(node.target) if module is None else is_activation(module)


def _reset(draft: Draft) -> None:
    """The paper's initialization, rules 1 and 2, as factors of the weights there are."""
    anatomy = draft.anatomy
    for block in anatomy.part():
        try:
            last, _ = last_linear(draft, block.branch, block.total)
        except Blocked as why:
            draft.notes.append(f"{block.path} is not reset: {why}")
            continue
        convs = _branch(anatomy, block, last)
        draft.take(last).gain = 0.0
        for path in convs:
            if path != last:
                draft.take(path).gain *= len(anatomy.blocks) ** (-1 / (2 * len(convs) - 2))
    if anatomy.classifier and anatomy.takes_part(anatomy.classifier):
        draft.take(anatomy.classifier).gain = 0.0


def _branch(anatomy: Anatomy, block: Block, last: str) -> list[str]:
    """The convolutions in a row that end in `last`: those on the branch, but not in gates."""
    traced, found = anatomy.traced, []
    skip = next(arm for arm in block.total.all_input_nodes if arm is not block.branch)
    node: fx.Node | None = traced.calls[id(traced.modules[last])][0]
    while node is not None and not traced.depends(skip, on=node):
        if isinstance(traced.module(node), LINEAR):
            found.append(str(node.target))
        node = traced.main_input(node)
    return found
