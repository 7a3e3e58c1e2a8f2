"""Fold: turn every BatchNorm, and every affine layer of an earlier conversion, into plain weights.

Each of these layers is y = act(s x + t) per channel. The first way that is possible is taken:

1. Fold the layer back into the convolutions before it.
2. Fold the layer forward into the unpadded convolutions after it.
3. Before a ReLU: move |s| through the ReLU into the inputs of the next convolutions, and keep a
   shift (`ChannelBias`).
4. If s is a scalar: fold s back through sums and gates.
5. Keep s and t as a `ChannelAffine`, which is always exact.

The algebra is in `layers.Folded` and `sites.affine.split`. This file decides from the graph which
layer absorbs which map. If a way is not possible, it says why.
"""

from collections.abc import Collection, Iterator

import torch
from torch import fx, nn

from normswap.folding import norm_free, plan_builder, propagation
from normswap.folding.overwriting import overwritten
from normswap.folding.plan_builder import PlanBuilder
from normswap.folding.propagation import NotFoldable
from normswap.graph import channel_axes
from normswap.graph.inspection import Anatomy
from normswap.graph.tracing import LINEAR, argument, inputs, listed
from normswap.layers import reparametrized
from normswap.layers.planned_layer import OwnLayer, scales_branch
from normswap.plan import AbsorbMode, Outcome
from normswap.sites import own_forwards
from normswap.sites.activations import is_homogeneous
from normswap.sites.site import Site

# A range of the norm's channels (from, up to). None means all channels.
ChannelRange = tuple[int, int] | None


def fold_norms(anatomy: Anatomy, *, leave: Collection[str] = ()) -> PlanBuilder:
    """Return a plan that folds modules y = s x + t (per channel) into the layers beside them.

    These are the BatchNorms, and the scales and shifts that earlier conversions left.

    Args:
        anatomy: The network.
        leave: Paths of the modules that are not folded.

    Returns:
        The plan in the making. Its `refusals` have the modules that cannot be read, because they
        have no running statistics or are of an unknown class, or because something around them
        cannot be looked into.
    """
    # Weights that each forward computes anew become plain ones. The factors of timm's
    # normalizer-free blocks move into the convolutions.
    builder = PlanBuilder(anatomy)
    _bake(builder)
    norm_free.free(builder)

    for site in anatomy.maps:
        if site.path not in leave and anatomy.takes_part(site.path):
            _fold_module(builder, site)

    # A BatchNorm that forward never calls has nothing to fold into. It is only reported.
    for norm in anatomy.norms:
        if norm.is_batchnorm and not norm.called and anatomy.takes_part(norm.path):
            if norm.site.refusal_of_reach is not None:
                builder.refusals[norm.path] = norm.site.refusal_of_reach
            else:
                builder.settle(norm.path, plan_builder.NEVER_CALLED)
    return builder


def _bake(builder: PlanBuilder) -> None:
    """Plan a plain layer for every linear layer whose weight each forward computes anew.

    Examples are weight norm, spectral norm and weight standardization. The present value of such a
    weight becomes a plain parameter.
    """
    paths: list[str] = []
    for node in builder.traced.nodes:
        path = str(node.target)
        if isinstance(builder.traced.module(node), LINEAR) and path not in paths:
            paths.append(path)

    for path in propagation.distinct(builder.traced.modules, paths):
        linear = builder.traced.modules[path]
        if not reparametrized.is_reparametrized(linear) or not builder.anatomy.takes_part(path):
            continue
        try:
            propagation.check_linear(builder, path, linear)
        except NotFoldable as why:
            builder.notes.append(f"{path} stays a {type(linear).__name__}: {why}")
        else:
            # A scalar that the layer adds to its input cannot become part of a plain layer if zeros
            # are padded, since these do not get the scalar.
            builder.linear(path).bake = not reparametrized.keeps_input_bias(linear)


def _fold_module(builder: PlanBuilder, site: Site) -> None:
    """Fold one affine map in the first way that is possible, or record why the map stays."""
    path = site.path
    if site.refusal:
        builder.refusals[path] = site.refusal
        return

    # The ways are, in this order: into the layers before the map, into the layers after it, the
    # scale alone into the layers after it, and a single number through sums and gates. Each way
    # raises NotFoldable, with its reason, before it changes the plan for good.
    reasons = []
    for fold in (_fold_back, _fold_forward, _move_scale, _fold_scalar):
        try:
            fold(builder, site)
        except NotFoldable as reason:
            reasons.append(str(reason))
        else:
            return

    # The user reads why the first way, folding back, is not possible. A norm with running
    # statistics becomes a scale and shift. Any other map is one already, and stays.
    if site.holds_statistics:
        builder.replace(path, "ChannelAffine")
        builder.settle(path, plan_builder.left_affine(reasons[0]))
    else:
        builder.settle(path, plan_builder.stays(reasons[0]))


def _fold_back(builder: PlanBuilder, site: Site) -> None:
    """Fold y = s (W x + b) + t into the layers before it: W' = s W, b' = s b + t.

    This is exact if nothing but this module reads the outputs of the layers before it.
    """
    channels_of = producers(builder, site)
    for linear_path, channels in channels_of.items():
        builder.linear(linear_path).add(site.path, AbsorbMode.AFTER, channels)
    builder.remove(site.path)
    builder.settle(site.path, plan_builder.folded_back(*channels_of))


def _fold_forward(builder: PlanBuilder, site: Site) -> None:
    """Fold y = W (s x + t) + b into the convolutions after it: W' = W s, b' = b + W t.

    This is exact if the convolutions do not pad: a padded zero would have to become t.
    """
    if site.activation is not None:
        raise NotFoldable("an activation follows")

    conv_paths = propagation.consumers(builder, site.module, builder.is_identity)
    for conv_path in conv_paths:
        conv = builder.traced.linear(conv_path)
        if isinstance(conv, nn.Linear) or conv.transposed or own_forwards.pads(conv):
            raise NotFoldable(
                f"{conv_path} pads its input with zeros, which the shift would have to move"
            )
    # Without the module, the convolutions read its input, which must not change before they do.
    for call in builder.traced.calls[id(site.module)]:
        writer = overwritten(builder, call)
        if writer is not None:
            raise NotFoldable(f"{propagation.name(writer)} overwrites its input later")

    for conv_path in conv_paths:
        builder.linear(conv_path).add(site.path, AbsorbMode.BEFORE)
    builder.remove(site.path)
    builder.settle(site.path, plan_builder.folded_forward(*conv_paths))


def _move_scale(builder: PlanBuilder, site: Site) -> None:
    """Move |s| through the ReLU into the next convolutions. A shift per channel stays.

    relu(s x + t) = |s| relu(sign(s) x + t / |s|) (`sites.affine.split`).
    """
    if isinstance(site.module, OwnLayer) and not site.module.SCALES:
        raise NotFoldable("it has no scale per channel")
    act = site.activation
    if not is_homogeneous(act):
        raise NotFoldable(f"it is followed by {type(act).__name__}, which a scale cannot pass")

    def propagates(node: fx.Node) -> bool:
        return propagation.propagates_scale(builder, node)

    conv_paths = propagation.consumers(builder, site.module, propagates)

    # A channel whose s is too small for a dtype has sign 0 there, and its |s| is not moved. The new
    # layers get the dtypes of the old ones, so the signs must be the same in all of these.
    layers = [site.module, *(builder.traced.modules[path] for path in conv_paths)]
    signs, *others = (site.signs(dtype) for dtype in _dtypes(layers))
    if any(not torch.equal(signs, other) for other in others):
        raise NotFoldable(
            f"its scale is too small for a dtype of its own or of {', '.join(conv_paths)}"
        )

    # The shift that stays multiplies by the signs of s, unless all of them are 1.
    for conv_path in conv_paths:
        builder.linear(conv_path).add(site.path, AbsorbMode.BEFORE_MAGNITUDE)
    builder.replace(site.path, "ChannelBias", signed=bool((signs != 1).any()))
    sentence = f"scale moves to {', '.join(conv_paths)}; a shift stays"
    builder.settle(site.path, Outcome(plan_builder.LEFT_SHIFT, sentence))


def _dtypes(modules: Collection[nn.Module]) -> set[torch.dtype]:
    """Return the dtypes of all floating-point tensors of some modules."""
    dtypes: set[torch.dtype] = set()
    for module in modules:
        tensors = (*nn.Module.parameters(module), *nn.Module.buffers(module))
        dtypes.update(tensor.dtype for tensor in tensors if tensor.is_floating_point())
    return dtypes


def _fold_scalar(builder: PlanBuilder, site: Site) -> None:
    """Fold y = alpha x, with one number alpha, into the layers that compute x (`enlarge`).

    Sums and gates may stand between these layers and x.

    Raises:
        NotFoldable: The layer at the site is no such scalar, or has a bias that is not 0, or alpha
            cannot be moved.
    """
    # `scales_branch` is true of the layers that multiply by one number alpha and may add a bias.
    # Only alpha can be moved through sums and gates.
    module = site.module
    if not scales_branch(module) or (module.bias is not None and module.bias.any()):
        raise NotFoldable("it is no scalar without a bias")
    if site.called > 1:
        raise NotFoldable("it is called more than once")

    # The layers that compute x make alpha x instead, so the scalar is removed. Other readers of x
    # must divide by alpha. If one of them cannot, `attempt` puts the plan back.
    call = builder.traced.calls[id(module)][0]
    (above,) = inputs(call)
    with propagation.attempt(builder):
        linear_paths = propagation.enlarge(builder, above, module.alpha.item(), {call})
    builder.remove(site.path)
    builder.settle(site.path, plan_builder.folded_back(*linear_paths))


def producers(builder: PlanBuilder, norm: Site) -> dict[str, ChannelRange]:
    """Return the linear layers that make a norm's input, if nothing else reads their outputs.

    Between the layers and the norm there may be identities, steps that treat all channels alike
    (reshapes, average pooling; `channel_axes` follows the channels), or a concatenation of
    convolutions.

    Args:
        builder: The plan in the making.
        norm: The norm.

    Returns:
        The range of the norm's channels that each layer makes, by the layer's path. The range is
        None for a layer that makes all channels.

    Raises:
        NotFoldable: There is no such layer, or something else reads the output of one.
    """
    # A concatenation may join one node twice. The node would then make two ranges of channels.
    range_of_node: dict[fx.Node, ChannelRange] = {}
    for call in builder.traced.calls[id(norm.module)]:
        for node, channels in _producing_nodes(builder, norm, call):
            if range_of_node.setdefault(node, channels) != channels:
                raise NotFoldable(f"{node.target} is several parts of its input")

    # A layer that is called several times must make the same channels each time.
    by_layer: dict[int, tuple[str, ChannelRange]] = {}
    for node, channels in range_of_node.items():
        linear = builder.traced.module(node)
        assert linear is not None
        propagation.check_linear(builder, str(node.target), linear)
        if any(call not in range_of_node for call in builder.traced.calls[id(linear)]):
            raise NotFoldable(f"{node.target} is called elsewhere too, without this norm")
        _, first_channels = by_layer.setdefault(id(linear), (str(node.target), channels))
        if first_channels != channels:
            raise NotFoldable(f"{node.target} is several parts of its input")
    return dict(by_layer.values())


def _producing_nodes(
    builder: PlanBuilder, norm: Site, call: fx.Node
) -> Iterator[tuple[fx.Node, ChannelRange]]:
    """Yield the nodes that call the linear layers which make the input of one call of a norm.

    Each node is yielded with the range of the norm's channels that it makes.

    Args:
        builder: The plan in the making.
        norm: The norm.
        call: The node of the norm's call.

    Raises:
        NotFoldable: Anything but linear layers makes the input, or something else reads it.
    """
    traced = builder.traced
    channels = norm.channels
    above = inputs(call)
    (value,) = above

    # Go up from the norm to a linear layer or a concatenation. `stepped` says that a reshape,
    # a pooling or the like was passed. For a norm of a single channel, only identities are passed.
    stepped = False
    while True:
        if len(above) != 1:
            raise NotFoldable("it has no convolution before it")
        node = above[0]
        if isinstance(traced.module(node), LINEAR):
            break
        if channels > 1 and node.target is torch.cat and not stepped:
            yield from _concatenated(builder, node, channels)
            return

        is_step = channels > 1 and channel_axes.is_step(traced, node) and len(inputs(node)) == 1
        if not builder.is_identity(node):
            if not is_step:
                raise NotFoldable(f"it follows {propagation.name(node)}, not a convolution")
            stepped = True
        _check_only_user(builder, node)
        above = inputs(node)

    # A reshape may have mixed the channels, and a Linear may have its outputs in another dimension.
    _check_only_user(builder, node)
    if channels > 1 and (stepped or isinstance(traced.module(node), nn.Linear)):
        _check_axis(builder, value, node)
    # None says that the layer makes all channels of the norm's input.
    yield node, None


def _check_only_user(builder: PlanBuilder, node: fx.Node) -> None:
    """Raise NotFoldable if more than one node reads the value of `node`."""
    if len(builder.traced.users[node]) > 1:
        raise NotFoldable(f"{node.target} has another consumer")


def _check_axis(builder: PlanBuilder, value: fx.Node, node: fx.Node) -> None:
    """Raise NotFoldable unless the channels of `value` are the outputs of the layer at `node`."""
    axis = builder.axes.get(value)
    if axis is None or axis.dim != 1:
        kind = type(builder.traced.module(node)).__name__
        raise NotFoldable(f"the outputs of {node.target} ({kind}) may not be its channels")
    if not axis.pure:
        raise NotFoldable(f"zeros are padded after {node.target}")


def _concatenated(
    builder: PlanBuilder, cat: fx.Node, channels: int
) -> Iterator[tuple[fx.Node, ChannelRange]]:
    """Yield the convolutions whose maps `cat` concatenates, each with its range of the channels.

    Args:
        builder: The plan in the making.
        cat: A node that calls `torch.cat`.
        channels: The number of all channels.

    Raises:
        NotFoldable: `cat` joins anything but convolutions along the channels, joins one twice, or
            something else reads a convolution.
    """
    joined = listed(cat)
    _check_only_user(builder, cat)
    joins_channels = argument(cat, 1, "dim", default=0) == 1
    joins_one_twice = len(joined) != len(inputs(cat))
    if not joins_channels or joins_one_twice:
        raise NotFoldable("it follows cat, not a convolution")

    start = 0
    for node in joined:
        conv = builder.traced.module(node)
        if not isinstance(conv, nn.modules.conv._ConvNd):
            raise NotFoldable(
                f"it follows cat, of {propagation.name(node)} among others, not of convolutions"
            )
        _check_only_user(builder, node)
        # The weight's first dimension counts filters, unless the convolution is transposed.
        outputs = conv.out_channels if conv.transposed else len(conv.weight)
        yield node, (start, start + outputs)
        start += outputs
    if start != channels:
        raise NotFoldable("it follows cat, not a convolution")
