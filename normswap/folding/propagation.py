"""The rules of propagation: which steps of the graph an affine map, or a positive factor, commutes
with.

A value is rescaled by a positive factor in the layers that compute it, and divided by it in its
other readers. The function stays the same: c f(x) = f'(x) with c in the last weights of f, and g(y)
= g'(c y) with 1 / c in the first weights of g. A sum passes a scalar to both its arms, a gate x
g(x) to x alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from timm import layers as timm_layers
from torch import fx, nn
from torch.nn.utils import parametrize

from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.tracing import LINEAR, inputs, is_add, is_constant_mul, is_mul
from normswap.layers import affine, own_forwards, reparametrized
from normswap.layers.activations import HOMOGENEOUS_FUNCTIONS, is_homogeneous, keeps_forward
from normswap.layers.planned_layer import scales_branch
from normswap.plan import AbsorbMode

_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_LINEAR_CLASSES = (*_CONVOLUTIONS, nn.Linear, timm_layers.Conv2dSame, timm_layers.Linear)
_LINEAR_FORWARDS = {kind.forward for kind in _LINEAR_CLASSES}
_MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool2d)
_MEAN_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)
_POOLS = (*_MAX_POOLS, *_MEAN_POOLS, timm_layers.BlurPool2d)
_POOL_FUNCTIONS = (
    torch.mean,
    torch.amax,
    F.adaptive_avg_pool2d,
    F.avg_pool2d,
    F.max_pool2d,
    "mean",
    "amax",
)
_LAYOUTS = (
    torch.flatten,
    "view",
    "reshape",
    "flatten",
    "permute",
    "transpose",
    "contiguous",
    "unsqueeze",
    "squeeze",
)
_SCALAR_FUNCTIONS = (*HOMOGENEOUS_FUNCTIONS, *_POOL_FUNCTIONS, *_LAYOUTS)


class NotFoldable(Exception):  # noqa: N818 - a reason, no error
    """Why one way of folding is not open, in a few words."""


def consumers(
    builder: PlanBuilder, module: nn.Module, propagates: Callable[[fx.Node], bool]
) -> list[str]:
    """Paths of the convolutions that read this module; raises NotFoldable: something else reads it."""
    calls = builder.traced.calls[id(module)]
    paths = absorbing(
        builder, [reader for call in calls for _, reader in readers(builder, call, propagates)]
    )
    for path in paths:
        if isinstance(builder.traced.modules[path], nn.Linear):
            raise NotFoldable(
                f"{path} is a Linear: which of its inputs a channel becomes is not known"
            )
    return paths


def readers(
    builder: PlanBuilder, start: fx.Node, propagates: Callable[[fx.Node], bool]
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(value, reader) for each reader of `start` that does not pass it on; raises NotFoldable: the
    model returns it.
    """
    for user in builder.traced.users[start]:
        if user.op == "output":
            raise NotFoldable("the model returns it")
        if propagates(user) and len(inputs(user)) == 1:
            yield from readers(builder, user, propagates)
        else:
            yield start, user


def absorbing(builder: PlanBuilder, nodes: Sequence[fx.Node]) -> list[str]:
    """Paths of the linear layers that the nodes call.

    Raises NotFoldable: a node calls something else, or a layer is called elsewhere or cannot absorb
    a scale and shift.
    """
    for node in nodes:
        layer = _reading_linear(builder, node)
        if str(node.target) == builder.anatomy.classifier:
            raise NotFoldable(f"the features that {node.target} reads would change")
        if any(call not in nodes for call in builder.traced.calls[id(layer)]):
            raise NotFoldable(f"{node.target} is called elsewhere too, on another input")
    if not nodes:
        raise NotFoldable("nothing reads it")
    return distinct(builder.traced.modules, [str(node.target) for node in nodes])


def _reading_linear(builder: PlanBuilder, node: fx.Node, *, once: bool = False) -> nn.Module:
    """The linear layer that `node` calls, if it can absorb a scale of its input."""
    layer = builder.traced.module(node)
    if not isinstance(layer, LINEAR):
        raise NotFoldable(f"{name(node)} reads it, not a linear layer")
    check_linear(builder, str(node.target), layer, once=once)
    if reparametrized.keeps_input_bias(layer):
        raise NotFoldable(f"{node.target} adds a scalar to its input")
    return layer


def propagates_scale(builder: PlanBuilder, node: fx.Node) -> bool:
    """Whether f(c x) = c f(x) for a positive scale c per channel, after the plan."""
    module = builder.traced.module(node)
    if module is None:
        return node.target in HOMOGENEOUS_FUNCTIONS or builder.is_identity(node)
    if builder.is_removed(str(node.target), module):
        return is_homogeneous(affine.activation(module))
    return builder.is_identity(node) or keeps_forward(module, _POOLS) or is_homogeneous(module)


def scalar_readers(builder: PlanBuilder, start: fx.Node, main: set[fx.Node]) -> list[str]:
    """Convolutions beside the `main` path that read `start`, through steps that commute with a
    positive scalar.

    Raises NotFoldable: something else reads it.
    """

    def propagates(node: fx.Node) -> bool:
        return (
            node.target in _SCALAR_FUNCTIONS
            or is_constant_mul(node)
            or propagates_scale(builder, node)
        )

    paths = []
    for user in builder.traced.users[start]:
        if user in main:
            continue
        for _, reader in (
            readers(builder, user, propagates) if propagates(user) else [(start, user)]
        ):
            if reader in main:
                raise NotFoldable(f"{name(reader)} reads it")
            _reading_linear(builder, reader, once=True)
            paths.append(str(reader.target))
    return list(dict.fromkeys(paths))


def check_linear(builder: PlanBuilder, path: str, conv: nn.Module, *, once: bool = False) -> None:
    """Raise NotFoldable where a linear layer cannot absorb its neighbours, or, with `once`, is
    called repeatedly.
    """
    made_anew = reparametrized.is_reparametrized(conv)
    forward_was_read = type(conv).forward in _LINEAR_FORWARDS and not own_forwards.is_patched(conv)
    if not made_anew and not forward_was_read and not own_forwards.computes(conv):
        raise NotFoldable(f"{path} ({type(conv).__name__}) has a forward of its own")
    if made_anew and not builder.anatomy.takes_part(path):
        raise NotFoldable(f"{path} ({type(conv).__name__}) is to stay as it is")
    if not made_anew and parametrize.is_parametrized(conv):
        raise NotFoldable(f"{path} has a parametrized weight")
    if any((conv._forward_hooks, conv._forward_pre_hooks)):
        raise NotFoldable(f"{path} has forward hooks, which see its output")
    if builder.traced.owners[id(conv.weight)] > 1:
        raise NotFoldable(f"{path}.weight is shared with another module")
    read = builder.traced.read_directly(conv)
    if read:
        raise NotFoldable(f"{read} is read elsewhere in forward")
    if once and len(builder.traced.calls[id(conv)]) > 1:
        raise NotFoldable(f"{path} is called more than once")


def distinct(modules: dict[str, nn.Module], paths: list[str]) -> list[str]:
    """One path per module, in order."""
    return list({id(modules[path]): path for path in reversed(paths)}.values())[::-1]


def name(node: fx.Node) -> str:
    """The name of what the node calls."""
    if isinstance(node.target, str):
        return node.target
    return getattr(node.target, "__name__", node.name)


def last_linear(builder: PlanBuilder, node: fx.Node, before: fx.Node) -> tuple[str, list[str]]:
    """The convolution from which a scale can reach `node`, and the linear maps that must be divided
    by it.

    A gate x * g(x) passes a scale c if the first linear map of g is divided by c. `before` reads
    `node`: from there on nothing changes. Raises NotFoldable: a scale cannot pass.
    """
    passed = {before}
    gates: list[str] = []
    while True:
        if len(builder.traced.users[node]) > 1:
            gates += scalar_readers(builder, node, passed)
        if isinstance(builder.traced.module(node), LINEAR):
            break
        above = builder.traced.main_input(node)
        if above is None or not (is_mul(node) or propagates_scale(builder, node)):
            raise NotFoldable(f"a scale cannot pass {name(node)}")
        passed.add(node)
        node = above
    path = str(node.target)
    check_linear(builder, path, builder.traced.modules[path], once=True)
    return path, list(dict.fromkeys(gates))


def enlarge(builder: PlanBuilder, node: fx.Node, factor: float, by: set[fx.Node]) -> list[str]:
    """Multiply the value of `node` by `factor` for its readers `by`, and divide by it in all other
    readers.

    A negative factor passes linear maps alone. A factor of 0 is possible where every way to the
    output passes `by`.

    Returns the paths of the linear layers that absorb the factor. Raises NotFoldable: a step is not
    homogeneous, or another reader cannot be compensated; the builder's changes must then be undone
    (`attempt`).
    """
    if any(user not in by for user in builder.traced.users[node]):
        others = scalar_readers(builder, node, set(by))
        if not factor >= 0 or (factor == 0 and any(_escapes(builder, path, by) for path in others)):
            raise NotFoldable(
                f"a factor of {factor:g} cannot be given back to what else reads {name(node)}"
            )
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
    linears = {
        path: replace(linear, reads=[*linear.reads]) for path, linear in builder.linears.items()
    }
    replacements = dict(builder.replacements)
    try:
        yield
    except NotFoldable:
        builder.linears = linears
        builder.replacements = replacements
        raise
