"""What the schemes that replace BatchNorms share.

They ask which BatchNorms can be replaced, and which convolution stands before each.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import fx

from normswap.errors import RefusedError, spelled
from normswap.folding.canonical_form import fold_norms, producers
from normswap.folding.plan_builder import PlanBuilder
from normswap.folding.propagation import NotFoldable
from normswap.graph.inspection import Anatomy
from normswap.graph.tracing import inputs
from normswap.plan import Step
from normswap.sites.site import Site


def replaceable_batchnorms(
    anatomy: Anatomy, replacement: str
) -> tuple[PlanBuilder, dict[str, Site]]:
    """Start a plan that folds everything but the BatchNorms, and list those that can be replaced.

    Args:
        anatomy: The recorded network.
        replacement: What will stand in their place, in words such as `Dynamic Tanh`, for the
            message of the refusal.

    Returns:
        The plan in the making, and the BatchNorms that can be replaced, by path.

    Raises:
        RefusedError: The network has no BatchNorm.
    """
    batchnorms = [norm.site for norm in anatomy.norms if norm.is_batchnorm]
    norms = {site.path: site for site in batchnorms if anatomy.takes_part(site.path)}
    if not norms:
        lacking = f"no BatchNorm to replace by a {replacement}"
        require_no_tokenwise_norms(anatomy, lacking)
        ways = f"`{spelled('to', 'unfold')}` or `{spelled('to', 'batchnorm')}`"
        raise RefusedError(
            lacking,
            anatomy.refused_norms,
            f"Where BatchNorm was folded away, {ways} brings it back",
        )

    # The plan in the making already says why a norm that forward never calls stays.
    builder = fold_norms(anatomy, leave=norms)
    replaceable: dict[str, Site] = {}
    for path, site in norms.items():
        if not site.called:
            continue
        if site.refusal is not None:
            builder.refusals[path] = site.refusal
        else:
            replaceable[path] = site

    return builder, replaceable


def conv_before(builder: PlanBuilder, norm: Site) -> str | None:
    """Return the path of the convolution before a norm, if it can absorb a scale and shift.

    None is returned if it cannot, if more than this norm reads its output, or if the plan already
    changes the convolution.
    """
    # `producers` returns the channels that each layer before the norm makes. None means all of
    # them, so the layer at `path` must be the only one.
    calls = builder.traced.calls[id(norm.module)]
    path = str(inputs(calls[0])[0].target)
    try:
        above = producers(builder, norm)
    except NotFoldable:
        return None
    if norm.called > 1 or above != {path: None} or path in builder.linears:
        return None
    return path


def readers(
    builder: PlanBuilder, node: fx.Node, passes: Callable[[fx.Node], bool]
) -> Iterator[fx.Node]:
    """Yield the nodes that read the value of `node`, each once.

    A reader for which `passes` is true hands the value on, so its own readers are yielded, too.
    """
    users = builder.traced.users
    met: set[fx.Node] = set()

    pending = [*users[node]]
    while pending:
        reader = pending.pop()
        if reader not in met:
            met.add(reader)
            yield reader
            if passes(reader):
                pending += users[reader]


def exchanged(step: Step, layer: str, other: str) -> Step:
    """Return a copy of a step in which every edit that places `layer` places `other`.

    Args:
        step: The step.
        layer: The name of the class of layers that is exchanged.
        other: The name of the class of layers that stands in its place.
    """
    edits = []
    for edit in step.edits:
        if edit.layer == layer:
            edit = replace(edit, layer=other)
        edits.append(edit)
    return replace(step, edits=tuple(edits))


def require_no_tokenwise_norms(anatomy: Anatomy, lacking: str) -> None:
    """Refuse a network that has LayerNorms, for a target that needs BatchNorms.

    Args:
        anatomy: The recorded network.
        lacking: What the target needs and the network lacks, for the message.

    Raises:
        RefusedError: The network has a LayerNorm.
    """
    if any(norm.site.is_layernorm for norm in anatomy.norms):
        raise RefusedError(
            lacking,
            "its norms are LayerNorms: they take statistics of each token, and without those too"
            f" much accuracy is lost ({anatomy.refused_norms})",
            f"Try '{spelled('to', 'rmsnorm')}', which is exact, or says which norms must stay",
        )
