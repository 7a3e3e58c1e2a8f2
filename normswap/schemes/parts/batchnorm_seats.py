"""What schemes share that put something else in the seats of BatchNorms: which seats, and the convolutions before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from normswap.errors import RefusedError
from normswap.folding.canonical_form import undress
from normswap.folding.draft import Draft
from normswap.folding.passage import Blocked, check_linear, read_directly
from normswap.graph.inspection import LINEAR, Anatomy
from normswap.graph.tracing import inputs
from normswap.layers import affine
from normswap.plan import Step


def batchnorm_seats(anatomy: Anatomy, newcomer: str) -> tuple[Draft, Iterator[tuple[str, nn.Module]]]:
    """The draft that undresses all but the BatchNorms, and each of those that is called and can be read, by path; as
    they are asked for, the draft refuses the others.

    Raises:
        RefusedError: there is no BatchNorm for the newcomer.
    """
    modules = anatomy.traced.modules
    norms = {path: module for path, module in modules.items() if affine.is_batchnorm(module)}
    norms = {path: module for path, module in norms.items() if anatomy.takes_part(path)}
    if not norms:
        remedy = "Where BatchNorm was folded away, `--to unfold` or `--to batchnorm` brings it back"
        kind = next((type(m).__name__ for m in modules.values() if affine.is_registered(m)), None)
        remedy = f"Say what it reads: normswap.register_norm({kind}, affine=..., statistics=...)" if kind else remedy
        raise RefusedError(f"no BatchNorm to put a {newcomer} in the seat of", remedy=remedy)
    draft = undress(anatomy, leave=norms)
    return draft, _readable(draft, norms)


def _readable(draft: Draft, norms: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    traced = draft.anatomy.traced
    seen: set[int] = set()
    for path, module in norms.items():
        if id(module) in seen or id(module) not in traced.calls:
            continue
        seen.add(id(module))
        why = affine.refusal(module) or read_directly(traced, module)
        if why:
            draft.refusals[path] = why
        else:
            yield path, module


def conv_before(draft: Draft, norm: nn.Module) -> str | None:
    """The convolution whose output this norm, and nothing else, reads, if it can be given a bias."""
    traced = draft.anatomy.traced
    calls = traced.calls[id(norm)]
    (node,) = inputs(calls[0])
    conv = traced.module(node)
    if len(calls) > 1 or not isinstance(conv, LINEAR) or len(traced.users[node]) > 1 or len(traced.calls[id(conv)]) > 1:
        return None
    try:
        check_linear(draft, str(node.target), conv)
    except Blocked:
        return None
    return None if str(node.target) in draft.takes else str(node.target)


def exchanged(step: Step, layer: str, other: str) -> Step:
    """The same step with another layer in the seats of this one."""
    return replace(step, edits=tuple(replace(e, layer=other) if e.layer == layer else e for e in step.edits))
