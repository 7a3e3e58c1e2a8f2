"""Fold gamma and beta of LayerNorms and RMSNorms, and LayerScale's gamma, into linear layers.

The linear layers after a norm absorb its affine map: W' = W gamma per input channel, b' = b + W
beta. Between norm and linear layers there may be steps that treat all channels alike
(`channel_axes`): windows, shifts, tokens that are picked or averaged. If such a step pads with
zeros, the map cannot move, as a padded zero would have to become beta.

LayerScale, gamma per channel at the end of a branch (Touvron et al. 2021, arXiv:2103.17239, section
2), moves into the linear layer before it: W' = gamma W, b' = gamma b. A gamma that is a block's own
parameter (ConvNeXt, CaiT, BEiT) is no module, and stays when the network is folded.
"""

from collections.abc import Sequence

from torch import fx, nn

from normswap.folding.plan_builder import PlanBuilder, folded_back, stays
from normswap.folding.propagation import NotFoldable, absorbing, check_linear, name, readers
from normswap.graph import channel_axes
from normswap.graph.channel_axes import Axes, Axis
from normswap.graph.inspection import Anatomy
from normswap.graph.tracing import LINEAR, inputs
from normswap.layers.planned_layer import Linearity
from normswap.plan import AbsorbMode, Outcome
from normswap.sites import own_forwards
from normswap.sites.site import Site


def foldable_norms(anatomy: Anatomy) -> dict[str, Site]:
    """Return the LayerNorms and RMSNorms that forward calls, by path.

    Norms that the user has left out of the conversion (`only`, `skip`) are not among them.
    """
    norms: dict[str, Site] = {}
    for norm in anatomy.norms:
        if norm.called and norm.site.is_at_each_position and anatomy.takes_part(norm.path):
            norms[norm.path] = norm.site
    return norms


def move(builder: PlanBuilder) -> None:
    """Plan that the linear layers after a LayerNorm or RMSNorm absorb its gamma and beta.

    Where that would not be exact, the norm keeps them, and its outcome says why.
    """
    # A norm without parameters has nothing to move.
    norms: dict[str, Site] = {}
    for path, norm in foldable_norms(builder.anatomy).items():
        if list(nn.Module.parameters(norm.module)):
            norms[path] = norm
    if not norms:
        return

    axes = channel_axes.find_axes(builder.traced, builder.is_identity)
    for path, norm in norms.items():
        try:
            linear_paths = linear_readers(builder, axes, norm)
        except NotFoldable as why:
            builder.settle(path, stays(str(why), " with its scale and shift"))
            continue

        for linear_path in linear_paths:
            builder.linear(linear_path).add(path, AbsorbMode.BEFORE)
        builder.replace(path, "BareNorm")
        sentence = f"its scale and shift move to {', '.join(linear_paths)}"
        builder.settle(path, Outcome("scale and shift moved on", sentence))


def linear_readers(builder: PlanBuilder, axes: Axes, norm: Site) -> list[str]:
    """Return the paths of the linear layers that read a norm's output, if nothing else does.

    Args:
        builder: The plan in the making.
        axes: The channel axis of each value.
        norm: The norm.

    Raises:
        NotFoldable: Something else reads the output, or a linear layer cannot absorb a scale and
            shift of its input.
    """
    traced = builder.traced
    if norm.refusal_of_gamma:
        raise NotFoldable(norm.refusal_of_gamma)
    if any(seen.path == norm.path and seen.role == "head" for seen in builder.anatomy.norms):
        raise NotFoldable("its output is the network's features")

    def passes(node: fx.Node) -> bool:
        """Whether a node passes the norm's channels on, so that its readers count instead."""
        return builder.is_identity(node) or channel_axes.is_step(traced, node)

    # The pairs of a value with the norm's channels and the node that reads it.
    readings: list[tuple[fx.Node, fx.Node]] = []
    for call in traced.calls[id(norm.module)]:
        readings += readers(builder, call, passes)
    linear_paths = absorbing(builder, [reader for _, reader in readings])
    for value, reader in readings:
        reader_path = str(reader.target)
        _check_channels(traced.linear(reader_path), reader_path, axes.get(value))
    return linear_paths


def _check_channels(linear: Linearity, path: str, axis: Axis | None) -> None:
    """Raise NotFoldable unless a linear layer's inputs are the norm's channels, without padding.

    Args:
        linear: The linear layer.
        path: The path of the linear layer.
        axis: Where the norm's channels are in the layer's input. None if that is not known.
    """
    if axis is None:
        raise NotFoldable(f"which of the inputs of {path} its channels become is not known")
    if not axis.pure:
        raise NotFoldable(f"zeros are padded before {path}, which the shift would have to move")

    # A Linear reads its inputs from the last dimension, a convolution from dimension 1.
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
    """Plan that the linear layer before a LayerScale absorbs its gamma.

    Where that would not be exact, the LayerScale stays, and a note says why.
    """
    # The first call of each module stands for the module.
    for call, *_ in builder.traced.calls.values():
        site = builder.traced.site_at(call)
        path = str(call.target)
        if site is None or site.scaled_dim is None or path in builder.replacements:
            continue
        if not builder.anatomy.takes_part(path):
            continue

        try:
            linear_path = layer_scale_producer(builder, site)
        except NotFoldable as why:
            builder.notes.append(f"{path} stays: {why}")
            continue
        builder.linear(linear_path).add(path, AbsorbMode.AFTER)
        builder.remove(path)
        builder.settle(path, folded_back(linear_path))


def layer_scale_producer(builder: PlanBuilder, site: Site) -> str:
    """Return the path of the linear layer whose output a LayerScale reads, if nothing else does.

    Args:
        builder: The plan in the making.
        site: The LayerScale.

    Raises:
        NotFoldable: No linear layer makes the LayerScale's input, something else reads the layer's
            output, or the layer cannot absorb a scale.
    """
    traced = builder.traced
    module = site.module
    if module._forward_hooks or module._forward_pre_hooks:
        raise NotFoldable("it has forward hooks, which would be lost with it")
    if site.tensor_read:
        raise NotFoldable(f"{site.tensor_read} is read elsewhere in forward")

    values: list[fx.Node] = []
    for call in traced.calls[id(module)]:
        values += inputs(call)
    # Channels in the last dimension are outputs of a Linear, in dimension 1 of a convolution.
    kind = nn.Linear if site.scaled_dim == -1 else nn.modules.conv._ConvNd
    return _producer(builder, values, (kind,))


def scale_parameter_producer(builder: PlanBuilder, parameter: str) -> tuple[str, list[fx.Node]]:
    """Return the linear layer whose output a parameter multiplies, channel by channel.

    Args:
        builder: The plan in the making.
        parameter: The path of the parameter, which forward reads by itself.

    Returns:
        The path of the linear layer, and the nodes of the products.

    Raises:
        NotFoldable: The parameter does anything else, no linear layer makes the values that it
            multiplies, something else reads the layer's output, or the layer cannot absorb a scale.
    """
    traced = builder.traced
    tensor = traced.fetch(parameter)

    def is_step(node: fx.Node) -> bool:
        return channel_axes.is_step(traced, node)

    # Every reader of the parameter must be a product. The value that it multiplies is noted by the
    # node of the product.
    value_of: dict[fx.Node, fx.Node] = {}
    for start in (*traced.nodes, *traced.alternative_nodes):
        if start.op != "get_attr" or start.target != parameter:
            continue
        for _, reader in readers(builder, start, is_step):
            product = channel_axes.scaled(traced, reader)
            if product is None or has_other_modules(builder, parameter):
                raise NotFoldable("is read elsewhere too")
            axis = builder.axes.get(reader)
            if axis is None or axis.size != tensor.numel() or not isinstance(tensor, nn.Parameter):
                raise NotFoldable("is no parameter of one number per channel")
            value, _ = product
            value_of[reader] = value
    linear_path = _producer(builder, [*value_of.values()], LINEAR, after_steps=True)
    return linear_path, [*value_of]


def has_other_modules(builder: PlanBuilder, parameter: str) -> bool:
    """Whether anything but the forward of the block that owns a parameter may read the parameter.

    This is so if two modules share it, or if its owner is a layer that the recorded graph calls as
    one node.
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
    """Return the path of the one linear layer that makes all of some values, and nothing else.

    Args:
        builder: The plan in the making.
        values: The nodes of the values.
        kinds: The classes that the linear layer may have.
        after_steps: Whether the values may be rearrangements of the layer's output.

    Raises:
        NotFoldable: No such layer makes the values, something else reads its output, or the layer
            cannot absorb its neighbours.
    """
    producers = [_maker(builder, value, after_steps=after_steps) for value in values]
    linear = builder.traced.module(producers[0])
    path = str(producers[0].target)
    if not isinstance(linear, kinds):
        raise NotFoldable(f"{name(producers[0])} makes its input, not a linear layer")

    # Nothing else may read the layer's outputs, and each of its calls must make one of the values.
    is_shared = any(len(builder.traced.users[node]) > 1 for node in producers)
    if is_shared or set(builder.traced.calls[id(linear)]) != set(producers):
        raise NotFoldable(f"{path} is read elsewhere too")
    check_linear(builder, path, linear)
    return path


def _maker(builder: PlanBuilder, node: fx.Node, *, after_steps: bool) -> fx.Node:
    """Return the node that made a value, above the identities that passed it on.

    The search ends at a node that is read more than once, even if that node is an identity.

    Args:
        builder: The plan in the making.
        node: The node of the value.
        after_steps: Whether steps that treat all channels alike are skipped like identities.
    """
    while len(builder.traced.users[node]) == 1:
        is_step = channel_axes.is_step(builder.traced, node) and len(inputs(node)) == 1
        if not builder.is_identity(node) and not (after_steps and is_step):
            break
        (node,) = inputs(node)
    return node
