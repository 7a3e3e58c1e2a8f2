"""Values that are overwritten in place, which nothing may pass on uncopied."""

from __future__ import annotations

import inspect
import operator

from torch import fx

from normswap.folding.draft import Draft
from normswap.graph.tracing import Traced, inputs

_IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv)


def overwritten(draft: Draft, call: fx.Node) -> fx.Node | None:
    """A later node that writes into the value that `call` reads, which must then not be passed on uncopied."""
    traced = draft.anatomy.traced
    late = traced.index(call)
    (value,) = inputs(call)
    while (draft.silent(value) or overwrites(traced, value)) and inputs(value):
        value = inputs(value)[0]
    family = [value]
    for node in family:
        for user in traced.users[node]:
            if overwrites(traced, user) and inputs(user)[0] is node:
                if traced.index(user) > late:
                    return user
                family.append(user)
            elif draft.silent(user) and user is not call:
                family.append(user)
    return None


def overwrites(traced: Traced, node: fx.Node) -> bool:
    """Whether `node` writes its result into its first input."""
    module = traced.module(node)
    if module is not None:
        return bool(getattr(module, "inplace", False))
    if node.op == "call_method":
        return str(node.target).endswith("_")
    if node.op != "call_function":
        return False
    if getattr(node.target, "__name__", "").endswith("_") or node.target in _IN_PLACE:
        return True
    try:
        given = inspect.signature(node.target).bind_partial(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # torch's own have none, and no `inplace` either
        return False
    return given.arguments.get("inplace") is True
