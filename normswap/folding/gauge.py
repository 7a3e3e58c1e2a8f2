"""The gauge: a positive scalar on a value, taken from what makes it, and given back by whatever else reads it.

The function stays what it is: c f(x) = f'(x) with c in the last weights of f, and
g(y) = g'(c y) with 1 / c in the first weights of g. A sum passes a scalar to both its arms, a gate x g(x) to x alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import fx

from normswap.folding.draft import Blocked, Draft, check_linear, name, passes_positive, scalar_readers
from normswap.graph.inspection import LINEAR
from normswap.graph.tracing import inputs, is_add, is_constant_mul, is_mul
from normswap.layers import seats


def enlarge(draft: Draft, node: fx.Node, factor: float, by: set[fx.Node]) -> None:
    """Multiply the value of `node` by `factor` for its readers `by`; whatever else reads it sees what it saw.

    A factor that is not positive passes nothing but linear maps.

    Raises:
        Blocked: something on the way is not homogeneous, or another reader cannot be compensated; nothing is to be kept
            of the draft then (see `attempt`).
    """
    traced = draft.anatomy.traced
    if any(user not in by for user in traced.users[node]):
        if not factor > 0:
            raise Blocked(f"a factor of {factor:g} cannot be given back to what else reads {name(node)}")
        for path in scalar_readers(draft, node, set(by)):
            shrink_input(draft, path, factor)
    module = traced.module(node)
    if isinstance(module, LINEAR):
        path = str(node.target)
        check_linear(draft, path, module)
        if len(traced.calls[id(module)]) > 1:
            raise Blocked(f"{path} is called more than once")
        draft.take(path).gain *= factor
    elif is_add(node):
        for arm in inputs(node):
            enlarge(draft, arm, factor, {node})
    else:
        above = traced.main_input(node)
        scalar = is_constant_mul(node) or (isinstance(module, seats.Scale) and module.bias is None)
        if above is None or not (is_mul(node) or scalar or passes_positive(draft, node)):
            raise Blocked(f"a scale cannot pass {name(node)}")
        if not (factor > 0 or scalar or draft.silent(node)):
            raise Blocked(f"a factor of {factor:g} cannot pass {name(node)}")
        enlarge(draft, above, factor, {node})


def shrink_input(draft: Draft, path: str, factor: float) -> None:
    """Let the linear layer at `path` divide its input by `factor`."""
    take = draft.take(path)
    if any(how == "before" for _, how in take.reads):
        raise Blocked(f"{path} has taken in a shift of its input")
    take.in_gain /= factor


def constant(node: fx.Node) -> float:
    """The number by which `node` multiplies."""
    return float(next(arg for arg in node.args if isinstance(arg, int | float)))  # type: ignore[arg-type]


@contextmanager
def attempt(draft: Draft) -> Iterator[None]:
    """Undo what was done to the draft's takes and seats if it turns out to be blocked."""
    before = {path: (list(take.reads), take.gain, take.in_gain) for path, take in draft.takes.items()}
    seats = dict(draft.seats)
    try:
        yield
    except Blocked:
        for path in [*draft.takes]:
            if path not in before:
                del draft.takes[path]
                continue
            take = draft.takes[path]
            take.reads, take.gain, take.in_gain = before[path]
        draft.seats = seats
        raise
