"""Rescaling: multiply a value by a positive scalar in the layers that compute it, and divide in its other readers.

The function stays the same: c f(x) = f'(x) with c in the last weights of f, and g(y) = g'(c y) with 1 / c in the first
weights of g. A sum passes a scalar to both its arms, a gate x g(x) to x alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import fx

from normswap.folding.plan_builder import PlanBuilder
from normswap.folding.propagation import NotFoldable, check_linear, name, propagates_scale, scalar_readers
from normswap.graph.tracing import LINEAR, inputs, is_add, is_constant_mul, is_mul
from normswap.layers.own import scales_branch
from normswap.plan import AbsorbMode


def enlarge(builder: PlanBuilder, node: fx.Node, factor: float, by: set[fx.Node]) -> list[str]:
    """Multiply the value of `node` by `factor` for its readers `by`, and divide by it in all other readers.

    A negative factor passes linear maps alone. A factor of 0 is possible where every way to the output passes `by`.

    Returns the paths of the linear layers that absorb the factor. Raises NotFoldable: a step is not homogeneous, or
    another reader cannot be compensated; the builder's changes must then be undone (`attempt`).
    """
    if any(user not in by for user in builder.traced.users[node]):
        others = scalar_readers(builder, node, set(by))
        if not factor >= 0 or (factor == 0 and any(_escapes(builder, path, by) for path in others)):
            raise NotFoldable(f"a factor of {factor:g} cannot be given back to what else reads {name(node)}")
        for path in others if factor else ():
            shrink_input(builder, path, factor)
    module = builder.traced.module(node)
    if isinstance(module, LINEAR):
        path = str(node.target)
        check_linear(builder, path, module, once=True)
        builder.linear(path).gain *= factor
        return [path]
    if is_add(node):
        return [path for arm in inputs(node) for path in enlarge(builder, arm, factor, {node})]
    above = builder.traced.main_input(node)
    scalar = is_constant_mul(node) or (scales_branch(module) and module.bias is None)
    if above is None or not (is_mul(node) or scalar or propagates_scale(builder, node)):
        raise NotFoldable(f"a scale cannot pass {name(node)}")
    if not (factor >= 0 or scalar or builder.is_identity(node)):
        raise NotFoldable(f"a factor of {factor:g} cannot pass {name(node)}")
    return enlarge(builder, above, factor, {node})


def _escapes(builder: PlanBuilder, path: str, ends: set[fx.Node]) -> bool:
    """Whether the output of the module at `path` reaches the model's output without passing `ends`."""
    visited = set(builder.traced.calls[id(builder.traced.modules[path])])
    ahead = list(visited)
    while ahead:
        fresh = {user for user in builder.traced.users[ahead.pop()] if user not in ends} - visited
        visited |= fresh
        ahead += fresh
    return any(node.op == "output" for node in visited)


def shrink_input(builder: PlanBuilder, path: str, factor: float) -> None:
    """Let the linear layer at `path` divide its input by `factor`."""
    linear = builder.linear(path)
    if any(absorption.way is AbsorbMode.BEFORE for _, absorption in linear.reads):
        raise NotFoldable(f"{path} has absorbed a shift of its input")
    linear.in_gain /= factor


@contextmanager
def attempt(builder: PlanBuilder) -> Iterator[None]:
    """Undo the changes of the builder's layers and replacements on a NotFoldable."""
    linears = {path: replace(linear, reads=[*linear.reads]) for path, linear in builder.linears.items()}
    replacements = dict(builder.replacements)
    try:
        yield
    except NotFoldable:
        builder.linears, builder.replacements = linears, replacements
        raise
