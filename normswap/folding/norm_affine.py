"""Fold gamma and beta of LayerNorms and RMSNorms, and LayerScale's gamma, into the linear layers
beside them.

W' = W gamma per input channel, b' = b + W beta. Between the norm and the linear layers there may be
steps that treat all channels alike (`channel_axes`): windows, shifts, tokens that are picked or
averaged; padding with zeros stops the beta. LayerScale, gamma per channel at the end of a branch
(Touvron et al. 2021, arXiv:2103.17239, section 2), goes into the linear layer before it: W' = gamma
W, b' = gamma b. A gamma that is a block's own parameter (ConvNeXt, CaiT, BEiT) is no module, and
`folded` leaves it.
"""

from collections.abc import Sequence

from torch import fx, nn

from normswap.folding.plan_builder import PlanBuilder, folded_back, stays
from normswap.folding.propagation import NotFoldable, absorbing, check_linear, name, readers
from normswap.graph import channel_axes
from normswap.graph.channel_axes import Axes, Axis
from normswap.graph.inspection import Anatomy
from normswap.graph.tracing import LINEAR, inputs
from normswap.layers import channel_norm, own_forwards
from normswap.layers.channel_norm import scaled_dim
from normswap.layers.planned_layer import Linearity
from normswap.plan import AbsorbMode, Outcome


def foldable_norms(anatomy: Anatomy) -> dict[str, nn.Module]:
    """The LayerNorms and RMSNorms that forward calls, by path, each once."""
    calls = anatomy.traced.calls
    modules = {norm.path: anatomy.traced.modules[norm.path] for norm in anatomy.norms}
    return {
        path: module
        for path, module in modules.items()
        if channel_norm.is_at_each_position(module)
        if id(module) in calls and anatomy.takes_part(path)
    }


def move(builder: PlanBuilder) -> None:
    """Move gamma and beta of every norm to the linear layers after it, where that is exact."""
    norms = {
        path: norm
        for path, norm in foldable_norms(builder.anatomy).items()
        if list(norm.parameters())
    }
    if not norms:
        return
    axes = channel_axes.find_axes(builder.traced, builder.is_identity)
    for path, norm in norms.items():
        try:
            linears = linear_readers(builder, axes, path, norm)
        except NotFoldable as why:
            builder.settle(path, stays(str(why), " with its scale and shift"))
            continue
        for linear in linears:
            builder.linear(linear).add(path, AbsorbMode.BEFORE)
        builder.replace(path, "BareNorm")
        into = ", ".join(linears)
        builder.settle(
            path, Outcome("scale and shift moved on", f"its scale and shift move to {into}")
        )


def linear_readers(builder: PlanBuilder, axes: Axes, path: str, norm: nn.Module) -> list[str]:
    """Paths of the linear layers that alone read the norm's output, channel by channel.

    Raises NotFoldable: something else reads it, or one of them cannot absorb a scale and shift of
    its input.
    """
    why = channel_norm.refusal(norm)
    read = builder.traced.read_directly(norm)
    if why or read:
        raise NotFoldable(why or f"{read} is read in forward, not only by the norm itself")
    if any(n.path == path and n.role == "head" for n in builder.anatomy.norms):
        raise NotFoldable("its output is the network's features")

    def passes(node: fx.Node) -> bool:
        return builder.is_identity(node) or channel_axes.is_step(builder.traced, node)

    readings = [
        reading
        for call in builder.traced.calls[id(norm)]
        for reading in readers(builder, call, passes)
    ]
    paths = absorbing(builder, [reader for _, reader in readings])
    for value, reader in readings:
        _check_channels(
            builder.traced.linear(str(reader.target)), str(reader.target), axes.get(value)
        )
    return paths


def _check_channels(linear: Linearity, path: str, axis: Axis | None) -> None:
    """Raise NotFoldable unless a linear layer's inputs are the norm's channels, without padded
    zeros.
    """
    if axis is None:
        raise NotFoldable(f"which of the inputs of {path} its channels become is not known")
    if not axis.pure:
        raise NotFoldable(f"zeros are padded before {path}, which the shift would have to move")
    if isinstance(linear, nn.Linear):
        fits = axis.last
    else:
        fits = axis.dim == 1 and axis.size == linear.in_channels
        if linear.transposed or own_forwards.pads(linear):
            raise NotFoldable(
                f"{path} pads its input with zeros, which the shift would have to move"
            )
    if not fits:
        raise NotFoldable(f"the inputs of {path} are not its channels")


def move_layer_scales(builder: PlanBuilder) -> None:
    """Move the gamma of every LayerScale to the linear layer before it, where that is exact."""
    for call, *_ in builder.traced.calls.values():
        module = builder.traced.module(call)
        path = str(call.target)
        if module is None or scaled_dim(module) is None or path in builder.replacements:
            continue
        if not builder.anatomy.takes_part(path):
            continue
        try:
            linear = layer_scale_producer(builder, module)
        except NotFoldable as why:
            builder.notes.append(f"{path} stays: {why}")
            continue
        builder.linear(linear).add(path, AbsorbMode.AFTER)
        builder.remove(path)
        builder.settle(path, folded_back(linear))


def layer_scale_producer(builder: PlanBuilder, module: nn.Module) -> str:
    """The path of the linear layer whose output this LayerScale alone reads.

    Raises NotFoldable: there is none, or it cannot absorb a scale of its output.
    """
    traced = builder.traced
    if module._forward_hooks or module._forward_pre_hooks:
        raise NotFoldable("it has forward hooks, which would be lost with it")
    read = traced.read_directly(module)
    if read:
        raise NotFoldable(f"{read} is read elsewhere in forward")
    values = [value for call in traced.calls[id(module)] for value in inputs(call)]
    return _producer(
        builder, values, (nn.Linear,) if scaled_dim(module) == -1 else (nn.modules.conv._ConvNd,)
    )


def scale_parameter_producer(builder: PlanBuilder, parameter: str) -> tuple[str, list[fx.Node]]:
    """The path of the linear layer whose output this parameter alone multiplies, channel by
    channel, and the products.

    Raises NotFoldable as `layer_scale_producer`.
    """
    traced = builder.traced
    tensor = traced.fetch(parameter)
    products: dict[fx.Node, fx.Node] = {}
    for start in (*traced.nodes, *traced.alternative_nodes):
        if start.op != "get_attr" or start.target != parameter:
            continue
        for _, reader in readers(builder, start, lambda node: channel_axes.is_step(traced, node)):
            product = channel_axes.scaled(traced, reader)
            axis = builder.axes.get(reader)
            if product is None or has_other_modules(builder, parameter):
                raise NotFoldable("is read elsewhere too")
            if axis is None or axis.size != tensor.numel() or not isinstance(tensor, nn.Parameter):
                raise NotFoldable("is no parameter of one number per channel")
            products[reader] = product[0]
    return _producer(builder, [*products.values()], LINEAR, after_steps=True), [*products]


def has_other_modules(builder: PlanBuilder, parameter: str) -> bool:
    """Whether a parameter that a forward reads also belongs to another module, or to a layer that
    is called.
    """
    traced = builder.traced
    owner = traced.modules[parameter.rpartition(".")[0]]
    return traced.owners[id(traced.fetch(parameter))] > 1 or id(owner) in traced.calls


def _producer(
    builder: PlanBuilder,
    values: Sequence[fx.Node],
    kinds: tuple[type[nn.Module], ...],
    *,
    after_steps: bool = False,
) -> str:
    """The path of the linear layer of these kinds that makes the values, each read once, and no
    other value.
    """
    producers = [_made(builder, value, after_steps=after_steps) for value in values]
    linear = builder.traced.module(producers[0])
    path = str(producers[0].target)
    if not isinstance(linear, kinds):
        raise NotFoldable(f"{name(producers[0])} makes its input, not a linear layer")
    elsewhere = any(len(builder.traced.users[node]) > 1 for node in producers)
    if elsewhere or set(builder.traced.calls[id(linear)]) != set(producers):
        raise NotFoldable(f"{path} is read elsewhere too")
    check_linear(builder, path, linear)
    return path


def _made(builder: PlanBuilder, node: fx.Node, *, after_steps: bool) -> fx.Node:
    """The value of which `node` is a copy or, with `after_steps`, which it rearranges; others may
    read it, too.
    """
    while len(builder.traced.users[node]) == 1:
        step = after_steps and channel_axes.is_step(builder.traced, node) and len(inputs(node)) == 1
        if not step and not builder.is_identity(node):
            break
        (node,) = inputs(node)
    return node
