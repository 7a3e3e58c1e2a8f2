"""Dress in fixed factors: y = a skip + b f for every residual sum, by a change of gauge (`gauge`)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from normswap.folding.canonical_form import undress
from normswap.folding.draft import Draft
from normswap.folding.gauge import attempt, enlarge
from normswap.folding.passage import Blocked, passes_positive
from normswap.graph.inspection import Anatomy, Block
from normswap.graph.tracing import inputs
from normswap.layers.activations import is_homogeneous
from normswap.layers.scalars import Scale
from normswap.schemes.parts.branch_scale import demand_blocks, seat_scale


def scale_sums(anatomy: Anatomy, factors: Sequence[tuple[float, float]]) -> Draft:
    """Undress, then give block l its (a, b).

    a (x + (b / a) f): the branch is made a / b times as large, what comes out of the activation after the sum 1 / a
    times, which goes back through the identity skips to where the stage's stream is made. Where no module can hold a,
    the branches that write to the stream do instead: divided by a_1 ... a_l, the stream is x + b / (a_1 ... a_l) f.

    Raises:
        RefusedError: the network has no residual blocks.
    """
    demand_blocks(anatomy)
    draft = undress(anatomy)
    seats: list[tuple[str, float]] = []
    owed: dict[fx.Node, float] = {}  # by sum: what the stream there is divided by
    for block, (a, b) in zip(anatomy.blocks, factors, strict=True):
        if not anatomy.takes_part(block.path):
            continue
        try:
            with attempt(draft):
                seats += _scale(draft, block, a, b, owed)
        except Blocked as why:
            draft.refusals[block.path] = str(why)
    for path, value in seats:
        if draft.refusals:
            break
        seat_scale(draft, path, value, False, layer="FixedScale")
    return draft


def _scale(draft: Draft, block: Block, a: float, b: float, owed: dict[fx.Node, float]) -> list[tuple[str, float]]:
    """The two factors' seats, and their values; their inverses go into the weights."""
    modules = draft.anatomy.traced.modules
    if block.tail is None:
        raise Blocked("its branch ends in a function of the block itself, where no module can sit")
    tail = modules[block.tail]
    if isinstance(tail, Scale) and tail.bias is not None and block.tail not in draft.seats:
        raise Blocked(f"it has a scalar that {draft.outcomes.get(block.tail, 'stays')}")
    if a == 1:
        enlarge(draft, block.branch, 1 / b, {block.total})
        return [(block.tail, b)]
    held = _after_sum(draft, block)
    if held is None:
        owed[block.total] = a * _owed_before(draft, block, owed)
        b /= owed[block.total]
        enlarge(draft, block.branch, 1 / b, {block.total})
        return [(block.tail, b)]
    act, seat = held
    enlarge(draft, block.branch, a / b, {block.total})
    enlarge(draft, act, 1 / a, set(draft.anatomy.traced.users[act]))
    return [(block.tail, b / a), (seat, a)]


def _owed_before(draft: Draft, block: Block, owed: dict[fx.Node, float]) -> float:
    """What the stream is divided by that comes in by the skip; 1 where a convolution makes it."""
    traced = draft.anatomy.traced
    node: fx.Node | None = next(arm for arm in inputs(block.total) if arm is not block.branch)
    while node is not None and node not in owed and passes_positive(draft, node):
        node = traced.main_input(node)
    return 1.0 if node is None else owed.get(node, 1.0)


def _after_sum(draft: Draft, block: Block) -> tuple[fx.Node, str] | None:
    """The activation after the sum, and where a factor of its output can sit; None where nothing can hold one.

    Raises:
        Blocked: the activation is not homogeneous: a factor cannot be taken off what it reads either.
    """
    traced = draft.anatomy.traced
    users = traced.users[block.total]
    module = traced.module(users[0]) if len(users) == 1 else None
    if module is None or not is_homogeneous(module) or len(traced.calls[id(module)]) > 1:
        if block.order == "post" and not passes_positive(draft, users[0]):
            raise Blocked("a factor of the sum cannot pass the activation that follows")
        return None
    after = traced.users[users[0]]
    vacated = len(after) == 1 and draft.vacated(str(after[0].target)) and isinstance(traced.module(after[0]), Scale)
    return users[0], str((after[0] if vacated else users[0]).target)
