"""Dress in fixed factors: y = a skip + b f for every residual sum, by a change of gauge (`gauge`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from normswap.folding.canonical_form import undress
from normswap.folding.draft import Draft
from normswap.folding.gauge import attempt, enlarge
from normswap.folding.passage import Blocked
from normswap.graph.inspection import Anatomy, Block
from normswap.layers.activations import is_homogeneous
from normswap.layers.scalars import Scale
from normswap.schemes.parts.branch_scale import demand_blocks, seat_scale


def scale_sums(anatomy: Anatomy, factors: Sequence[tuple[float, float]]) -> Draft:
    """Undress, then give block l its (a, b).

    a (x + (b / a) f): the branch is made a / b times as large, what comes out of the activation after the sum 1 / a
    times, which goes back through the identity skips to where the stage's stream is made.

    Raises:
        RefusedError: the network has no residual blocks.
    """
    demand_blocks(anatomy)
    draft = undress(anatomy)
    seats: list[tuple[str, float]] = []
    for block, (a, b) in zip(anatomy.blocks, factors, strict=True):
        if not anatomy.takes_part(block.path):
            continue
        try:
            with attempt(draft):
                seats += _scale(draft, block, a, b)
        except Blocked as why:
            draft.refusals[block.path] = str(why)
    for path, value in seats:
        if draft.refusals:
            break
        seat_scale(draft, path, value, False, layer="FixedScale")
    return draft


def _scale(draft: Draft, block: Block, a: float, b: float) -> list[tuple[str, float]]:
    """The two factors' seats, and their values; their inverses go into the weights."""
    modules = draft.anatomy.traced.modules
    if block.tail is None:
        raise Blocked("its branch ends in a function of the block itself, where no module can sit")
    tail: Any = modules[block.tail]
    if isinstance(tail, Scale) and tail.bias is not None and block.tail not in draft.seats:
        raise Blocked(f"it has a scalar that {draft.verdicts.get(block.tail, 'stays')}")
    enlarge(draft, block.branch, a / b, {block.total})
    if a == 1:
        return [(block.tail, b)]
    act, seat = _after_sum(draft, block)
    enlarge(draft, act, 1 / a, set(draft.anatomy.traced.users[act]))
    return [(block.tail, b / a), (seat, a)]


def _after_sum(draft: Draft, block: Block) -> tuple[fx.Node, str]:
    """The activation after the sum, and where a factor of its output can sit."""
    traced = draft.anatomy.traced
    users = traced.users[block.total]
    module = traced.module(users[0]) if len(users) == 1 else None
    if module is None or not is_homogeneous(module) or len(traced.calls[id(module)]) > 1:
        raise Blocked("no ReLU module of its own follows the sum, where a factor of the sum could sit")
    after = traced.users[users[0]]
    vacated = len(after) == 1 and draft.vacated(str(after[0].target)) and isinstance(traced.module(after[0]), Scale)
    return users[0], str((after[0] if vacated else users[0]).target)
