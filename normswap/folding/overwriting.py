"""Values that are overwritten in place, and the layers that must therefore stay as they are."""

import inspect
import operator

from torch import fx, nn

from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.spelling import after
from normswap.graph.tracing import Traced, inputs
from normswap.layers.placeholders import Vacant
from normswap.sites.activations import is_identity, keeps_forward

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
    """Return the first node after `call` that writes into the value that `call` reads, or None."""
    traced = builder.traced
    call_index = traced.index(call)

    # Each node is a name of a tensor. Identities, and functions that write in place, return their
    # input's memory under a new name. Go up to the first name.
    (value,) = inputs(call)
    while (builder.is_identity(value) or overwrites(traced, value)) and inputs(value):
        value = inputs(value)[0]

    # Then look at the readers of every name of that memory. A reader that makes another name is
    # appended to `names` while the loop goes over it, so that its own readers are looked at too.
    names = [value]
    for node in names:
        for user in traced.users[node]:
            if overwrites(traced, user) and inputs(user)[0] is node:
                if traced.index(user) > call_index:
                    return user
                names.append(user)
            elif builder.is_identity(user) and user is not call:
                names.append(user)
    return None


def aliasing_conflicts(builder: PlanBuilder) -> dict[str, str]:
    """Return the layers that must not be replaced, because they return their input's memory.

    That memory is written to under one name and read under another. The plan would replace the
    layer by one that returns new memory. Then the reader would no longer see what was written.

    Returns:
        The path of each layer, with the reason.
    """
    traced = builder.traced
    conflicts = {}
    for node in traced.nodes:
        # The recorder sets `old_name` on a layer that wrote into its input, if forward then read
        # the tensor object that it had passed to the layer, and not the layer's result.
        if node.meta.get("old_name") and _copies(builder, str(node.target)):
            conflicts[str(node.target)] = (
                "it writes into what it reads, and that is read later by its older name"
            )
        # A node with the target `after` is a read of a value whose memory was written to through
        # another view.
        if node.target is not after:
            continue

        for step in _parting_steps(traced, node):
            path = str(step.target)
            if step.op == "call_module" and _copies(builder, path):
                conflicts[path] = (
                    "what it passes on is written to later, and read under the name it had before"
                )
    return conflicts


def _parting_steps(traced: Traced, after_node: fx.Node) -> list[fx.Node]:
    """Return the steps that must not copy, so that a later read of a tensor sees a write to it.

    Args:
        traced: The recorded forward.
        after_node: A node that the recorder adds where a value is read after a write. Its two
            inputs are the value, and the node that wrote into the value's memory through another
            view of it.
    """
    # Views, and layers that return their input, lead from the memory to each of the two inputs. A
    # step on the way to one of them alone would part them.
    to_value, to_write = (_passing(traced, value) for value in inputs(after_node))
    only_to_value = [step for step in to_value if step not in to_write]
    # The value's own node, which comes first, is parted from the write as any other.
    only_to_write = [step for step in to_write if step not in to_value]
    return [*only_to_value, *only_to_write]


def _passing(traced: Traced, value: fx.Node) -> list[fx.Node]:
    """Return the steps, up to `value`, that handed on the memory in which `value` is.

    In eval mode these are views, operations in place, and layers that return their input. The
    latest step is the first.
    """
    passed = []
    while inputs(value) and (shares(traced, value) or is_identity(traced.module(value))):
        passed.append(value)
        value = inputs(value)[0]
    return passed


def shares(traced: Traced, node: fx.Node) -> bool:
    """Whether the value of `node` is always in the memory of its first input, even in training."""
    module = traced.module(node)
    if module is None:
        return overwrites(traced, node) or getattr(node.target, "__name__", node.target) in _VIEWS
    # A Vacant stands where a norm was removed, and does no more than the norm's activation.
    if isinstance(module, Vacant) and module.act is not None:
        module = module.act
    return keeps_forward(module, _PASSING) or bool(getattr(module, "inplace", False))


def _copies(builder: PlanBuilder, path: str) -> bool:
    """Whether the plan puts a layer at `path` that returns new memory, not that of its input."""
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

    # Functions such as F.relu have an argument `inplace`.
    assert callable(node.target)
    try:
        bound = inspect.signature(node.target).bind_partial(*node.args, **node.kwargs)
    except (TypeError, ValueError):
        return False
    return bound.arguments.get("inplace") is True
