"""SkipInit: no norm, and a learned scalar at the end of every branch, y = skip + alpha f(x).

With `--alpha match` alpha is the standard deviation of the branch's output, and the branch's last
convolution is divided by alpha. So f has unit variance, as in the paper's analysis, and the
function is kept. Any other alpha changes the function. The regularized form adds biases and
dropout.
"""

import copy
import math
from collections.abc import Iterable
from typing import TypeGuard, cast

import torch
from numpy.polynomial import hermite_e
from torch import Tensor, fx, nn

from normswap.errors import RefusedError, spelled
from normswap.folding.canonical_form import fold_norms
from normswap.folding.plan_builder import PlanBuilder
from normswap.folding.propagation import NotFoldable, check_linear, distinct, last_linear
from normswap.graph.inspection import Anatomy, Block
from normswap.graph.tracing import LINEAR, constant, is_constant_mul
from normswap.layers import reparametrized
from normswap.layers.placeholders import Dropout, Dropped, Vacant
from normswap.layers.planned_layer import BranchScale, scales_branch
from normswap.plan import AbsorbMode, Absorption, Body, Edit, Then
from normswap.sites.activations import keeps_forward

# Why a convolution is not divided by the deviation of its branch's output.
_UNKNOWN_MOMENTS = "no norm says how much its output varies"


def no_tail(anatomy: Anatomy, block: Block) -> str:
    """Return why no scalar can stand at the end of a block's residual branch, as a text.

    Args:
        anatomy: The recorded network.
        block: A block whose `tail` is None: no module can hold a scalar there.
    """
    last = anatomy.traced.module(block.branch)
    if last is not None and anatomy.traced.called(last) > 1:
        return "forward calls its layers several times, and a scalar is placed for one call"
    if anatomy.traced.users[block.branch] != [block.total]:
        return "not only its sum reads what the branch returns, and a scalar would change that"
    if is_constant_mul(block.branch):
        factor = constant(block.branch)
        return f"its own forward multiplies the branch by {factor:g}: let a module do that"
    return "its branch ends in a function of the block itself, where no module can stand"


def plan(anatomy: Anatomy, *, alpha: str | float) -> PlanBuilder:
    """Return the plan of SkipInit: the norms fold, and a scalar ends each residual branch.

    Args:
        anatomy: The recorded network.
        alpha: The first value of the scalars: `match` (the standard deviation of each branch's
            output), `inv-sqrt-depth` (1 / sqrt(number of blocks)) or a number.
    """
    return drop_no_more(scale_branches(anatomy, initial(alpha, len(anatomy.blocks))))


def plan_regularized(anatomy: Anatomy, *, alpha: str | float, dropout: float) -> PlanBuilder:
    """Return the plan of SkipInit with its regularizers.

    A scalar ends each residual branch. Each residual sum gets a scalar bias, and the classifier a
    dropout before it. The biases start at 0 and stand between a block's sum and the activation
    after it. A block without that activation (pre-activation) gets none. Every convolution that has
    no bias gets one of 0 per channel, also in a network that never had norms.

    Args:
        anatomy: The recorded network.
        alpha: The first value of the scalars, as in `plan`.
        dropout: The probability that a feature is dropped. The paper has 0.2 on ImageNet, 0.6 on
            CIFAR.
    """
    builder = scale_branches(anatomy, initial(alpha, len(anatomy.blocks)), bias=True)
    add_biases(builder)
    return drop_before_classifier(builder, dropout)


def add_biases(builder: PlanBuilder) -> None:
    """Plan a bias of 0 for each convolution that would have none.

    A note names each convolution that cannot be changed.
    """
    traced = builder.traced
    for path in linear_paths(builder.anatomy):
        # `linear_paths` has the fully connected layers, too. Only convolutions get a bias here.
        linear = traced.linear(path)
        if linear.bias is not None or isinstance(linear, nn.Linear):
            continue
        # A layer that absorbs a norm, or whose output is multiplied by a factor, gets a bias when
        # the plan is carried out (`layers.folded`).
        planned = builder.linears.get(path)
        if planned is not None and (planned.reads or planned.gain != 1):
            continue

        try:
            check_linear(builder, path, traced.modules[path])
        except NotFoldable as why:
            builder.notes.append(f"{path} gets no bias: {why}")
        else:
            builder.linear(path).extra["bias"] = "add"


def linear_paths(anatomy: Anatomy) -> list[str]:
    """Return the paths of the convolutions and linear layers that forward calls, each once.

    Layers that do not take part (`only`, `skip`) are left out.
    """
    traced = anatomy.traced
    paths = [str(node.target) for node in traced.nodes if isinstance(traced.module(node), LINEAR)]
    return distinct(
        traced.modules, [path for path in dict.fromkeys(paths) if anatomy.takes_part(path)]
    )


def initial(alpha: str | float, depth: int) -> float | None:
    """Return the value that every alpha starts from, or None for `match`.

    Args:
        alpha: The option's value.
        depth: The number of residual blocks.
    """
    if alpha == "match":
        return None
    if alpha == "inv-sqrt-depth":
        return 1 / math.sqrt(max(depth, 1))
    return float(alpha)


def scale_branches(anatomy: Anatomy, value: float | None, *, bias: bool = False) -> PlanBuilder:
    """Return the plan that folds the norms and ends every residual branch with one scalar.

    The branch's last convolution is divided by the standard deviation of the branch's output.

    Args:
        anatomy: The recorded network.
        value: The first value of the scalars. None means the standard deviation of each branch's
            output, which makes up for the division, so that the function is kept.
        bias: Whether the scalars of blocks with an activation after the sum get a bias of 0. If
            not, the bias of a scalar that is replaced goes into the branch's last convolution.
    """
    check_blocks(anatomy)

    # Whether every scalar has the value that keeps the function.
    keeps_function = True

    # Learnable scalars of an earlier conversion stay if they can. These are their paths.
    modules = anatomy.traced.modules
    scaled: set[str] = set()
    for block in anatomy.included_blocks:
        if block.tail and _stays(modules[block.tail], bias):
            scaled.add(block.tail)

    builder = fold_norms(anatomy, leave=scaled)
    for block in anatomy.included_blocks:
        if block.tail is None:
            builder.refusals[block.path] = no_tail(anatomy, block)
            continue

        with_bias = bias and block.order == "post"
        if block.tail in scaled:
            present = cast(BranchScale, modules[block.tail]).alpha.item()
            keeps_function = keeps_function and value in (None, present)
            _rescale(builder, block.tail, value, with_bias)
            continue

        keeping_alpha = _divide_branch(builder, block, block.tail)
        if keeping_alpha is None:
            # The old scalar stays, so an edit that was planned at its path is dropped.
            builder.notes.append(
                f"{block.name} keeps the scalar bias: {builder.outcomes[block.tail]}"
            )
            builder.replacements.pop(block.tail, None)
            continue

        alpha = keeping_alpha if value is None else value
        keeps_function = keeps_function and alpha == keeping_alpha
        place_scale(builder, block.tail, alpha, with_bias)

    if value is not None and not keeps_function:
        builder.notes.append(
            f"alpha {value:g} does not keep the function of a trained network:"
            f" `{spelled('alpha', 'match')}` does"
        )
    return builder


def _divide_branch(builder: PlanBuilder, block: Block, tail: str) -> float | None:
    """Plan that a branch's last convolution is divided, and return the alpha that makes up for it.

    A scalar with this alpha at the end of the branch keeps the network's function.

    Args:
        builder: The plan in the making.
        block: The residual block.
        tail: The path at the end of its branch, where the new scalar is to stand.

    Returns:
        The alpha. None if a learned scalar stays at `tail` because it could not be folded. Nothing
        is divided then.
    """
    old = builder.traced.modules[tail]

    # A branch without a learned scalar is divided by the standard deviation of its output.
    if not _learns(old):
        return _normalize(builder, block)

    # Folding has planned that the layers before the old scalar absorb it. The last convolution is
    # divided by the old alpha again, which the new scalar gets. (The last gamma has learned too, so
    # it no longer gives the deviation of the branch's output.)
    if builder.removes(tail):
        alpha = old.alpha.item()
        _divide(builder, *last_linear(builder, block.branch, block.total), alpha)
        return alpha

    return None


def _learns(module: nn.Module) -> TypeGuard[BranchScale]:
    """Whether a module ends a residual branch with one number, y = alpha x, that learns."""
    return scales_branch(module) and module.learns


def _stays(module: nn.Module, bias: bool) -> bool:
    """Whether the module at the end of a branch is a learnable scalar that can stay as it is.

    Args:
        module: The module at the end of a branch.
        bias: Whether the planned scalars have biases. If they have none, the old bias must move
            into the convolution before, where it is divided by alpha. So a scalar with a bias stays
            only if its bias is 0 and need not move, or if its alpha is 0 and cannot divide.
    """
    if not _learns(module):
        return False
    if bias or module.bias is None:
        return True
    return not (module.bias.any() and module.alpha.any())


def check_blocks(anatomy: Anatomy) -> None:
    """Check that there are residual blocks to convert.

    Raises:
        RefusedError: The network has no residual blocks, or the user has left all of them out of
            the conversion (`only`, `skip`).
    """
    if not anatomy.blocks:
        # Without blocks a BatchNorm can only fold. Where there is none, nothing can be proposed.
        remedy = ""
        if any(norm.is_batchnorm and norm.called for norm in anatomy.norms):
            remedy = f"`{spelled('to', 'folded')}` needs none"
        raise RefusedError("the network has no residual blocks", remedy=remedy)
    if not anatomy.included_blocks:
        examples = ", ".join(block.path for block in anatomy.blocks[:2])
        raise RefusedError(
            "no residual block is chosen",
            "scalars sit on whole blocks",
            f"Name blocks, as {examples}",
        )


def _rescale(builder: PlanBuilder, path: str, value: float | None, bias: bool) -> None:
    """Plan a new alpha or bias for a layer y = alpha x + bias that already ends a residual branch.

    Nothing is planned if neither changes.

    Args:
        builder: The plan in the making.
        path: The path of the layer.
        value: The new alpha. None keeps the old one.
        bias: Whether the layer gets a bias.
    """
    old = cast(BranchScale, builder.traced.modules[path])
    alpha = value
    if alpha is None:
        alpha = old.alpha.item()
    # An old bias that is not 0 must stay, because the network's function depends on it.
    bias = bias or (old.bias is not None and bool(old.bias.any()))
    if alpha != old.alpha.item() or bias != (old.bias is not None):
        args: Body = {"alpha": alpha}
        if bias:
            args["bias"] = True
        builder.replacements[path] = Edit(path, "Scale", args)


def drop_before_classifier(builder: PlanBuilder, p: float) -> PlanBuilder:
    """Plan dropout with probability `p` before the classifier, and return the builder.

    If the network has a dropout before the classifier, that dropout gets the probability. If it has
    none, the classifier is wrapped in a layer that drops its input (`Dropped`).

    Raises:
        RefusedError: The network has no such dropout, and no classifier that can be wrapped.
    """
    dropout_path = builder.anatomy.dropout
    classifier = builder.anatomy.classifier
    if classifier is not None and not builder.anatomy.takes_part(classifier):
        builder.notes.append(f"no dropout: {classifier} is to stay as it is")
        return builder

    if dropout_path is not None:
        builder.replace(dropout_path, "Dropout", p=p)
    elif classifier is not None and _can_be_wrapped(builder, classifier):
        builder.replace(classifier, "Dropped", p=p)
    else:
        remedy = f"`{spelled('to', 'skipinit')}` adds none"
        raise RefusedError("no place for a dropout before the classifier", remedy=remedy)

    return builder


def _can_be_wrapped(builder: PlanBuilder, path: str) -> bool:
    """Whether a layer may be wrapped in a `Dropped`, which puts a dropout before it.

    The layer must be an `nn.Linear` that is called once. The user must allow changes of it, and the
    plan must have none yet.
    """
    module = builder.traced.modules[path]
    try:
        check_linear(builder, path, module)
    except NotFoldable:
        return False
    once = builder.traced.called(module) == 1
    return isinstance(module, nn.Linear) and once and path not in builder.linears


def drop_no_more(builder: PlanBuilder) -> PlanBuilder:
    """Plan probability 0 for the dropout before the classifier, if a conversion set it.

    A dropout that no conversion changed keeps its probability. The builder is returned.
    """
    # The paths at which earlier conversions set a dropout. A `Dropped` holds the classifier, and
    # the dropout before it as its attribute `dropout`.
    edits = builder.anatomy.provenance.plan.edits
    planned = {edit.path for edit in edits if edit.layer == Dropout.__name__}
    planned |= {f"{edit.path}.dropout" for edit in edits if edit.layer == Dropped.__name__}

    path = builder.anatomy.dropout
    if path is not None and path in planned:
        owner, _, name = path.rpartition(".")
        # The dropout is a module with a probability `p`, or a number, such as `drop_rate`.
        dropout = getattr(builder.traced.modules[owner], name)
        probability = getattr(dropout, "p", dropout)
        if probability:
            builder.replace(path, "Dropout", p=0.0)
            builder.notes.append(f"{path}: its dropout is 0 now")

    return builder


def place_scale(
    builder: PlanBuilder, path: str, alpha: float, bias: bool, layer: str = "Scale"
) -> None:
    """Plan a scalar at a path.

    The scalar stands behind the module that is at the path now. If the plan removes that module, or
    if the module does nothing, the scalar takes its place.

    Args:
        builder: The plan in the making.
        path: The path of a module.
        alpha: The first value of the scalar.
        bias: Whether the scalar has a bias.
        layer: The class of the scalar, by name.

    Raises:
        RefusedError: Two branches end at the path.
    """
    old = builder.traced.modules[path]
    is_removed = builder.removes(path)
    args: Body = {"alpha": alpha}
    if bias:
        args["bias"] = True

    # The plan already has an edit for the layer at the path: the scalar is chained behind it.
    if path in builder.linears or (path in builder.replacements and not is_removed):
        if path in builder.scalars:
            raise RefusedError(f"{path} would need two scalars", "it is the end of two branches")
        builder.scalars[path] = (Then(layer, args),)
        return

    # The old scalar is folded together with its bias, so the new scalar must not keep the bias.
    if is_removed and scales_branch(old):
        args["fresh"] = True

    # A module that does nothing is replaced. Any other module stays in front of the scalar.
    does_nothing = is_removed or keeps_forward(old, (nn.Identity, Vacant))
    builder.replacements[path] = Edit(path, layer, args, keep=not does_nothing)


def _normalize(builder: PlanBuilder, block: Block) -> float:
    """Plan that a branch's last convolution is divided by the deviation of the branch's output.

    The deviation is the standard deviation, as the norms' statistics give it.

    Returns:
        The alpha that undoes the division: the deviation. If the branch's last gamma and beta are
        0, gamma becomes 1 and alpha is 0. If the convolution cannot be divided, alpha is 1 and the
        builder gets a note.
    """
    try:
        conv, readers = last_linear(builder, block.branch, block.total)
        mean, deviation = _output_moments(builder.anatomy, block, conv)
    except NotFoldable as why:
        builder.notes.append(f"{block.name}: its last layer stays as large as it is, because {why}")
        return 1.0

    reads = builder.linear(conv).reads
    # The root mean square of the channels' deviations stands for the deviation of the output.
    rms = math.sqrt(float(deviation.square().mean()))

    # With a last gamma and beta of 0, the folded convolution would be 0, and so would alpha. Then
    # neither would get a gradient. So the convolution absorbs the norm as if gamma were 1, beta 0.
    # A branch without a norm has "" for its path here, which no entry of `reads` has.
    last_norm = (block.last or "", Absorption(AbsorbMode.AFTER))
    if rms == 0 and not mean.any() and last_norm in reads:
        builder.notes.append(
            f"{block.name}: its last gamma and beta are 0; `match` is alpha = 0; it can still learn"
        )
        reads[reads.index(last_norm)] = (last_norm[0], Absorption(AbsorbMode.AFTER_UNIT))
        return 0.0

    # An output that is constant, or has no finite deviation, gives no factor to divide by.
    if not math.isfinite(rms) or rms < 1e-12:
        builder.notes.append(
            f"{block.name}: its last layer stays as large as it is: its output does not vary"
        )
        return 1.0

    _divide(builder, conv, readers, rms)
    return rms


def _divide(builder: PlanBuilder, conv: str, readers: Iterable[str], by: float) -> None:
    """Plan that a convolution's output is divided by a factor.

    Args:
        builder: The plan in the making.
        conv: The path of the convolution.
        readers: The paths of the other layers that read its output, such as those of a gate. They
            multiply their input by the factor, so that they compute what they did.
        by: The factor.
    """
    builder.linear(conv).gain /= by
    for reader in readers:
        builder.linear(reader).in_gain *= by


def _output_moments(anatomy: Anatomy, block: Block, conv: str) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation per channel of a branch's output, before its gate.

    A BatchNorm after the branch's last convolution gives both by its beta and gamma. If a norm
    stands before the convolution instead (pre-activation), the input channels are taken for
    independent, so that their variances add up. Only the choice of alpha depends on this estimate,
    never the network's function.

    Args:
        anatomy: The recorded network.
        block: The residual block.
        conv: The path of the branch's last convolution.

    Raises:
        NotFoldable: No norm says how much the output varies.
    """
    traced = anatomy.traced
    call = traced.calls[id(traced.modules[conv])][0]

    # A norm between the convolution and the end of the branch stores the moments.
    node: fx.Node | None = block.branch
    while node is not None and node is not call:
        if moments := norm_moments(anatomy, node):
            return moments
        node = traced.main_input(node)

    # Without such a norm, the moments follow from those of the convolution's input. A weight that
    # is computed in each forward, as by weight normalization, is read as a plain one.
    mean, variance = _input_moments(anatomy, call)
    linear = traced.linear(conv)
    if reparametrized.is_reparametrized(linear):
        linear = reparametrized.plain(linear)
    weight = linear.weight.detach().double().reshape(*linear.weight.shape[:2], -1)
    hits = 1
    if isinstance(linear, nn.modules.conv._ConvTransposeNd):
        # A transposed convolution stores (I, O / groups, ...). Of its kernel as many entries hit a
        # pixel of the output, on average, as there are for each step of the stride.
        weight = weight.unflatten(0, (linear.groups, -1)).transpose(1, 2).flatten(0, 1)
        hits = math.prod(linear.stride)
    # Each filter reads the channels of its group.
    groups = getattr(linear, "groups", 1)
    of_each = len(weight) // groups
    mean, variance = (
        values.unflatten(0, (groups, -1)).repeat_interleave(of_each, 0)
        for values in (mean, variance)
    )
    return (
        (weight.sum(2) * mean).sum(1) / hits,
        ((weight.square().sum(2) * variance).sum(1) / hits).sqrt(),
    )


def _input_moments(anatomy: Anatomy, call: fx.Node) -> tuple[Tensor, Tensor]:
    """Return mean and variance per channel of a convolution's input, each (C,).

    They are known if the input is a norm's output, perhaps behind elementwise activations. They
    tell how much the convolution's output varies. `_normalize` divides the convolution by this.

    Args:
        anatomy: The recorded network.
        call: The node of the convolution.

    Raises:
        NotFoldable: Another layer, or a function, made the input.
    """
    traced = anatomy.traced
    # The activations between the norm and the convolution, the last one first.
    acts: list[nn.Module] = []

    node = traced.main_input(call)
    while node is not None:
        module = traced.module(node)
        if moments := norm_moments(anatomy, node):
            # The norm may have an activation of its own, which comes first.
            site = traced.site_at(node)
            if site is not None and site.activation is not None:
                acts.append(site.activation)
            return _through(acts[::-1], *moments)
        if module is None or len(list(nn.Module.parameters(module))):
            break
        # A layer without parameters is taken for elementwise. If it is not, such as a pooling, the
        # moments are approximate. They decide only by how much the convolution is divided.
        acts.append(module)
        node = traced.main_input(node)

    raise NotFoldable(_UNKNOWN_MOMENTS)


def _through(acts: list[nn.Module], mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of a normal input behind activations, each (C,).

    Both are integrated by Gauss-Hermite quadrature with 40 points.

    Args:
        acts: The activations, in the order of the forward pass.
        mean: The mean of each channel of the input, (C,).
        deviation: The deviation of each channel of the input, (C,).

    Raises:
        NotFoldable: One of them is no activation: it does not take one position of a map, or gives
            other channels.
    """
    points, weights = (torch.from_numpy(array).to(mean) for array in hermite_e.hermegauss(40))
    weights = weights / weights.sum()

    # The points are samples (40, C, 1, 1), so that activations per channel run on them.
    x = (mean + deviation * points[:, None])[:, :, None, None]
    with torch.no_grad():
        for act in acts:
            # A pooling does not take a single position, and a user's layer may raise anything.
            try:
                x = copy.deepcopy(act).eval().to(x)(x.clone())
            except Exception as error:
                raise NotFoldable(_UNKNOWN_MOMENTS) from error
            is_map = isinstance(x, Tensor) and x.ndim == 4 and x.numel() > 0
            if not is_map or x.shape[:2] != (len(points), len(mean)):
                raise NotFoldable(_UNKNOWN_MOMENTS)

    x = x[:, :, 0, 0]
    output_mean = weights @ x
    return output_mean, weights @ (x - output_mean).square()


def norm_moments(anatomy: Anatomy, node: fx.Node) -> tuple[Tensor, Tensor] | None:
    """Return mean and standard deviation per channel of a norm's output, before its activation.

    Args:
        anatomy: The recorded network.
        node: A node that calls the norm, or that calls what stands in place of a folded norm.

    Returns:
        Mean and deviation, (C,) each. None if neither the network nor the record of its conversions
        (`Provenance`) has statistics of such a norm.
    """
    site = anatomy.traced.site_at(node)
    if site is not None and site.has_moments:
        return site.output_moments

    # A norm that is gone stood at the node's own path, or at the path of a module around it. The
    # nearest path at which the record has a norm counts.
    paths = (str(node.target), *reversed(node.meta["inside"]))
    path = next((path for path in paths if path in anatomy.provenance.original_paths), None)
    return None if path is None else anatomy.kept_moments(path)
