"""What the schemes that replace BatchNorms share.

They ask which BatchNorms can be replaced, and which convolution stands before each.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import fx, nn

from normswap.errors import RefusedError, spelled
from normswap.folding.canonical_form import fold_norms, producers
from normswap.folding.plan_builder import PlanBuilder
from normswap.folding.propagation import NotFoldable
from normswap.graph.inspection import Anatomy
from normswap.graph.tracing import inputs
from normswap.plan import Step
from normswap.sites import affine


def replaceable_batchnorms(
    anatomy: Anatomy, replacement: str
) -> tuple[PlanBuilder, dict[str, nn.Module]]:
    """Start a plan that folds everything but the BatchNorms, and list those that can be replaced.

    Args:
        anatomy: The recorded network.
        replacement: The name of the layers that will stand in their place, for the refusal's
            sentence.

    Returns:
        The plan in the making, and the BatchNorms by path, each under the first of its paths.

    Raises:
        RefusedError: The network has no BatchNorm.
    """
    traced = anatomy.traced
    norms = {path: module for path, module in traced.modules.items() if affine.is_batchnorm(module)}

    norms = {path: module for path, module in norms.items() if anatomy.takes_part(path)}
    if not norms:
        lacking = f"no BatchNorm to replace by a {replacement}"
        require_no_tokenwise_norms(anatomy, lacking)
        ways = f"`{spelled('to', 'unfold')}` or `{spelled('to', 'batchnorm')}`"
        raise RefusedError(lacking, "", f"Where BatchNorm was folded away, {ways} brings it back")

    builder = fold_norms(anatomy, leave=norms)
    once = {
        id(module): path for path, module in reversed(norms.items()) if id(module) in traced.calls
    }

    replaceable: dict[str, nn.Module] = {}
    for path, module in norms.items():
        if once.get(id(module)) != path:
            continue
        if why := affine.refusal(module) or traced.read_directly(module):
            builder.refusals[path] = why
        else:
            replaceable[path] = module

    return builder, replaceable


def conv_before(builder: PlanBuilder, norm: nn.Module) -> str | None:
    """Return the path of the convolution before a norm, if it can absorb a scale and shift.

    Only this norm may read the convolution's output, and the plan must not change the convolution
    already. Otherwise None is returned.
    """
    calls = builder.traced.calls[id(norm)]
    path = str(inputs(calls[0])[0].target)
    try:
        above = producers(builder, norm)
    except NotFoldable:
        return None
    if len(calls) > 1 or above != {path: None} or path in builder.linears:
        return None
    return path


def readers(
    builder: PlanBuilder, node: fx.Node, passes: Callable[[fx.Node], bool]
) -> Iterator[fx.Node]:
    """Return the nodes that read the value of `node`, each once.

    A node for which `passes` is true hands the value on, so its readers are asked instead.
    """
    users = builder.traced.users
    met: set[fx.Node] = set()

    ahead = [*users[node]]
    while ahead:
        reader = ahead.pop()
        if reader not in met:
            met.add(reader)
            yield reader
            if passes(reader):
                ahead += users[reader]


def exchanged(step: Step, layer: str, other: str) -> Step:
    """Return the step with another layer in every edit that places `layer`."""
    edits = []
    for edit in step.edits:
        if edit.layer == layer:
            edit = replace(edit, layer=other)
        edits.append(edit)
    return replace(step, edits=tuple(edits))


def require_no_tokenwise_norms(anatomy: Anatomy, lacking: str) -> None:
    """Refuse a network whose norms are LayerNorms, for a target that needs BatchNorms."""
    if any(isinstance(module, nn.LayerNorm) for module in anatomy.traced.modules.values()):
        raise RefusedError(
            lacking,
            "its norms are LayerNorms: they take statistics of each token, and without those too"
            " much accuracy is lost",
            f"Try '{spelled('to', 'rmsnorm')}', which is exact",
        )
