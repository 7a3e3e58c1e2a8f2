"""The rules of propagation: which steps of the graph pass on an affine map, or a positive factor.

The layers that compute a value multiply it by a positive factor c, and the layers that read it
divide by c. The function stays the same: c f(x) = f'(x) with c in the last weights of f, and
g(y) = g'(c y) with 1 / c in the first weights of g. A sum passes a scalar to both its terms, and a
gate x g(x) passes a scalar to x alone.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from timm import layers as timm_layers
from torch import fx, nn
from torch.nn.utils import parametrize

from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.tracing import LINEAR, inputs, is_add, is_constant_mul, is_mul
from normswap.layers import reparametrized
from normswap.layers.planned_layer import scales_branch
from normswap.plan import AbsorbMode
from normswap.sites import own_forwards
from normswap.sites.activations import HOMOGENEOUS_FUNCTIONS, is_homogeneous, is_pool

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
    """Raised if a norm, scale or shift cannot move into the layers beside it.

    The message says why in a few words, which notes and refusals quote.
    """


def consumers(
    builder: PlanBuilder, module: nn.Module, propagates: Callable[[fx.Node], bool]
) -> list[str]:
    """Return the paths of the convolutions that read the output of `module`, each once.

    The affine map of `module`, or its scale, is to move into these convolutions.

    Args:
        builder: The plan in the making.
        module: The module whose output is read.
        propagates: Returns whether the affine map, or the scale, can pass a node between `module`
            and a convolution.

    Raises:
        NotFoldable: Anything but a convolution reads the output, or a convolution cannot absorb a
            scale and shift of its input.
    """
    reading_nodes: list[fx.Node] = []
    for call in builder.traced.calls[id(module)]:
        reading_nodes += [reader for _, reader in readers(builder, call, propagates)]

    paths = absorbing(builder, reading_nodes)
    for path in paths:
        if isinstance(builder.traced.modules[path], nn.Linear):
            raise NotFoldable(
                f"{path} is a Linear: which of its inputs a channel becomes is not known"
            )
    return paths


def readers(
    builder: PlanBuilder, start: fx.Node, propagates: Callable[[fx.Node], bool]
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield (value, reader) for each node that reads the value of `start` and does not pass it on.

    `value` is the node that `reader` reads: `start` itself, or a node that passed its value on.

    Args:
        builder: The plan in the making.
        start: The node whose readers are wanted.
        propagates: Returns whether a node passes the value on, so that its readers count instead.

    Raises:
        NotFoldable: The network returns the value.
    """
    for user in builder.traced.users[start]:
        if user.op == "output":
            raise NotFoldable("the model returns it")
        if propagates(user) and len(inputs(user)) == 1:
            yield from readers(builder, user, propagates)
        else:
            yield start, user


def absorbing(builder: PlanBuilder, nodes: Sequence[fx.Node]) -> list[str]:
    """Return the paths of the linear layers that the nodes call, each once.

    Args:
        builder: The plan in the making.
        nodes: All nodes that read the output of a layer whose scale and shift is to move into the
            weights of these linear layers.

    Raises:
        NotFoldable: A node calls no linear layer, a layer is called on another input as well, or a
            layer cannot absorb a scale and shift of its input.
    """
    for node in nodes:
        linear = _reading_linear(builder, node)
        if str(node.target) == builder.anatomy.classifier:
            raise NotFoldable(f"the features that {node.target} reads would change")
        if any(call not in nodes for call in builder.traced.calls[id(linear)]):
            raise NotFoldable(f"{node.target} is called elsewhere too, on another input")
    if not nodes:
        raise NotFoldable("nothing reads it")
    return distinct(builder.traced.modules, [str(node.target) for node in nodes])


def _reading_linear(builder: PlanBuilder, node: fx.Node, *, once: bool = False) -> nn.Module:
    """Return the linear layer that `node` calls, if the layer can absorb a scale of its input.

    Args:
        builder: The plan in the making.
        node: A node that reads the scaled value.
        once: Whether the layer must be called only once.

    Raises:
        NotFoldable: `node` calls no linear layer, or the layer cannot absorb a scale of its input.
    """
    linear = builder.traced.module(node)
    if not isinstance(linear, LINEAR):
        raise NotFoldable(f"{name(node)} reads it, not a linear layer")
    check_linear(builder, str(node.target), linear, once=once)
    if reparametrized.keeps_input_bias(linear):
        raise NotFoldable(f"{node.target} adds a scalar to its input")
    return linear


def propagates_scale(builder: PlanBuilder, node: fx.Node) -> bool:
    """Whether f(c x) = c f(x) for the node's f and a positive c per channel.

    f is what the node computes once the plan is carried out.
    """
    site = builder.traced.site_at(node)
    # The node calls a function or method, not a module.
    if site is None:
        return node.target in HOMOGENEOUS_FUNCTIONS or builder.is_identity(node)
    # The plan removes the norm here, and only the activation that the norm applied stays.
    if builder.is_removed(str(node.target), site.module):
        return is_homogeneous(site.activation)
    return builder.is_identity(node) or is_pool(site.module) or is_homogeneous(site.module)


def scalar_readers(builder: PlanBuilder, start: fx.Node, main: set[fx.Node]) -> list[str]:
    """Return the paths of the linear layers that read the value of a node.

    Between the node and the layers there may be steps that commute with a positive scalar. The
    layers can undo a positive scalar that the value is multiplied by.

    Args:
        builder: The plan in the making.
        start: The node whose value is read.
        main: Readers of `start` that are to see the multiplied value. They are left out.

    Raises:
        NotFoldable: Anything else reads the value, or a layer cannot absorb a scale of its input.
    """

    def propagates(node: fx.Node) -> bool:
        is_homogeneous_step = node.target in _SCALAR_FUNCTIONS or is_constant_mul(node)
        return is_homogeneous_step or propagates_scale(builder, node)

    # Readers that pass the scalar on are followed to the linear layers behind them.
    paths: list[str] = []
    for user in builder.traced.users[start]:
        if user in main:
            continue

        reached: Iterable[tuple[fx.Node, fx.Node]] = [(start, user)]
        if propagates(user):
            reached = readers(builder, user, propagates)
        for _, reader in reached:
            # A node of `main` is to see the multiplied value, so it cannot undo it as well.
            if reader in main:
                raise NotFoldable(f"{name(reader)} reads it")
            _reading_linear(builder, reader, once=True)
            paths.append(str(reader.target))
    return list(dict.fromkeys(paths))


def check_linear(builder: PlanBuilder, path: str, linear: nn.Module, *, once: bool = False) -> None:
    """Raise NotFoldable if the weights of a linear layer must not be changed.

    They are to absorb a norm or a scale beside the layer.

    Args:
        builder: The plan in the making.
        path: The path of the layer.
        linear: The layer itself.
        once: Whether the layer must be called only once.
    """
    # The layer must compute W x + b with its own tensors, and nobody may watch or forbid a change.
    # The plan replaces a reparametrized layer by a plain one, whose forward is torch's.
    is_replaced = reparametrized.is_reparametrized(linear)
    is_known = type(linear).forward in _LINEAR_FORWARDS and not own_forwards.is_patched(linear)
    if not is_replaced and not is_known and not own_forwards.computes(linear):
        raise NotFoldable(f"{path} ({type(linear).__name__}) has a forward of its own")
    if not builder.anatomy.takes_part(path):
        raise NotFoldable(f"{path} ({type(linear).__name__}) is to stay as it is")
    if not is_replaced and parametrize.is_parametrized(linear):
        raise NotFoldable(f"{path} has a parametrized weight")
    if linear._forward_hooks or linear._forward_pre_hooks:
        raise NotFoldable(f"{path} {_hooks_reason(linear)}")

    # Weight and bias must be parameters that nothing else reads, since it would see the change.
    for tensor_name in ("weight", "bias"):
        if tensor_name in linear._buffers:
            raise NotFoldable(f"{path}.{tensor_name} is a buffer, which no training changes")
    if builder.traced.owners[id(linear.weight)] > 1:
        raise NotFoldable(f"{path}.weight is shared with another module")
    tensor_path = builder.traced.read_directly(linear)
    if tensor_path:
        raise NotFoldable(f"{tensor_path} is read elsewhere in forward")
    if once and builder.traced.called(linear) > 1:
        raise NotFoldable(f"{path} is called more than once")


def _hooks_reason(linear: nn.Module) -> str:
    """Return the reason why a linear layer that has forward hooks or pre-hooks cannot be changed.

    The text continues a sentence that begins with the layer's path.

    Args:
        linear: The layer. The caller knows that it has one of both kinds of hooks.
    """
    if linear._forward_hooks:
        return "has forward hooks, which see its output"
    return "has forward pre-hooks, which may change its input or weight"


def distinct(modules: dict[str, nn.Module], paths: list[str]) -> list[str]:
    """Return the paths in order, without a path whose module an earlier path names already."""
    # The paths go backwards, so that a module's first path overwrites its later ones.
    first_paths: dict[int, str] = {}
    for path in reversed(paths):
        first_paths[id(modules[path])] = path
    return list(first_paths.values())[::-1]


def obstacle(builder: PlanBuilder, node: fx.Node) -> str:
    """Return a text that names a step which a scale cannot pass, for the error.

    The text is the name of the module or function that `node` calls. If the module is a norm that
    cannot be converted, the reason follows.
    """
    site = builder.traced.site_at(node)
    if site is not None and site.is_norm and site.refusal is not None:
        return f"{name(node)}: {site.refusal}"
    return name(node)


def name(node: fx.Node) -> str:
    """Return the path of the module, or the name of the function or method, that a node calls."""
    if isinstance(node.target, str):
        return node.target
    return getattr(node.target, "__name__", node.name)


def last_linear(builder: PlanBuilder, node: fx.Node, before: fx.Node) -> tuple[str, list[str]]:
    """Return the linear layer that can scale the value of `node`, and the layers that undo it.

    The scale c goes into the last linear layer before `node`. Other layers that then read a scaled
    value must divide their input by c. In a gate x g(x), for instance, x is scaled, and the first
    linear layer of g divides by c.

    Args:
        builder: The plan in the making.
        node: The node whose value is to be scaled.
        before: The reader of `node` that sees the scaled value.

    Returns:
        The path of the linear layer whose output is scaled by c, and the paths of the layers that
        must divide their input by c.

    Raises:
        NotFoldable: A scale cannot pass a step between the linear layer and `node`.
    """
    # Go up to a linear layer. Whatever else reads a value on the way must divide by c. `passed` has
    # the nodes on the way, which see the scaled value.
    passed = {before}
    divided: list[str] = []
    while True:
        if len(builder.traced.users[node]) > 1:
            divided += scalar_readers(builder, node, passed)
        if isinstance(builder.traced.module(node), LINEAR):
            break

        above = builder.traced.main_input(node)
        if above is None or not (is_mul(node) or propagates_scale(builder, node)):
            raise NotFoldable(f"a scale cannot pass {obstacle(builder, node)}")
        passed.add(node)
        node = above

    path = str(node.target)
    check_linear(builder, path, builder.traced.modules[path], once=True)
    return path, list(dict.fromkeys(divided))


def enlarge(builder: PlanBuilder, node: fx.Node, factor: float, by: set[fx.Node]) -> list[str]:
    """Plan that the value of `node` is multiplied by a factor.

    Readers that must not see the factor divide by it. A negative factor can pass linear maps alone.
    A factor of 0 is possible if the network's output depends on the value only through the readers
    in `by`.

    Args:
        builder: The plan in the making.
        node: The node whose value is scaled.
        factor: The factor.
        by: The readers of `node` that see the scaled value.

    Returns:
        The paths of the linear layers that absorb the factor.

    Raises:
        NotFoldable: A step is not homogeneous, or another reader cannot be compensated. The
            builder's changes must then be undone (`attempt`).
    """
    if any(user not in by for user in builder.traced.users[node]):
        _compensate(builder, node, factor, by)

    # A linear layer absorbs the factor.
    module = builder.traced.module(node)
    if isinstance(module, LINEAR):
        path = str(node.target)
        check_linear(builder, path, module, once=True)
        builder.linear(path).gain *= factor
        return [path]

    # A sum passes the factor to both its terms.
    if is_add(node):
        paths: list[str] = []
        for term in inputs(node):
            paths += enlarge(builder, term, factor, {node})
        return paths

    # Every other step passes the factor to its main input, if the step commutes with it.
    above = builder.traced.main_input(node)
    is_scalar = is_constant_mul(node) or (scales_branch(module) and module.bias is None)
    if above is None or not (is_mul(node) or is_scalar or propagates_scale(builder, node)):
        raise NotFoldable(f"a scale cannot pass {obstacle(builder, node)}")
    # A factor that is negative, or NaN, passes linear steps alone: products with a number, and
    # identities.
    is_linear_step = is_scalar or builder.is_identity(node)
    if not (factor >= 0 or is_linear_step):
        raise NotFoldable(f"a factor of {factor:g} cannot pass {name(node)}")
    return enlarge(builder, above, factor, {node})


def _compensate(builder: PlanBuilder, node: fx.Node, factor: float, by: set[fx.Node]) -> None:
    """Plan that all readers of `node`, except the nodes in `by`, divide its value by `factor`.

    They cannot divide by 0. With a factor of 0 the network's output must not depend on them.
    """
    reader_paths = scalar_readers(builder, node, set(by))
    # The steps up to these readers, such as a ReLU, commute with positive factors only. A factor of
    # 0 destroys the value, which is no loss where the output does not depend on it.
    is_negative_or_nan = not factor >= 0
    is_lost = factor == 0 and any(_reaches_output(builder, path, by) for path in reader_paths)
    if is_negative_or_nan or is_lost:
        raise NotFoldable(
            f"a factor of {factor:g} cannot be given back to what else reads {name(node)}"
        )
    if factor != 0:
        for path in reader_paths:
            shrink_input(builder, path, factor)


def _reaches_output(builder: PlanBuilder, path: str, barriers: set[fx.Node]) -> bool:
    """Whether a module's output reaches the network's output without passing one of `barriers`.

    Args:
        builder: The plan in the making.
        path: The path of the module.
        barriers: The nodes at which the search stops.
    """
    # Follow the readers of the module's output until none is new.
    visited = set(builder.traced.calls[id(builder.traced.modules[path])])
    pending = list(visited)
    while pending:
        users = {user for user in builder.traced.users[pending.pop()] if user not in barriers}
        pending += users - visited
        visited |= users
    return any(node.op == "output" for node in visited)


def shrink_input(builder: PlanBuilder, path: str, factor: float) -> None:
    """Plan that the linear layer at `path` divides its input by `factor`.

    Raises:
        NotFoldable: The layer has absorbed a shift of its input, which the factor would scale.
    """
    linear = builder.linear(path)
    has_input_shift = any(absorption.way is AbsorbMode.BEFORE for _, absorption in linear.reads)
    if has_input_shift:
        raise NotFoldable(f"{path} has absorbed a shift of its input")
    linear.in_gain /= factor


@contextmanager
def attempt(builder: PlanBuilder) -> Iterator[None]:
    """Undo what a `with` block changed in the plan if the block raises NotFoldable.

    The plan's changes of linear layers and its replacements are put back. The NotFoldable is raised
    again.
    """
    # The records of linear layers are changed in place, so they are copied.
    linears_before = {
        path: replace(linear, reads=[*linear.reads]) for path, linear in builder.linears.items()
    }
    replacements_before = dict(builder.replacements)
    try:
        yield
    except NotFoldable:
        builder.linears = linears_before
        builder.replacements = replacements_before
        raise
