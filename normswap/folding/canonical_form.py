"""Fold: turn every BatchNorm (and every scalar or affine layer of an earlier conversion) into plain
weights.

Each of them is y = act(s * x + t). The first possible way is taken: fold it back into the
convolutions before it; forward into the unpadded convolutions after it; before a ReLU, move |s|
through the ReLU into the next convolutions' inputs and keep a shift (`ChannelBias`); keep it as a
`ChannelAffine`, which is always exact. The algebra is in `layers.Folded` and `affine.split`. This
file decides from the graph which layer absorbs which, and says why not.
"""

from collections.abc import Collection, Iterator

import torch
from torch import fx, nn

from normswap.folding import norm_free, plan_builder, propagation
from normswap.folding.overwriting import overwritten
from normswap.folding.plan_builder import PlanBuilder
from normswap.folding.propagation import NotFoldable
from normswap.graph import channel_axes
from normswap.graph.anatomy import AffineMap
from normswap.graph.inspection import Anatomy
from normswap.graph.tracing import LINEAR, argument, inputs, listed
from normswap.layers import affine, own_forwards, reparametrized
from normswap.layers.activations import is_homogeneous
from normswap.layers.planned_layer import OwnLayer, scales_branch
from normswap.plan import AbsorbMode, Outcome

# A range of the norm's channels; None: all of them.
Part = tuple[int, int] | None


def fold_norms(anatomy: Anatomy, *, leave: Collection[str] = ()) -> PlanBuilder:
    """Plan what happens to every affine module that takes part, but those at the paths in `leave`.

    `refusals` has those that cannot be read (no running statistics, unknown subclasses, untraceable
    surroundings).
    """
    builder = PlanBuilder(anatomy)
    _bake(builder)
    norm_free.free(builder)
    for site in anatomy.maps:
        if site.path not in leave and anatomy.takes_part(site.path):
            _fold_module(builder, site)
    for norm in anatomy.norms:
        if norm.is_batchnorm and not norm.called and anatomy.takes_part(norm.path):
            _explain_uncalled(builder, norm.path)
    return builder


def _explain_uncalled(builder: PlanBuilder, path: str) -> None:
    """Record why nothing happens to a norm that forward does not call."""
    outer = next((p for p in builder.traced.opaque if path.startswith(f"{p}.")), None)
    read = builder.traced.read_directly(builder.traced.modules[path])
    if read:
        builder.refusals[path] = f"forward reads {read} by itself and does not call the module"
    elif outer:
        builder.refusals[path] = (
            f"it is inside {outer}, which cannot be looked into: {builder.traced.opaque[outer]}"
        )
    else:
        builder.settle(path, plan_builder.NEVER_CALLED)


def _bake(builder: PlanBuilder) -> None:
    """Make every layer plain whose weight is computed at each step."""
    paths = [
        str(node.target)
        for node in builder.traced.nodes
        if isinstance(builder.traced.module(node), LINEAR)
    ]
    for path in propagation.distinct(builder.traced.modules, list(dict.fromkeys(paths))):
        conv = builder.traced.modules[path]
        if not reparametrized.is_reparametrized(conv) or not builder.anatomy.takes_part(path):
            continue
        try:
            propagation.check_linear(builder, path, conv)
        except NotFoldable as why:
            builder.notes.append(f"{path} stays a {type(conv).__name__}: {why}")
        else:
            builder.linear(path).bake = not reparametrized.keeps_input_bias(conv)


def _fold_module(builder: PlanBuilder, site: AffineMap) -> None:
    path = site.path
    if site.refusal:
        builder.refusals[path] = site.refusal
        return
    reasons = []
    for way in (_fold_back, _fold_forward, _move_scale, _fold_scalar):
        try:
            way(builder, path, site.module)
        except NotFoldable as reason:
            reasons.append(str(reason))
        else:
            return
    if site.holds_statistics:
        builder.replace(path, "ChannelAffine")
        builder.settle(path, plan_builder.left_affine(reasons[0]))
    else:
        builder.settle(path, plan_builder.stays(reasons[0]))


def _fold_back(builder: PlanBuilder, path: str, module: nn.Module) -> None:
    """Fold into the convolutions before, which is exact if all that they compute goes through this
    module.
    """
    parts = producers(builder, module)
    for linear, channels in parts.items():
        builder.linear(linear).add(path, AbsorbMode.AFTER, channels)
    builder.remove(path)
    builder.settle(path, plan_builder.folded_back(*parts))


def _fold_forward(builder: PlanBuilder, path: str, module: nn.Module) -> None:
    """Fold into the convolutions right after, if they do not pad."""
    if affine.activation(module) is not None:
        raise NotFoldable("an activation follows")
    convs = propagation.consumers(builder, module, builder.is_identity)
    for conv_path in convs:
        conv = builder.traced.linear(conv_path)
        if isinstance(conv, nn.Linear) or conv.transposed or own_forwards.pads(conv):
            raise NotFoldable(
                f"{conv_path} pads its input with zeros, which the shift would have to move"
            )
    for call in builder.traced.calls[id(module)]:
        later = overwritten(builder, call)
        if later is not None:
            raise NotFoldable(f"{propagation.name(later)} overwrites its input later")
    for conv_path in convs:
        builder.linear(conv_path).add(path, AbsorbMode.BEFORE)
    builder.remove(path)
    builder.settle(
        path, Outcome(plan_builder.FOLDED_FORWARD, f"folds forward into {', '.join(convs)}")
    )


def _move_scale(builder: PlanBuilder, path: str, module: nn.Module) -> None:
    """Move |s| through the ReLU into the next convolutions' inputs; a shift per channel stays."""
    if isinstance(module, OwnLayer) and not module.SCALES:
        raise NotFoldable("it has no scale per channel")
    act = affine.activation(module)
    if not is_homogeneous(act):
        raise NotFoldable(f"it is followed by {type(act).__name__}, which a scale cannot pass")
    convs = propagation.consumers(
        builder, module, lambda node: propagation.propagates_scale(builder, node)
    )
    for conv_path in convs:
        builder.linear(conv_path).add(path, AbsorbMode.BEFORE_MAGNITUDE)
    dtype = next(builder.traced.modules[convs[0]].parameters()).dtype
    signed = bool((affine.split(module, dtype)[1] != 1).any())
    builder.replace(path, "ChannelBias", signed=signed)
    builder.settle(
        path, Outcome(plan_builder.LEFT_SHIFT, f"scale moves to {', '.join(convs)}; a shift stays")
    )


def _fold_scalar(builder: PlanBuilder, path: str, module: nn.Module) -> None:
    """Fold a scalar into the layers that compute what it scales, through sums and gates
    (`propagation.enlarge`).
    """
    if not scales_branch(module) or (module.bias is not None and module.bias.any()):
        raise NotFoldable("it is no scalar without a bias")
    call, *others = builder.traced.calls[id(module)]
    if others:
        raise NotFoldable("it is called more than once")
    (above,) = inputs(call)
    with propagation.attempt(builder):
        linears = propagation.enlarge(builder, above, module.alpha.item(), {call})
    builder.remove(path)
    builder.settle(path, plan_builder.folded_back(*linears))


def producers(builder: PlanBuilder, module: nn.Module) -> dict[str, Part]:
    """Paths of the linear layers whose outputs go through this norm alone, each with its range of
    the channels.

    Between them and the norm there may be identities, steps that treat all channels alike
    (reshapes, average pooling; `channel_axes` follows the channels), and a concatenation of
    convolutions.

    Raises NotFoldable: there are none, or their outputs go elsewhere, too.
    """
    parts: dict[fx.Node, Part] = {}
    for call in builder.traced.calls[id(module)]:
        for node, channels in _above(builder, module, call):
            if parts.setdefault(node, channels) != channels:
                raise NotFoldable(f"{node.target} is several parts of its input")
    ways: dict[int, tuple[str, Part]] = {}
    for node, channels in parts.items():
        linear = builder.traced.module(node)
        assert linear is not None
        propagation.check_linear(builder, str(node.target), linear)
        if any(call not in parts for call in builder.traced.calls[id(linear)]):
            raise NotFoldable(f"{node.target} is called elsewhere too, without this norm")
        if ways.setdefault(id(linear), (str(node.target), channels))[1] != channels:
            raise NotFoldable(f"{node.target} is several parts of its input")
    return dict(ways.values())


def _above(
    builder: PlanBuilder, module: nn.Module, call: fx.Node
) -> Iterator[tuple[fx.Node, Part]]:
    traced = builder.traced
    channels = affine.channels(module)
    (value,) = above = inputs(call)
    stepped = False
    while True:
        if len(above) != 1:
            raise NotFoldable("it has no convolution before it")
        node = above[0]
        if isinstance(traced.module(node), LINEAR):
            break
        if channels > 1 and node.target is torch.cat and not stepped:
            yield from _parts(builder, node, channels)
            return
        stepping = channels > 1 and channel_axes.is_step(traced, node) and len(inputs(node)) == 1
        if not builder.is_identity(node) and not stepping:
            raise NotFoldable(f"it follows {propagation.name(node)}, not a convolution")
        stepped |= stepping and not builder.is_identity(node)
        _only_user(builder, node)
        above = inputs(node)
    _only_user(builder, node)
    if channels > 1 and (stepped or isinstance(traced.module(node), nn.Linear)):
        _prove(builder, value, node)
    yield node, None


def _only_user(builder: PlanBuilder, node: fx.Node) -> None:
    if len(builder.traced.users[node]) > 1:
        raise NotFoldable(f"{node.target} has another consumer")


def _prove(builder: PlanBuilder, value: fx.Node, node: fx.Node) -> None:
    """Raise NotFoldable unless the norm's channels are the outputs of the linear layer that `node`
    calls.
    """
    axis = builder.axes.get(value)
    if axis is None or axis.dim != 1:
        kind = type(builder.traced.module(node)).__name__
        raise NotFoldable(f"the outputs of {node.target} ({kind}) may not be its channels")
    if not axis.pure:
        raise NotFoldable(f"zeros are padded after {node.target}")


def _parts(builder: PlanBuilder, cat: fx.Node, channels: int) -> Iterator[tuple[fx.Node, Part]]:
    """The convolutions whose maps are concatenated, each with its range of the channels."""
    joined = listed(cat)
    _only_user(builder, cat)
    if argument(cat, 1, "dim", default=0) != 1 or len(joined) != len(inputs(cat)):
        raise NotFoldable("it follows cat, not a convolution")
    start = 0
    for node in joined:
        conv = builder.traced.module(node)
        if not isinstance(conv, nn.modules.conv._ConvNd):
            raise NotFoldable(
                f"it follows cat, of {propagation.name(node)} among others, not of convolutions"
            )
        _only_user(builder, node)
        yield node, (start, start + conv.out_channels)
        start += conv.out_channels
    if start != channels:
        raise NotFoldable("it follows cat, not a convolution")
