"""A residual stream, its writers and its readers: whether its mean over channels can be made zero.

A LayerNorm subtracts the mean of its input. If only LayerNorms read the stream, the linear layers
and embeddings that write to it can leave out the mean (W' = (I - 11'/C) W, b' = b - mean(b)), and
each LayerNorm becomes an RMSNorm. If a LayerScale (a module or a parameter gamma) stands between a
linear layer and the stream, the layer absorbs gamma first: W' = (I - 11'/C) diag(gamma) W. Source:
SliceGPT, Ashkboos et al. 2024, arXiv:2401.15024, section 3.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx, nn

from normswap.folding.norm_affine import (
    has_other_modules,
    layer_scale_producer,
    scale_parameter_producer,
)
from normswap.folding.plan_builder import PlanBuilder
from normswap.folding.propagation import NotFoldable, check_linear, name
from normswap.graph import channel_axes
from normswap.graph.tracing import LINEAR, inputs, is_add, is_constant_mul
from normswap.plan import AbsorbMode


@dataclass
class Stream:
    """A residual stream: values that are sums and rearrangements of one another.

    Args:
        values: The nodes of the values.
        linears: Paths of the linear layers that write to the stream.
        tensors: The dimension of the channels of each parameter that is added to the stream
            (position embeddings, class tokens), by the parameter's path.
        scales: For a linear layer with a LayerScale between it and the stream, by the layer's path:
            the path of the LayerScale (a module or a parameter), and the nodes of its outputs.
    """

    values: set[fx.Node] = field(default_factory=set)
    linears: set[str] = field(default_factory=set)
    tensors: dict[str, int] = field(default_factory=dict)
    scales: dict[str, tuple[str, list[fx.Node]]] = field(default_factory=dict)


def around(builder: PlanBuilder, starts: Sequence[fx.Node]) -> Stream:
    """Return the residual stream that a norm reads, if its mean over channels can be made zero.

    Args:
        builder: The plan in the making.
        starts: The inputs of a norm, one for each path through the network. The stream has these
            values, and the sums and rearrangements that lead to them or are made of them.

    Raises:
        NotFoldable: Something reads the stream's mean, or something writes to the stream and cannot
            leave the mean out.
    """
    for start in starts:
        if builder.axes.get(start) is None:
            step = _loses_channels(builder, start)
            raise NotFoldable(f"where the channels are is not known after {called(step)}")

    # Go from value to value, up to the writers and down to the readers.
    stream = Stream()
    pending = [*starts]
    while pending:
        node = pending.pop()
        if node in stream.values:
            continue
        stream.values.add(node)
        pending += _above(builder, stream, node)
        for user in builder.traced.users[node]:
            if _passes(builder, user) and builder.axes.get(user) is not None:
                pending.append(user)
            elif not _ignores_the_mean(builder, node, user):
                raise NotFoldable(_complaint(user))

    # The writers can be checked only now that all values of the stream are known.
    for path in stream.linears:
        _check_can_leave_mean_out(builder, stream, path)
    # The paths are copied, because `_check_tensor` writes to the dict.
    for path in [*stream.tensors]:
        _check_tensor(builder, stream, path)
    return stream


def _loses_channels(builder: PlanBuilder, node: fx.Node) -> fx.Node:
    """Return the node after which it is no longer known in which dimension the channels are.

    The search goes from `node` up to the first such step of the forward.
    """
    # A node without inputs, such as a parameter, is no step.
    while True:
        unknown = [
            source for source in inputs(node) if inputs(source) and builder.axes.get(source) is None
        ]
        if not unknown:
            return node
        node = unknown[0]


def centre(builder: PlanBuilder, stream: Stream) -> None:
    """Plan that the layers and parameters that are added to a residual stream lose their mean.

    The mean is over the channels.

    Args:
        builder: The plan in the making.
        stream: The residual stream, with the layers and parameters that write to it.
    """
    # A linear layer first absorbs the LayerScale behind it. A LayerScale that is a module is
    # removed. One that is a parameter becomes ones.
    for linear, (scale, _) in stream.scales.items():
        builder.linear(linear).add(scale, AbsorbMode.AFTER)
        if scale in builder.traced.modules:
            builder.remove(scale)
        else:
            builder.replace(scale, "Ones")
    for path in stream.linears:
        builder.linear(path).extra["centred"] = True
    for path, dim in stream.tensors.items():
        builder.replace(path, "Centred", dim=dim)


def _passes(builder: PlanBuilder, node: fx.Node) -> bool:
    """Whether the output of `node` has mean zero over the channels if each of its inputs has.

    This holds for sums, products with a number, and steps that treat all channels alike.
    """
    if builder.is_identity(node) or channel_axes.is_step(builder.traced, node):
        return True
    return is_add(node) or is_constant_mul(node)


def _ignores_the_mean(builder: PlanBuilder, node: fx.Node, user: fx.Node) -> bool:
    """Whether `user` is a LayerNorm over exactly the channels of `node`, which subtracts the mean.

    Args:
        builder: The plan in the making.
        node: The node of a value of a residual stream.
        user: A node that reads the value.
    """
    site = builder.traced.site_at(user)
    axis = builder.axes.get(node)
    if site is None or axis is None or not site.is_layernorm:
        return False
    if site.channel_dim is None:
        return False

    # The norm must normalize as many numbers as there are channels, in their dimension.
    gamma, _ = site.scale_and_shift
    if gamma.shape != (axis.size,):
        return False
    return axis.last if site.channel_dim == -1 else axis.dim == 1


def _complaint(user: fx.Node) -> str:
    """Return why a residual stream must keep its mean over the channels, as a text.

    Args:
        user: A node that reads the stream and depends on the mean.
    """
    if user.op == "output":
        return "the model returns it, with its mean"
    if is_add(user):
        return f"{called(user)} adds to it what is no linear layer's output"
    return f"{called(user)} reads it too, and needs its mean"


def called(node: fx.Node) -> str:
    """Return a text that names what a node calls: the path of a module, or a function.

    A function is named with the path of the module whose forward calls it.
    """
    if node.op == "call_module" or not node.meta["inside"]:
        return name(node)
    return f"{name(node)} in {node.meta['inside'][-1]}"


def _above(builder: PlanBuilder, stream: Stream, node: fx.Node) -> list[fx.Node]:
    """Return the values of the stream from which `node` is computed, or note what writes it.

    A sum or rearrangement is computed from other values of the stream, which are returned. Any
    other node is a writer: it brings new values into the stream. It is noted in `stream`, and the
    list is empty.

    The stream has mean zero over the channels if the mean is taken out of all that is written to
    it. This can be done to linear layers and to parameters (`centre`). A LayerScale between a
    linear layer and the stream is absorbed by the layer first.

    Args:
        builder: The plan in the making.
        stream: The residual stream, to which the writer is added.
        node: The node of a value of the stream.

    Raises:
        NotFoldable: The mean cannot be taken out of the writer's output, or its LayerScale cannot
            be absorbed.
    """
    # `product` is None unless the node multiplies a value by a parameter per channel. Then the
    # parameter is a LayerScale. A module may be a LayerScale, too (`scaled_dim`).
    module = builder.traced.module(node)
    site = builder.traced.site_at(node)
    path = str(node.target)
    product = channel_axes.scaled(builder.traced, node)
    if isinstance(module, LINEAR):
        stream.linears.add(path)
    elif node.op == "get_attr":
        # `_check_tensor` replaces -1 by the dimension of the channels.
        stream.tensors[path] = -1
    elif product is not None:
        _, parameter = product
        _add_scale(builder, stream, str(parameter.target))
    elif site is not None and site.scaled_dim is not None and not builder.is_identity(node):
        _add_scale(builder, stream, path)
    elif _passes(builder, node):
        return inputs(node)
    else:
        # The mean cannot be taken out of the output of another step, such as a LayerNorm.
        raise NotFoldable(f"{name(node)} writes to it, whose output has a mean")
    return []


def _add_scale(builder: PlanBuilder, stream: Stream, path: str) -> None:
    """Note in `stream` that a LayerScale writes to it, and which linear layer it multiplies.

    Args:
        builder: The plan in the making.
        stream: The residual stream.
        path: The path of the LayerScale, which is a module or a parameter.

    Raises:
        NotFoldable: The linear layer cannot absorb the LayerScale.
    """
    module = builder.traced.modules.get(path)
    try:
        if module is None:
            linear, outputs = scale_parameter_producer(builder, path)
        else:
            linear = layer_scale_producer(builder, builder.traced.site(path))
            outputs = builder.traced.calls[id(module)]
    except NotFoldable as why:
        raise NotFoldable(f"{path} writes to it, and {why}") from None
    stream.linears.add(linear)
    stream.scales[linear] = path, outputs


def _check_can_leave_mean_out(builder: PlanBuilder, stream: Stream, path: str) -> None:
    """Raise NotFoldable if the outputs of a linear layer cannot lose their mean over the channels.

    Args:
        builder: The plan in the making.
        stream: The residual stream that the outputs are added to.
        path: The path of the linear layer.
    """
    linear = builder.traced.modules[path]
    check_linear(builder, path, linear)
    if getattr(linear, "groups", 1) > 1:
        raise NotFoldable(
            f"{path} writes to it, whose groups of filters have no mean in common to leave out"
        )

    # Every output of the layer, or of the LayerScale behind it, must be a value of the stream.
    outputs = builder.traced.calls[id(linear)]
    if path in stream.scales:
        _, outputs = stream.scales[path]
    if any(output not in stream.values for output in outputs):
        raise NotFoldable(f"{path} writes to it, and elsewhere too")


def _check_tensor(builder: PlanBuilder, stream: Stream, path: str) -> None:
    """Raise NotFoldable if a parameter that is added to a residual stream cannot lose its mean.

    The mean is over the channels. If it can, the dimension of the channels is noted in `stream`.

    Args:
        builder: The plan in the making.
        stream: The residual stream, whose mean over the channels is to become zero.
        path: The path of the parameter, such as a position embedding.
    """
    traced = builder.traced
    if not isinstance(traced.fetch(path), nn.Parameter):
        raise NotFoldable(f"{path} writes to it, which is no parameter")
    if has_other_modules(builder, path):
        raise NotFoldable(f"{path} writes to it, and is read elsewhere too")

    # Every recorded path through the network that reads the parameter must add it to the stream.
    for node in (*traced.nodes, *traced.alternative_nodes):
        if node.op != "get_attr" or str(node.target) != path or not traced.users[node]:
            continue
        axis = builder.axes.get(node)
        if node not in stream.values or axis is None or axis.dim is None:
            raise NotFoldable(f"{path} writes to it, and is read elsewhere too")
        stream.tensors[path] = axis.dim
