"""Sequential regression: each layer of the result is fitted to the source, on its own inputs.

Convolutions, linear maps and per-sample norms are fitted in topological order. The target is the
output of the same layer in the source. The input is the layer's input in the result, in which the
layers before it are fitted already. If a layer's output goes straight into a sum, the target is the
source's sum less the other term of the result's sum. The layer then corrects errors of the residual
stream. Every fit has a closed form, without gradients or labels.

A fit to few images may err more on others, and least squares shrinks every layer towards the mean.
So only a share of the fit is kept: the share with which the outputs on held-out images are nearest
to the source's. The share 0 keeps the weights before the fit, the share 1 the fitted weights.
Between 0 and 1 tensors are interpolated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from timm.layers import DropPath
from torch import Tensor, fx, nn
from torch.nn import functional as F

from normswap import copying
from normswap.calibration.channel_moments import ChannelLine
from normswap.calibration.least_squares import Folds, regress
from normswap.calibration.lockstep import Interpreter, Lockstep, Values
from normswap.calibration.sampling import columns, draw, fits, patches
from normswap.errors import SourceError
from normswap.graph.tracing import Traced, inputs, is_add
from normswap.layers import standardized
from normswap.layers.per_sample import normalized, normalizes
from normswap.layers.placeholders import Vacant
from normswap.layers.site_norm import SiteNorm
from normswap.models.calling import Example, named_tensors
from normswap.models.modes import Progress, evaluating, undisturbed
from normswap.sites.site import Site, site_of

# A row is the patch of a layer's input at one position, with f numbers. Rows are taken from at most
# so many positions of an image.
PLACES = 64
# The bounds of the number of rows from all images together. A fit to n rows of f numbers has about
# f / n more squared error than the best weights, so wide patches need more rows.
LEAST_ROWS = 2**11
MOST_ROWS = 2**15
# The least rows for each number in a patch, and the most that are worth their time.
LEAST_FOR_EACH = 12
ENOUGH_FOR_EACH = 128
# Mirror images of so many images, from the first on, are added. They help most if there are few.
MIRRORED = 100
# The shares of a fit that are tried. Of equally good ones the first is kept.
SHARES = (1.0, 0.5, 0.25, 0.0)


@runtime_checkable
class HeldOut(Protocol):
    """Batches that values are fitted to, and that keep some images back.

    `held` has calls with the images that are kept back, to judge the fit by. It is complete when
    the batches have been read to the end.
    """

    held: list[Example]


@torch.no_grad()
def refit(
    source: nn.Module,
    result: nn.Module,
    batches: Iterable[object],
    *,
    zero_sum: Callable[[str, nn.Module], Tensor | None] | None = None,
    only: Callable[[str], bool] = lambda path: True,
    mirrored: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> None:
    """Fit the layers of `result`, in place, to the layers of `source` at the same paths.

    Args:
        source: The network whose outputs are the targets.
        result: The network that is fitted.
        batches: Images as both networks take them. See `checked`. If some images are held out
            (`HeldOut`), the held-out images decide how much of the fit is kept (`keep_share`).
        zero_sum: A function of the path and the module of a layer. If the layer's filters must sum
            to zero, it returns the factors (I,) by which the input channels were scaled, else None.
            The ridge applies to the weights before that scaling. Zero-sum filters are useless
            without the fit, so the whole fit is kept.
        only: Whether the layer at a path may be fitted.
        mirrored: The number of images, from the first on, whose mirror images are added. The
            default is `MIRRORED`.
        seed: Decides the positions that rows are taken from.
        progress: Called with the number of layers that are done, and the number of all layers.

    Raises:
        SourceError: The images are unusable or too few, or their values overflow when squared.
    """
    # The tensors before the fit are needed only if less than the whole fit may be kept.
    before = values_of(result) if zero_sum is None and isinstance(batches, HeldOut) else {}
    with undisturbed(source), evaluating(result):
        lockstep = Lockstep(
            [source, result], batches, mirrored=MIRRORED if mirrored is None else mirrored
        )
        interpreters = lockstep.interpreters
        their_interpreter, our_interpreter = interpreters
        layers = [
            (theirs, ours, path, module)
            for theirs, ours, path, module in fittable_layers(
                their_interpreter.traced, our_interpreter.traced
            )
            if only(path)
        ]

        for number, (theirs, ours, path, module) in enumerate(layers):
            pair = LayerPair(
                lockstep, theirs, ours, Destination.of(interpreters, theirs, ours), seed + number
            )
            try:
                # The layer is a BatchNorm in place of a norm with statistics per sample, or a norm
                # with statistics per sample, or a convolution or linear map.
                if estimates(module, source.get_submodule(path)):
                    _estimate_norm(module, source.get_submodule(path), pair)
                elif normalizes(module):
                    _fit_norm(module, source.get_submodule(path), pair)
                else:
                    factors = None if zero_sum is None else zero_sum(path, module)
                    _fit_linear(module, source.get_submodule(path), pair, factors)
            except torch.linalg.LinAlgError as error:
                why = f"{error}: on these images its input overflows when squared"
                remedy = (
                    "Check that these are the network's trained weights, and images prepared for it"
                )
                raise SourceError(f"{path} cannot be fitted", why, remedy) from None

            if progress is not None:
                progress(number + 1, len(layers))

    if before and isinstance(batches, HeldOut):
        keep_share(source, result, before, batches.held)


def fittable_layers(theirs: Traced, ours: Traced) -> list[tuple[fx.Node, fx.Node, str, nn.Module]]:
    """Return every layer that can be fitted, in the order of the result's forward.

    Layers behind a detector's choice of boxes (non-maximum suppression) are left out: each network
    chooses its own boxes, so row i of their inputs may be about different boxes.

    Args:
        theirs: The recorded forward of the source.
        ours: The recorded forward of the result.

    Returns:
        For each layer its node in the source, its node in the result, its path and the module.
    """
    boxes = after_suppression(theirs)
    # The source's node that calls each module, by the module's path.
    calls = {str(node.target): node for node in theirs.nodes if node.op == "call_module"}

    layers = []
    for node in ours.nodes:
        module = ours.module(node)
        path = str(node.target)
        if module is None or path not in calls or calls[path] in boxes:
            continue

        source_module = theirs.modules[path]
        our_calls = ours.calls[id(module)]
        their_calls = theirs.calls[id(source_module)]
        is_called_once = len(our_calls) == len(their_calls) == 1
        # A BatchNorm is fitted if the source's layer is a norm with statistics per sample, and
        # another norm if the source's layer is s x + t in eval mode. Of all other layers those are
        # fitted whose patches can be read.
        if isinstance(module, SiteNorm) or estimates(module, source_module):
            can_be_fitted = site_of(source_module).averages
        elif normalizes(module):
            can_be_fitted = is_called_once and site_of(source_module).is_affine
        else:
            can_be_fitted = is_called_once and fits(module)

        if can_be_fitted:
            layers.append((calls[path], node, path, module))

    return layers


def estimates(module: nn.Module, source: nn.Module) -> bool:
    """Whether a layer is a BatchNorm in the place of a norm with statistics per sample."""
    return site_of(module).is_batchnorm and site_of(source).averages


def after_suppression(record: Traced) -> set[fx.Node]:
    """Return the nodes that compute with the boxes that non-maximum suppression kept.

    Scores decide which boxes are kept, and in which order. So row i of two networks may hold two
    different boxes, and these rows cannot be compared.
    """
    boxes: set[fx.Node] = set()
    for node in record.nodes:
        if str(node.target).rpartition(".")[2] == "nms" or not boxes.isdisjoint(inputs(node)):
            boxes.add(node)
    return boxes


@dataclass(frozen=True)
class Destination:
    """Where a layer's output x goes: into scale * x plus a shift, and then perhaps into a sum.

    Args:
        affine_maps: The affine maps that the output passes.
        other_terms: The nodes of the sum's other term. In a destination that was followed in
            both networks they are the node in the source and the node in the result. Empty if the
            output goes into no sum.
    """

    affine_maps: tuple[Site, ...]
    other_terms: tuple[fx.Node, ...]

    @classmethod
    def of(cls, interpreters: list[Interpreter], theirs: fx.Node, ours: fx.Node) -> Destination:
        """Return where a layer's output goes, followed in both networks.

        The other terms are given only if the output goes into a sum in both networks, and if each
        other term is computed before the layer, so that its value is known when the layer is
        fitted.

        Args:
            interpreters: The recorded source and result.
            theirs: The layer's node in the source.
            ours: The layer's node in the result.
        """
        source, result = interpreters
        source_destination = _follow(source.traced, theirs)
        result_destination = _follow(result.traced, ours)

        # A network in which the output goes into a sum gives one term, any other gives none.
        other_terms = source_destination.other_terms + result_destination.other_terms
        both_are_sums = len(other_terms) == 2
        if not both_are_sums:
            return cls(source_destination.affine_maps, ())

        their_term, our_term = other_terms
        are_known = (
            source.index[their_term] < source.index[theirs]
            and result.index[our_term] < result.index[ours]
        )
        # The target is made from the source's output, so the source's scale counts.
        return cls(source_destination.affine_maps, other_terms if are_known else ())

    @functools.cached_property
    def scale(self) -> Tensor:
        """The factor of each channel, (C,) or (1,), in float64."""
        scale = torch.ones(1, dtype=torch.float64)
        for site in self.affine_maps:
            factor, _ = site.scale_and_shift
            scale = scale.to(factor) * factor
        return scale

    @functools.cached_property
    def is_divisible(self) -> bool:
        """Whether no channel's scale is 0, so that a target can be divided by it.

        It is cached, because reading an answer from a GPU waits for the GPU.
        """
        return not bool((self.scale.abs() < 1e-6).any())

    def target(self, theirs: Values, ours: Values, source_value: Tensor) -> Tensor:
        """Return the target of the layer in the result, (N, C, ...).

        If the output goes into a sum, the sum of the result should be that of the source. So the
        target is the source's output, plus the source's other term less the result's other term,
        divided by the scale between layer and sum.

        Args:
            theirs: The values of the source, by the name of the node.
            ours: The values of the result, by the name of the node.
            source_value: The layer's output in the source, (N, C, ...).
        """
        if not self.other_terms or not self.is_divisible:
            return source_value
        their_term, our_term = self.other_terms
        scale = self.scale.to(source_value).view(-1, *(1,) * (source_value.ndim - 2))
        target: Tensor = source_value + (theirs[their_term.name] - ours[our_term.name]) / scale
        return target


def _follow(traced: Traced, node: fx.Node) -> Destination:
    """Return where a layer's output goes in one network.

    The output is followed through affine maps, per-sample norms and modules that do nothing in eval
    mode, up to a sum if there is one. Behind the sum it is followed only through modules that do
    nothing in eval mode. It is never followed through an activation.

    Args:
        traced: The recorded network.
        node: The layer's node.
    """
    affine_maps: list[Site] = []
    # The other terms of the sum that the output goes into. Empty before the sum.
    other_terms: tuple[fx.Node, ...] = ()

    # An output that several nodes read has no single destination.
    while len(traced.users[node]) == 1:
        reader = traced.users[node][0]
        module = traced.module(reader)
        site = traced.site_at(reader)
        is_before_sum = not other_terms

        if is_add(reader) and is_before_sum:
            other_terms = tuple(term for term in inputs(reader) if term is not node)
        elif site is None or len(inputs(reader)) != 1:
            # The reader is no module, or has other inputs, too.
            break
        elif is_before_sum and site.is_affine and site.refusal_of_kind is None:
            # The reader computes s x + t for each channel.
            affine_maps.append(site)
        else:
            does_nothing = isinstance(module, (nn.Identity, nn.Dropout, DropPath, Vacant))
            is_passed_norm = is_before_sum and normalizes(module)
            if not (does_nothing or is_passed_norm):
                break

        # A norm may have an activation of its own, as timm's have. Behind it nothing is followed.
        activation = None if site is None else site.activation or getattr(module, "act", None)
        if activation is not None and not isinstance(activation, nn.Identity):
            break

        node = reader

    return Destination(tuple(affine_maps), other_terms)


@dataclass(frozen=True)
class LayerPair:
    """A layer to fit: the same layer in the source and in the result.

    Args:
        lockstep: The source and the result, which run together.
        theirs: The layer's node in the source.
        ours: The layer's node in the result.
        destination: Where the layer's output goes: through a scale, and perhaps into a sum. The
            target of the fit depends on it.
        seed: The seed of the random positions at which inputs and targets are taken.
    """

    lockstep: Lockstep
    theirs: fx.Node
    ours: fx.Node
    destination: Destination
    seed: int

    def batches(self) -> Iterator[tuple[Values, Values, Tensor, Tensor]]:
        """Yield, for each batch, both networks' values up to the layer, and the layer's inputs.

        They are the values of the source and of the result, by the name of the node, then the
        layer's input in the source and its input in the result.
        """
        their_input = inputs(self.theirs)[0].name
        our_input = inputs(self.ours)[0].name
        for theirs, ours in self.lockstep.run_to([self.theirs, self.ours]):
            yield theirs, ours, theirs[their_input], ours[our_input]


def _fit_linear(module: Any, source: Any, pair: LayerPair, factors: Tensor | None) -> None:
    """Set weight and bias of a convolution or linear map by ridge regression.

    Args:
        module: The layer of the result, which is set in place.
        source: The same layer of the source.
        pair: The nodes of both, and the values that reach them.
        factors: The factors (I,) of the input channels, if filters must sum to zero.
    """
    # A linear map has one group.
    groups = getattr(module, "groups", 1)
    weight = standardized.effective_weight(source).detach()

    # With factors, v = units * w is fitted to x / units, which has the same products. That the
    # filters w sum to zero is then a condition on v: its sum with weights 1 / units is zero.
    units = torch.ones(groups, 1, 1).to(weight)
    zero_sum = None
    # Each input channel has a column for each kernel position, and all of them get its factor.
    if factors is not None:
        units = factors.to(weight).view(groups, 1, -1).repeat_interleave(weight[0, 0].numel(), 2)
        zero_sum = 1 / units[:, 0].double()

    # The ridge pulls towards the source's weights.
    prior = weight.reshape(groups, weight.shape[0] // groups, -1) * units
    # The division is rounded up, so that all images together give the rows that are needed.
    places_per_sample = min(PLACES, -(-rows_needed(prior.shape[2]) // pair.lockstep.rows))
    folds = Folds(biased=module.bias is not None)

    generator = torch.Generator().manual_seed(pair.seed)
    for theirs, ours, their_input, our_input in pair.batches():
        source_value = source(their_input)
        # The run to the next layer may go on from this value instead of computing it again.
        theirs[pair.theirs.name] = source_value
        target = pair.destination.target(theirs, ours, source_value)
        x, y = patches(module, our_input, target, places_per_sample, generator)
        folds.add(x if factors is None else x / units, y)

    fit = regress(folds, prior, zero_sum=zero_sum)
    standardized.set_effective_weight(module, (fit.weight / units).reshape(weight.shape))
    if module.bias is not None:
        module.bias.copy_(fit.bias.flatten())


def rows_needed(fan: int) -> int:
    """Return how many rows of inputs and targets are enough to fit a layer.

    Args:
        fan: The number of inputs in a row: the numbers under the kernel in one group.
    """
    plenty = max(LEAST_ROWS, ENOUGH_FOR_EACH * fan)
    return max(LEAST_FOR_EACH * fan, min(MOST_ROWS, plenty))


def _fit_norm(module: Any, source: nn.Module, pair: LayerPair) -> None:
    """Set gamma and beta of a norm, per channel, by a least-squares line.

    The line maps the normalized input in the result to the output of the source's layer.

    Args:
        module: The norm of the result.
        source: The layer at the same path of the source.
        pair: The nodes of both, and the values that reach them.
    """
    # The source's layer computes s x + t.
    s, t = site_of(source).scale_and_shift
    generator = torch.Generator().manual_seed(pair.seed)

    line = ChannelLine(len(s), s.device)
    for theirs, ours, their_input, our_input in pair.batches():
        positions = draw(math.prod(our_input.shape[2:]), PLACES, generator).to(our_input.device)
        # Inputs in half precision are normalized in float32.
        precision = torch.promote_types(our_input.dtype, torch.float32)
        x = columns(normalized(module, our_input.to(precision)), positions)
        y = torch.addcmul(t[:, None], s[:, None], columns(their_input, positions))
        # If a sum follows, its other term differs between the networks. The difference is added to
        # the norm's target, divided by the scale that stands between norm and sum.
        destination = pair.destination
        if destination.other_terms and destination.is_divisible:
            their_term, our_term = destination.other_terms
            their_values = columns(theirs[their_term.name], positions)
            difference = their_values - columns(ours[our_term.name], positions)
            y = torch.addcdiv(y, difference, destination.scale.to(y)[:, None])
        line.add(x, y)

    gamma, beta = line.fitted()
    module.weight.copy_(gamma)
    module.bias.copy_(beta)


def _estimate_norm(module: Any, source: nn.Module, pair: LayerPair) -> None:
    """Set a BatchNorm, in place, to the map that the source's per-sample norm computes on average.

    The running statistics are those of the BatchNorm's input. Gamma and beta come from a
    least-squares line, from that input to the output of the source's norm.

    Args:
        module: The BatchNorm of the result.
        source: The norm of the source, with statistics per sample.
        pair: The nodes of both, and the values that reach them.
    """
    # The line is fitted to the norm's map, so an activation or dropout in its class is taken out.
    plain = copying.duplicate(source, {}).eval()
    for name in ("act", "drop"):
        if isinstance(getattr(plain, name, None), nn.Module):
            setattr(plain, name, nn.Identity())

    line = ChannelLine(module.num_features, module.weight.device)
    for _, _, their_input, our_input in pair.batches():
        # The line maps the BatchNorm's input to the output of the source's norm. Both are arranged
        # as (C, values).
        rows = (our_input, plain(their_input.clone()))
        line.add(*(value.double().transpose(0, 1).flatten(1) for value in rows))

    # gamma (x - mean) / sqrt(var + eps) + beta is the line: slope x + offset.
    mean, variance = line.moments()
    slope, offset = line.fitted()
    module.running_mean.copy_(mean)
    # A BatchNorm stores the unbiased variance.
    module.running_var.copy_(variance * line.count / max(line.count - 1, 1))
    module.weight.copy_(slope * (module.running_var.double() + module.eps).sqrt())
    module.bias.copy_(offset + slope * mean)


def values_of(model: nn.Module) -> Values:
    """Return copies of all parameters and buffers of a network, by name."""
    return {name: tensor.detach().clone() for name, tensor in copying.tensors(model).items()}


@torch.no_grad()
def keep_share(
    source: nn.Module, result: nn.Module, before: Values, held: Sequence[Example]
) -> float:
    """Keep the share of a fit that brings outputs on held-out images nearest to the source's.

    Args:
        source: The network whose outputs are right.
        result: The fitted network, which is set in place.
        before: The result's tensors before the fit, by name.
        held: Calls with images that nothing was fitted to.

    Returns:
        The share that was kept. It is 1 if no images are held out.
    """
    if not held:
        return 1.0

    fitted = values_of(result)
    losses: dict[float, float] = {}
    with undisturbed(source), evaluating(result):
        # The source's outputs for each held-out call. Each share of the fit is compared with them.
        # `like` gives a call the network's device and dtype.
        answers = [
            dict(named_tensors(example.like(source).call_on_copies(source))) for example in held
        ]
        for share in SHARES:
            _set(result, before, fitted, share)
            losses[share] = sum(
                _loss(answer, result, each) for answer, each in zip(answers, held, strict=True)
            )

    best = min(SHARES, key=losses.__getitem__)
    _set(result, before, fitted, best)
    return best


def _set(model: nn.Module, before: Values, fitted: Values, share: float) -> None:
    """Set the tensors of a network, in place, to a share of a fit.

    Args:
        model: The network.
        before: Its tensors without the fit, by name.
        fitted: Its fitted tensors, by name.
        share: The share of the fit: 0 gives the tensors before the fit, 1 the fitted ones. Tensors
            of integers cannot be interpolated, and are the fitted ones for every share but 0.
    """
    tensors = copying.tensors(model)
    values = dict(fitted if share else before)
    if share not in (0, 1):
        # All floating-point numbers of the network are interpolated as one vector.
        floats = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
        old = torch.cat([before[name].flatten() for name in floats])
        new = torch.cat([fitted[name].flatten() for name in floats])
        # Interpolating between equal infinities gives NaN, so equal values are kept.
        mixed = torch.where(old == new, old, torch.lerp(old, new, share))
        parts = mixed.split([before[name].numel() for name in floats])
        values |= {
            name: part.view_as(before[name]) for name, part in zip(floats, parts, strict=True)
        }

    torch._foreach_copy_(list(tensors.values()), [values[name] for name in tensors])


def _loss(expected: Values, result: nn.Module, example: Example) -> float:
    """Return how far a network's outputs for a call are from the expected ones.

    The loss is the sum of `divergence` over the floating-point outputs. It is infinite if outputs
    have other names or shapes, or are not finite.

    Args:
        expected: The source's outputs, by name.
        result: The network that is compared.
        example: The call.
    """
    # `like` gives the call the network's device and dtype.
    answers = dict(named_tensors(example.like(result).call_on_copies(result)))
    if answers.keys() != expected.keys() or any(
        answers[name].shape != expected[name].shape for name in expected
    ):
        return float("inf")
    floats = [name for name, value in expected.items() if value.is_floating_point()]
    total = sum(float(divergence(expected[name], answers[name])) for name in floats)
    # NaN is not less than anything, so it becomes infinite too.
    return total if total < float("inf") else float("inf")


def divergence(expected: Tensor, answers: Tensor) -> Tensor:
    """Return how far an output is from the expected one, as a float64 scalar.

    Logits (N, K) of several classes give the sum over rows of the Kullback-Leibler divergence
    KL(expected || answers). Other shapes give the sum of squared differences.
    """
    expected = expected.double()
    answers = answers.double()
    if expected.ndim == 2 and expected.shape[1] > 1:
        return F.kl_div(
            answers.log_softmax(1), expected.log_softmax(1), reduction="sum", log_target=True
        )
    return (expected - answers).square().sum()
