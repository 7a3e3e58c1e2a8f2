"""RMSNorm in place of every LayerNorm: exact, by centring whatever writes to the residual stream.

LN(x) = RMSNorm(x - mean(x)), with the same eps. The stream has mean 0 if each linear layer and
embedding that writes to it has the weight W' = (I - 11'/C) W and the bias b' = b - mean(b). Gamma
stays with the norm; beta goes into the linear layers after it. The features between the blocks lose
their mean, so a network in which anything but a LayerNorm reads that mean is refused.
"""

from torch import fx

from normswap.errors import RefusedError, spelled
from normswap.folding import norm_affine, residual_stream
from normswap.folding.canonical_form import fold_norms
from normswap.folding.plan_builder import PlanBuilder
from normswap.folding.propagation import NotFoldable
from normswap.graph import channel_axes
from normswap.graph.inspection import Anatomy
from normswap.graph.tracing import inputs
from normswap.plan import AbsorbMode, Outcome
from normswap.sites.site import Site


def plan(anatomy: Anatomy) -> PlanBuilder:
    """Return the plan that places an RMSNorm where every LayerNorm stands.

    So that the function is kept, the linear layers and embeddings that write to the residual stream
    are centred: the mean over the channels is subtracted from what they add.

    Raises:
        RefusedError: The network has no LayerNorm.
    """
    norms: dict[str, Site] = {}
    for path, site in norm_affine.foldable_norms(anatomy).items():
        if site.is_layernorm:
            norms[path] = site
    if not norms:
        remedy = f"`{spelled('to', 'layernorm')}` turns BatchNorm into one"
        raise RefusedError("the network has no LayerNorm", remedy=remedy)

    # No norm is folded, only what earlier conversions left.
    builder = fold_norms(anatomy, leave=[norm.path for norm in anatomy.norms])
    streams: list[residual_stream.Stream] = []
    for path, norm in norms.items():
        try:
            _replace(builder, norm, streams)
        except NotFoldable as why:
            builder.refusals[path] = str(why)

    for stream in streams:
        residual_stream.centre(builder, stream)
    return builder


def _replace(builder: PlanBuilder, norm: Site, streams: list[residual_stream.Stream]) -> None:
    """Plan an RMSNorm in place of a LayerNorm.

    The two are equal if the mean of their input over the channels is 0. So the residual streams
    that the norm reads are to be centred.

    Args:
        builder: The plan in the making.
        norm: The LayerNorm.
        streams: The residual streams whose mean over the channels is to become 0. The stream that
            the norm reads is added, unless it is among them.

    Raises:
        NotFoldable: The norm cannot be replaced, or its input cannot be centred.
    """
    # The reason, if there is one, why gamma and beta of the norm cannot be changed.
    if norm.refusal_of_gamma:
        raise NotFoldable(norm.refusal_of_gamma)

    path = norm.path
    calls = builder.traced.calls[id(norm.module)]
    values: list[fx.Node] = []
    for call in calls:
        values += inputs(call)

    # If the norm is the network's last one, the user is told that the features lose their mean.
    _add_stream(builder, values, streams)
    _note_features(builder, path, values)

    builder.replace(path, "RMSNorm")
    builder.settle(path, _rmsnorm_outcome())
    # If the norm has a beta, it moves into the linear layers that read the norm, or else it stays.
    # gamma stays in the RMSNorm, so these layers absorb the shift alone (`BEFORE_SHIFT`).
    if getattr(norm.module, "bias", None) is None:
        return

    try:
        readers = norm_affine.linear_readers(builder, builder.axes, norm)
    except NotFoldable as why:
        builder.replace(path, "RMSNorm", shift=True)
        builder.settle(path, _rmsnorm_outcome(f"its shift stays: {why}"))
    else:
        for reader in readers:
            builder.linear(reader).add(path, AbsorbMode.BEFORE_SHIFT)
        builder.settle(path, _rmsnorm_outcome(f"its shift moves to {', '.join(readers)}"))


def _note_features(builder: PlanBuilder, path: str, values: list[fx.Node]) -> None:
    """Note that the network's features lose their mean, if the norm is the network's last one.

    Args:
        builder: The plan in the making, which gets the note.
        path: The path of the norm.
        values: The nodes of the norm's inputs, one for each call.
    """
    role = next(norm.role for norm in builder.anatomy.norms if norm.path == path)
    if role != "head":
        return

    # Users take the input of the last norm as features. A step with several inputs may join a class
    # token with the other tokens just before the norm. Its value is not what they take.
    value = values[0]
    if channel_axes.is_step(builder.traced, value) and len(inputs(value)) == 1:
        features = f"the features after {residual_stream.called(value)}"
        builder.notes.append(f"{path} reads {features}: these lose their mean, too")


def _add_stream(
    builder: PlanBuilder, values: list[fx.Node], streams: list[residual_stream.Stream]
) -> None:
    """Add the residual stream of those inputs of a norm that are in no stream of the list yet.

    Args:
        builder: The plan in the making.
        values: The nodes of the norm's inputs, one for each call.
        streams: The residual streams whose mean over the channels is to become 0. One is added,
            unless all inputs are in them.

    Raises:
        NotFoldable: The new stream cannot be centred.
    """
    centred: set[fx.Node] = set()
    for stream in streams:
        centred.update(stream.values)
    uncentred = [value for value in values if value not in centred]
    if not uncentred:
        return

    try:
        streams.append(residual_stream.around(builder, uncentred))
    except NotFoldable as why:
        raise NotFoldable(f"its input must keep its mean: {why}") from None


def _rmsnorm_outcome(reason: str = "") -> Outcome:
    """Return the outcome of a norm that becomes an RMSNorm. The reason says where its beta goes."""
    return Outcome("became RMSNorm", "becomes an RMSNorm", reason)
