"""Values that are overwritten in place: layers that pass them on must copy."""

import inspect
import operator

from torch import fx, nn

from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.spelling import after
from normswap.graph.tracing import Traced, inputs
from normswap.layers.activations import is_identity, keeps_forward
from normswap.layers.placeholders import Vacant

_IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv)
_PASSING = (nn.Identity, nn.Flatten, Vacant)
_LAYOUTS = (
    "view",
    "view_as",
    "reshape",
    "flatten",
    "permute",
    "transpose",
    "squeeze",
    "unsqueeze",
    "expand",
)
_VIEWS = (*_LAYOUTS, "contiguous", "getitem", "chunk", "split", "narrow", "detach")


def overwritten(builder: PlanBuilder, call: fx.Node) -> fx.Node | None:
    """A node after `call` that writes into the value that `call` reads; None where there is none."""
    traced = builder.traced
    late = traced.index(call)
    (value,) = inputs(call)
    while (builder.is_identity(value) or overwrites(traced, value)) and inputs(value):
        value = inputs(value)[0]
    family = [value]
    for node in family:
        for user in traced.users[node]:
            if overwrites(traced, user) and inputs(user)[0] is node:
                if traced.index(user) > late:
                    return user
                family.append(user)
            elif builder.is_identity(user) and user is not call:
                family.append(user)
    return None


def aliasing_conflicts(builder: PlanBuilder) -> dict[str, str]:
    """Why layers that pass on their input's memory must stay: it is written to under one name and
    read by another.
    """
    traced = builder.traced
    conflicts = {}
    for node in traced.nodes:
        if node.meta.get("old_name") and _copies(builder, str(node.target)):
            conflicts[str(node.target)] = (
                "it writes into what it reads, and that is read later by its older name"
            )
        if node.target is not after:
            continue
        first, second = (_passing(traced, value) for value in inputs(node))
        for name in (
            *(n for n in first if n not in second),
            *(n for n in second if n not in first[1:]),
        ):
            path = str(name.target)
            if name.op == "call_module" and _copies(builder, path):
                conflicts[path] = (
                    "what it passes on is written to later, and read under the name it had before"
                )
    return conflicts


def _passing(traced: Traced, value: fx.Node) -> list[fx.Node]:
    """The nodes that have passed on the value's memory in eval mode, the latest first."""
    passed = []
    while inputs(value) and (shares(traced, value) or is_identity(traced.module(value))):
        passed.append(value)
        value = inputs(value)[0]
    return passed


def shares(traced: Traced, node: fx.Node) -> bool:
    """Whether the value of `node` is in the memory of its first input, in training, too."""
    module = traced.module(node)
    if module is None:
        return overwrites(traced, node) or getattr(node.target, "__name__", node.target) in _VIEWS
    if isinstance(module, Vacant) and module.act is not None:
        module = module.act
    return keeps_forward(module, _PASSING) or bool(getattr(module, "inplace", False))


def _copies(builder: PlanBuilder, path: str) -> bool:
    return path in builder.scalars or (path in builder.replacements and not builder.removes(path))


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
    assert callable(node.target)
    try:
        bound = inspect.signature(node.target).bind_partial(*node.args, **node.kwargs)
    except (TypeError, ValueError):
        return False
    return bound.arguments.get("inplace") is True
