"""Fixup: y = skip + alpha f(x) with alpha = 1, and a scalar bias of 0 before every layer; no norm.

`--init fixup` applies the paper's reset, which is not exact. Component 1 of it: the last
convolution of each branch and the classifier are 0. Component 2: the other convolutions of a
branch with m of them are scaled by L^(-1/(2m-2)), where L is the number of residual blocks.
`--init zeros` applies component 1 alone, and `--init scaled` component 2 (De & Smith 2020, section
6). After each of the three no layer but the classifier has a bias per channel: the paper's biases
are scalars.
"""

from torch import fx

from normswap.folding.canonical_form import fold_norms
from normswap.folding.plan_builder import PlanBuilder
from normswap.folding.propagation import NotFoldable, check_linear, last_linear
from normswap.graph.inspection import Anatomy, Block
from normswap.graph.tracing import LINEAR, NodeReader
from normswap.layers import reparametrized
from normswap.layers.planned_layer import scales_branch
from normswap.plan import Outcome
from normswap.schemes.replaceable_batchnorms import readers
from normswap.schemes.skipinit import check_blocks, linear_paths, no_tail, place_scale
from normswap.sites.activations import is_activation
from normswap.sites.site import Site


def plan(anatomy: Anatomy, *, init: str) -> PlanBuilder:
    """Return the plan of Fixup.

    The norms are folded. A multiplier of 1 ends each residual branch, and a scalar bias of 0 stands
    before each layer and activation.

    Args:
        anatomy: The recorded network.
        init: The start of the weights. `keep` keeps them. `fixup` resets them by both components of
            the paper's initialization (Zhang et al. 2019), `zeros` and `scaled` by one alone. With
            `zeros` the last layer of each branch, and the classifier, start at 0. With `scaled` the
            other layers of each branch are multiplied by a power of the depth.
    """
    check_blocks(anatomy)

    # The paper's reset has two components: some layers become 0, and others are scaled down. The
    # choices `zeros` and `scaled` apply one of them alone.
    builder = fold_norms(anatomy)
    starts_anew = init != "keep"
    if starts_anew:
        _reset(builder, zeros=init != "scaled", scaled=init != "zeros")
    _shift_layers(builder)
    # The paper has scalar biases alone. Weights that are kept need the biases of their norms.
    if starts_anew:
        _drop_channel_biases(builder)
    _place_scales(builder)

    # A norm before an activation is replaced by the activation's scalar bias. In a network that
    # never had norms, the bias is placed at the activation itself.
    never_had_norms = not anatomy.norms and not anatomy.provenance.original_paths
    if never_had_norms:
        _shift_activations(builder)
    _replace_norms_before_activations(builder)

    return builder


def _replace_norms_before_activations(builder: PlanBuilder) -> None:
    """Plan a learnable scalar bias where an activation reads a norm that the plan removes."""
    anatomy = builder.anatomy
    for path, module in anatomy.traced.modules.items():
        if not builder.is_removed(path, module) or not anatomy.takes_part(path):
            continue
        if _before_activation(builder, anatomy.site(path)):
            builder.replace(path, "ScalarBias")


def _place_scales(builder: PlanBuilder) -> None:
    """Plan a learnable scalar, at first 1, that multiplies the output of each residual branch.

    A branch that ends in such a scalar already keeps it, unless the plan replaces it.
    """
    modules = builder.traced.modules
    for block in builder.anatomy.included_blocks:
        if block.tail is None:
            builder.refusals[block.path] = no_tail(builder.anatomy, block)
        elif scales_branch(modules[block.tail]) and block.tail not in builder.replacements:
            builder.notes.append(f"{block.name} keeps its scalar")
        else:
            # An activation after the sum needs a scalar bias before it, which the multiplier has.
            place_scale(builder, block.tail, alpha=1.0, bias=block.order == "post")


def _shift_layers(builder: PlanBuilder) -> None:
    """Plan a scalar bias of 0 before each convolution and linear layer.

    The biases are planned before the multipliers, so that a layer that ends a branch absorbs the
    branch's multiplier.
    """
    modules = builder.traced.modules
    for path in linear_paths(builder.anatomy):
        kind = reparametrized.plain_class(builder.traced.linear(path))
        try:
            check_linear(builder, path, modules[path])
        except NotFoldable as why:
            builder.notes.append(f"{path} gets no bias before it: {why}")
            continue

        # Only some classes have a variant that adds a scalar to its input. A layer that is such a
        # variant already is planned likewise.
        if kind not in reparametrized.INPUT_BIASED and not isinstance(
            modules[path], reparametrized.InputBiased
        ):
            builder.notes.append(f"{path} gets no bias before it: it is a {kind.__name__}")
        else:
            # `Shifted` is the layer that adds one learnable scalar to its input.
            builder.linear(path).layer = "Shifted"


def _shift_activations(builder: PlanBuilder) -> None:
    """Plan a scalar bias of 0 before each activation of a network that never had norms.

    The activation after a sum gets none here, because the multiplier of the block has that bias.
    """
    # In a block with the order "post", an activation follows the sum.
    traced = builder.traced
    post_blocks = [block for block in builder.anatomy.blocks if block.order == "post"]
    after_sums = {user for block in post_blocks for user in traced.users[block.total]}
    for path, module in traced.modules.items():
        calls = traced.calls.get(id(module), ())
        if not calls or not is_activation(module) or not builder.anatomy.takes_part(path):
            continue
        if traced.called(module) > 1:
            builder.notes.append(f"{path} gets no bias before it: it is called several times")
        elif calls[0] not in after_sums:
            builder.replace(path, "ScalarBias")


def _drop_channel_biases(builder: PlanBuilder) -> None:
    """Plan that no layer has a bias per channel, and no norm leaves a shift.

    The classifier keeps its bias, as in Fixup's paper (Zhang et al. 2019). The layers of gates
    (squeeze and excitation) keep theirs, since the paper says nothing of them.
    """
    # The paths of the layers inside gates begin with one of these.
    anatomy = builder.anatomy
    gates = tuple(f"{block.gate}." for block in anatomy.blocks if block.gate)
    for path, linear in builder.linears.items():
        is_in_gate = f"{path}.".startswith(gates)
        if path != anatomy.classifier and not is_in_gate:
            linear.extra["bias"] = "drop"

    # A norm that no layer takes in leaves a scale and shift, which give way to the scalar bias.
    for norm in anatomy.norms:
        edit = builder.replacements.get(norm.path)
        if edit is not None and not builder.removes(norm.path):
            builder.remove(norm.path)
            builder.settle(norm.path, Outcome("reset", "is reset to a scalar bias"))


def _before_activation(builder: PlanBuilder, site: Site) -> bool:
    """Whether only activations read a module's output, directly or through identities.

    An activation that the module applies itself counts, too.
    """
    if site.activation is not None:
        return True
    calls = builder.traced.calls.get(id(site.module), ())
    reached: list[fx.Node] = []
    for call in calls:
        # timm has its `drop_block`, an identity, between a norm and its activation.
        reached += readers(builder, call, builder.is_identity)

    final_readers = [node for node in reached if not builder.is_identity(node)]
    return bool(final_readers) and all(map(NodeReader(builder.traced).is_activation, final_readers))


def _reset(builder: PlanBuilder, *, zeros: bool, scaled: bool) -> None:
    """Plan Fixup's initialization: weights are multiplied by 0, or by a power of the depth.

    Args:
        builder: The plan in the making.
        zeros: Whether component 1 is applied: the last layer of each branch, and the classifier,
            become 0.
        scaled: Whether component 2 is applied: the other layers of each branch are scaled.
    """
    anatomy = builder.anatomy
    for block in anatomy.included_blocks:
        try:
            last, _ = last_linear(builder, block.branch, block.total)
        except NotFoldable as why:
            builder.notes.append(f"{block.name} is not reset: {why}")
            continue

        # The last layer of the branch starts at 0. The other m - 1 layers are multiplied by
        # L^(-1/(2m-2)), where L is the number of blocks.
        convs = _branch(anatomy, block, last)
        if zeros:
            builder.linear(last).gain = 0.0
        for path in convs:
            if scaled and path != last:
                builder.linear(path).gain *= len(anatomy.blocks) ** (-1 / (2 * len(convs) - 2))

    if zeros and anatomy.classifier and anatomy.takes_part(anatomy.classifier):
        builder.linear(anatomy.classifier).gain = 0.0


def _branch(anatomy: Anatomy, block: Block, last: str) -> list[str]:
    """Return the paths of the convolutions and linear layers on a branch, without its gates.

    Args:
        anatomy: The recorded network.
        block: The residual block.
        last: The path of the last layer on the branch, from which the search goes upwards.
    """
    # The search goes up to the node that skip and branch have in common. The term of the sum that
    # is not the branch is the skip. In a gate x g(x) the search goes on to x, so the layers of g
    # are left out.
    traced = anatomy.traced
    convolutions = []
    skip = next(term for term in block.total.all_input_nodes if term is not block.branch)
    node: fx.Node | None = traced.calls[id(traced.modules[last])][0]
    while node is not None and not traced.depends(skip, on=node):
        if isinstance(traced.module(node), LINEAR):
            convolutions.append(str(node.target))
        node = traced.main_input(node)
    return convolutions
