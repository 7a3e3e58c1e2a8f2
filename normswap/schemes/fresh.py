"""Fresh networks: norms as the identity, and factors of the residual stream without compensation.

A published initialization begins from weights that were just drawn, and from no norms. So a norm's
numbers are not folded into the weights here: gamma, beta and the statistics of a fresh BatchNorm
say nothing, and timm's gammas of 0 would end every branch.
"""

from torch import fx

from normswap.errors import RefusedError
from normswap.folding.canonical_form import fold_norms
from normswap.folding.plan_builder import PlanBuilder
from normswap.folding.propagation import NotFoldable, last_linear, name
from normswap.graph.inspection import Anatomy, Block
from normswap.graph.tracing import is_add
from normswap.plan import Outcome
from normswap.schemes.skipinit import add_biases, check_blocks, place_scale
from normswap.sites.activations import is_homogeneous

_IDENTITY = Outcome("become the identity", "becomes the identity, whatever its numbers are")


def without_norms(anatomy: Anatomy) -> PlanBuilder:
    """Return the plan that makes every BatchNorm the identity, and gives each convolution a bias.

    Raises:
        RefusedError: The network has no residual blocks, or the last layer of a branch is all 0.
    """
    check_blocks(anatomy)
    builder = fold_norms(anatomy)

    # Folding has checked that each norm can be removed, and has planned that layers absorb it. A
    # fresh norm's numbers are not to enter the weights, so these absorptions are taken back.
    norms = {norm.path for norm in anatomy.norms if norm.is_batchnorm and norm.called}
    for linear in builder.linears.values():
        linear.reads = [read for read in linear.reads if read[0] not in norms]
    # A norm that was refused, or that the user has left out (`only`, `skip`), has no outcome.
    for path in sorted(norms & builder.outcomes.keys()):
        _remove(builder, path)
        builder.settle(path, _IDENTITY)

    add_biases(builder)
    for block in anatomy.included_blocks:
        _check_weights(builder, block)
    return builder


def _remove(builder: PlanBuilder, path: str) -> None:
    """Plan that a norm becomes the identity, and that the activation behind it works out of place.

    Without the norm, the activation may read a tensor that the skip connection reads, too. So it
    must not write into that tensor.
    """
    traced = builder.traced
    builder.replace(path, "Vacant", in_place=False)
    for call in traced.calls[id(traced.modules[path])]:
        for reader in traced.users[call]:
            if getattr(traced.module(reader), "inplace", False) is True:
                builder.replace(str(reader.target), "OutOfPlace")


def _check_weights(builder: PlanBuilder, block: Block) -> None:
    """Raise RefusedError if the last layer of a block's branch is all 0."""
    try:
        path, _ = last_linear(builder, block.branch, block.total)
    except NotFoldable:
        # No linear layer is known to end the branch, so there is no weight to look at.
        return
    if not builder.traced.linear(path).weight.any():
        raise RefusedError(
            f"{path} is all 0",
            "a reset begins from weights that were drawn",
            "Build the network with zero_init_last=False",
        )


def scale_readers(builder: PlanBuilder, node: fx.Node, factor: float) -> None:
    """Plan a factor for all that reads a residual sum, except for further sums.

    A reader is a norm that the plan removes, or an activation f with f(c x) = c f(x). The factor
    takes the place of the norm, or stands behind the activation.

    Args:
        builder: The plan in the making.
        node: The node of the sum.
        factor: The factor, which is positive.

    Raises:
        NotFoldable: A reader is no module in whose place the factor can stand.
    """
    traced = builder.traced
    for reader in traced.users[node]:
        if is_add(reader):
            continue

        module = traced.module(reader)
        path = str(reader.target)
        if module is None or traced.called(module) > 1 or not _passes(builder, path):
            raise NotFoldable(f"{name(reader)} reads the residual stream, and can hold no factor")
        # A factor of 1 needs no layer.
        if factor != 1:
            place_scale(builder, path, alpha=factor, bias=False, layer="FixedScale")


def _passes(builder: PlanBuilder, path: str) -> bool:
    """Whether f(c x) = c f(x) for c > 0, where f is what the module at a path computes.

    If the plan removes the module, f is the activation that it leaves, or the identity.
    """
    if builder.removes(path):
        return is_homogeneous(builder.anatomy.site(path).activation)
    return is_homogeneous(builder.traced.modules[path])
