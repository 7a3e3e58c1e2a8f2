"""Schemes that normalize filters: `nf`, `centered-weightnorm`, `weightnorm`, `spectralnorm`.

Convolutions become timm's `ScaledStdConv2d`, which computes exactly the filters that sum to zero.
`--mean fit` rescales channels (`zero_sum_rescaling`) and fits zero-sum filters to the source
(`sequential_fit`). `--mean keep` keeps the means as one more parameter per filter, and with them
the function.
"""

from dataclasses import replace

from timm.layers import Conv2dSame
from torch import nn
from torch.nn.modules.conv import _ConvTransposeNd

from normswap.calibration.zero_sum_rescaling import fit_zero_sum
from normswap.errors import OptionError, RefusedError, spelled
from normswap.folding.canonical_form import fold_norms
from normswap.folding.plan_builder import PlanBuilder
from normswap.folding.propagation import NotFoldable, check_linear
from normswap.graph.inspection import Anatomy
from normswap.layers import reparametrized
from normswap.schemes.nf_start import gamma_before, plan_start
from normswap.schemes.scheme import FitTask
from normswap.schemes.skipinit import linear_paths, scale_branches
from normswap.sites import own_forwards


def plan_nf(anatomy: Anatomy, *, mean: str, stem: str, depthwise: str, init: str) -> PlanBuilder:
    """Return the plan of a normalizer-free network.

    Its filters are standardized, and a scalar ends each residual branch. No norm is left.

    Args:
        anatomy: The recorded network.
        mean: What becomes of the mean of a filter. `keep` adds it as a number that learns. `fit`
            drops it and fits the filters again.
        stem: What becomes of the means in the first convolution: `keep` or `fit`.
        depthwise: What becomes of the means of depthwise filters: `keep` or `fit`.
        init: `keep` keeps the weights. `reset` starts a fresh network by the paper's formulas
            (Brock et al. 2021), without any means.

    Raises:
        OptionError: `mean` is `keep` and `init` is `reset`.
    """
    if init == "reset":
        if mean == "keep":
            raise OptionError(
                f"{spelled('mean', 'keep')} and {spelled('init', 'reset')}",
                "the paper's filters have no means",
                "Give one of them",
            )
        # `fit` drops the means. A network that is reset is not fitted afterwards.
        builder = standardize(plan_start(anatomy), mean="fit", stem="fit", depthwise="fit")
        # A convolution multiplies its filters by the gamma of the activation that it reads. Without
        # norms it also needs a bias of its own.
        for path, linear in builder.linears.items():
            if linear.layer == "StandardizedConv":
                linear.extra |= {"gamma": gamma_before(builder, path), "bias": "add"}
        return builder

    # Both fold the norms. With residual blocks, each branch also gets a scalar, whose value (None)
    # is that which keeps the function.
    builder = scale_branches(anatomy, None) if anatomy.blocks else fold_norms(anatomy)
    return standardize(builder, mean=mean, stem=stem, depthwise=depthwise)


def plan_centered_weightnorm(
    anatomy: Anatomy, *, mean: str, stem: str, depthwise: str
) -> PlanBuilder:
    """Return the plan that folds the norms and standardizes the filters of every convolution.

    The new weight is W = g (v - mean v) / |v - mean v| per filter.
    The factor g holds the filter's norm, up to the square root of its fan-in.

    Args:
        anatomy: The recorded network.
        mean: What happens to the mean of a filter. See `standardize`.
        stem: What happens to the means of the first convolution.
        depthwise: What happens to the means of depthwise filters.
    """
    return standardize(fold_norms(anatomy), mean=mean, stem=stem, depthwise=depthwise)


def standardize(builder: PlanBuilder, *, mean: str, stem: str, depthwise: str) -> PlanBuilder:
    """Plan standardized filters for every convolution except gates and the classifier.

    Args:
        builder: The plan in the making, which is changed and returned.
        mean: The treatment of a filter's mean. `keep` adds it as a number that learns. `fit` drops
            it and fits the filters again.
        stem: The treatment in the first convolution, where the means carry brightness and colour.
        depthwise: The treatment of depthwise filters. Such a filter reads a single channel. Without
            the filter's own mean, the channel's mean would be lost.
    """
    # The paths of the layers inside gates (squeeze and excitation) begin with one of these.
    anatomy = builder.anatomy
    gates = tuple(f"{block.gate}." for block in anatomy.blocks if block.gate)

    # `reasons` has a sentence for each layer that is not standardized.
    convolutions, reasons = _convolutions(anatomy)
    for position, (path, module) in enumerate(convolutions):
        if not anatomy.takes_part(path) or path.startswith(gates) or path == anatomy.classifier:
            continue

        try:
            padding = _padding(builder, path, module)
        except NotFoldable as why:
            reasons.append(f"{path} is not standardized: {why}")
            continue

        # Any of the three options may keep a filter's mean. The first convolution is the stem.
        keeps_as_stem = position == 0 and stem == "keep"
        keeps_as_depthwise = own_forwards.is_depthwise(module) and depthwise == "keep"
        keeps_mean = mean == "keep" or keeps_as_stem or keeps_as_depthwise

        linear = builder.linear(path)
        linear.layer = "StandardizedConv"
        linear.extra["mean"] = keeps_mean
        # A convolution that pads in its own forward gets the `padding` with which torch does so.
        if padding != module.padding:
            linear.extra["padding"] = list(padding)

    builder.notes += reasons
    if not any(linear.layer == "StandardizedConv" for linear in builder.linears.values()):
        left_alone = "gates, the classifier and filters of one number are left alone"
        raise RefusedError(
            "no convolution to standardize",
            "; ".join([left_alone, *reasons[:3]]),
            f"`{spelled('to', 'folded')}` needs none",
        )

    return builder


def _convolutions(
    anatomy: Anatomy,
) -> tuple[list[tuple[str, nn.modules.conv._ConvNd]], list[str]]:
    """Return the convolutions that forward calls, and why others cannot be standardized.

    Returns:
        The path and the module of each convolution, once, in the order of forward, and a sentence
        for each transposed convolution that the user has not left out (`only`, `skip`).
    """
    # A module may be called several times, or have several paths: its first call counts.
    convolutions: dict[int, tuple[str, nn.modules.conv._ConvNd]] = {}
    reasons: list[str] = []
    for node in anatomy.traced.nodes:
        module = anatomy.traced.module(node)
        if isinstance(module, own_forwards.CONVOLUTIONS):
            convolutions.setdefault(id(module), (str(node.target), module))
        elif isinstance(module, _ConvTransposeNd) and anatomy.takes_part(str(node.target)):
            reasons.append(f"{node.target} is not standardized: it is a transposed convolution")

    # A layer that is called several times has one reason.
    return list(convolutions.values()), list(dict.fromkeys(reasons))


def _padding(
    builder: PlanBuilder, path: str, conv: nn.modules.conv._ConvNd
) -> str | tuple[int, ...]:
    """Check that a convolution can be standardized, and return the padding of the new layer.

    Raises:
        NotFoldable: The convolution cannot be standardized.
    """
    check_linear(builder, path, conv)

    if reparametrized.keeps_input_bias(conv):
        raise NotFoldable("its scalar input bias cannot pass the padding")
    # A filter of one number would be 0 without its mean. The standardized layer pads with zeros.
    if conv.weight[0].numel() < 2 or conv.padding_mode != "zeros":
        raise NotFoldable("filters of one number, or padding that is not zeros")

    # timm's `Conv2dSame` pads in its own way, and has a standardized counterpart that does the
    # same. Any other convolution must pad in a way that torch's `padding` can express.
    same = issubclass(reparametrized.plain_class(conv), Conv2dSame)
    padding: str | tuple[int, ...] | None = conv.padding
    if not same:
        padding = own_forwards.even_padding(conv)
    if padding is None:
        raise NotFoldable("it pads one end more than the other")

    return padding


def plan_weightnorm(anatomy: Anatomy) -> PlanBuilder:
    """Return the plan of weight normalization: W = g v / |v| in every convolution and linear layer.

    The factor g is the norm of the filter.
    A filter of zeros keeps a direction v, and gets g = 0.
    """
    return reparametrize(anatomy, "WeightNorm")


def plan_spectralnorm(anatomy: Anatomy) -> PlanBuilder:
    """Return the plan of spectral normalization for every convolution and linear layer.

    W = alpha V / sigma(V), with sigma the largest singular value, and alpha = sigma(W).
    """
    return reparametrize(anatomy, "SpectralNorm")


def reparametrize(anatomy: Anatomy, layer: str) -> PlanBuilder:
    """Fold the network, and plan a layer in place of every convolution and linear layer.

    Args:
        anatomy: The recorded network.
        layer: The class of the new layer, by name.

    Raises:
        RefusedError: No layer's weight can be replaced.
    """
    builder = fold_norms(anatomy)
    modules = anatomy.traced.modules

    # A layer that cannot be changed stays, and its reason becomes a note.
    changed_count = 0
    reasons: list[str] = []
    for path in linear_paths(anatomy):
        try:
            check_linear(builder, path, modules[path])
            if reparametrized.keeps_input_bias(modules[path]):
                raise NotFoldable("it adds a scalar to its input")
        except NotFoldable as why:
            reasons.append(f"{path} stays as it is: {why}")
        else:
            builder.linear(path).layer = layer
            changed_count += 1

    builder.notes += reasons
    if not changed_count:
        lacking = "the network has no convolution or linear layer that could be changed"
        raise RefusedError(lacking, "; ".join(reasons[:3]))

    return builder


def fit(task: FitTask) -> None:
    """Fit the zero-sum filters to a network that keeps all means and equals the source.

    Args:
        task: The source, the result and the images.
    """
    assert task.batches is not None
    # The same step with every mean kept makes the network that the result is fitted to.
    edits = []
    for edit in task.step.edits:
        if "mean" in edit.args:
            edit = replace(edit, args={**edit.args, "mean": True})
        edits.append(edit)
    target = task.after(replace(task.step, edits=tuple(edits)))
    fit_zero_sum(
        target, task.result, task.batches, task.takes_part, seed=task.seed, progress=task.progress
    )
