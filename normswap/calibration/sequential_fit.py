"""Sequential regression: layer by layer, the converted network learns the source's values on its own inputs.

For each convolution, linear map and per-sample norm of the converted network, in topological order, the target is what
the source has at the same place, and the input what the converted network, as far as it is fitted, makes of the same
images: so later layers repair what earlier ones lost. Where the layer's output goes straight into a sum, the target is
the source's sum less the converted network's other arm, which repairs the residual stream as well. Closed form, no
gradient, no labels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import DropPath
from torch import Tensor, fx, nn

from normswap.calibration.activation_cache import Values
from normswap.calibration.least_squares import Folds, naming, regress
from normswap.calibration.lockstep import Interpreter, Lockstep, interpreters
from normswap.calibration.sampling import columns, draw, fits, patches
from normswap.calibration.share_of_fit import HeldOut, keep_share, values_of
from normswap.graph.tracing import Traced, inputs, is_add
from normswap.layers import affine, standardized
from normswap.layers.per_sample import normalized, normalizes
from normswap.layers.placeholders import Vacant
from normswap.layers.planned_layer import Linearity
from normswap.models.modes import Progress, evaluating

NEEDED = 2  # fewer images are an error
PLACES = 64  # sampled per image and layer, at most
# Rows that all images together give. The numbers in a patch over the rows are the share by which the fit's squared
# error exceeds the least there is: a wide patch needs rows, and a narrow one has enough early.
LEAST_ROWS, MOST_ROWS = 2**11, 2**15
LEAST_FOR_EACH, ENOUGH_FOR_EACH = 12, 128  # number in a patch


@torch.no_grad()
def refit(
    source: nn.Module,
    result: nn.Module,
    batches: Iterable[object],
    *,
    zero_sum: Callable[[str, nn.Module], Tensor | None] | None = None,
    only: Callable[[str, nn.Module], bool] = lambda path, module: True,
    mirror: bool = True,
    seed: int = 0,
    progress: Progress | None = None,
) -> None:
    """Fit the values of `result`, in place, to those of `source`; the modules of both go by the same paths.

    Args:
        batches: what they take (`Example.read`), such as images (N, C, H, W) or (images, labels); read once. Where
            they hold some out (`HeldOut`), as much of the fit is kept as those say (`keep_share`).
        zero_sum: where filters must sum to zero, the factors (I,) that the channels they read were scaled by: ridges
            count as in the units before. Without a fit such filters are of no use: all of it is kept.
        only: which layers to fit.
        mirror: take every image's mirror image, too, if there are few (`lockstep.MIRRORED`).
        progress: called after each layer with the layers done and their total.

    Raises:
        SourceError: unusable or too few images, or weights that make numbers whose squares overflow.
    """
    dealt = batches if zero_sum is None and isinstance(batches, HeldOut) else None
    before = {} if dealt is None else values_of(result)
    with evaluating(source, result):
        pair, examples = interpreters(batches, source, result)
        layers = [layer for layer in fittable_layers(*(interpreter.traced for interpreter in pair)) if only(*layer[2:])]
        lockstep = Lockstep(pair, examples, mirror=mirror, needed=NEEDED)
        try:
            for done, (theirs, ours, path, module) in enumerate(layers):
                end = End.of(pair, theirs, ours)
                layer = LayerValues(lockstep, theirs, ours)
                with naming(path, "fitted"):
                    if normalizes(module):
                        _fit_norm(module, source.get_submodule(path), layer, end, seed + done)
                    else:
                        factors = None if zero_sum is None else zero_sum(path, module)
                        _fit_linear(module, source.get_submodule(path), layer, end, seed + done, factors)
                if progress is not None:
                    progress(done + 1, len(layers))
        finally:
            lockstep.close()
    if dealt is not None:
        keep_share(source, result, before, dealt.held)


@dataclass(frozen=True)
class LayerValues:
    """The values around one layer, batch by batch, as often as they are asked for."""

    lockstep: Lockstep
    theirs: fx.Node
    ours: fx.Node

    def __call__(self) -> Iterator[list[Values]]:
        return self.lockstep.run_to([self.theirs, self.ours])


def fittable_layers(theirs: Traced, ours: Traced) -> list[tuple[fx.Node, fx.Node, str, nn.Module]]:
    """Every layer that can be fitted: its node in the source, in the result, its path and the module, in order.

    Those behind a detector's choice of boxes are left: each network chooses its own, and their rows are not alike.
    """
    chosen = behind_choice(theirs)
    calls = {str(node.target): node for node in theirs.nodes if node.op == "call_module"}
    layers = []
    for node in ours.nodes:
        module = ours.module(node)
        if module is None or len(ours.calls[id(module)]) > 1 or str(node.target) not in calls:
            continue
        other = theirs.modules[str(node.target)]
        if len(theirs.calls[id(other)]) > 1:
            continue
        if calls[str(node.target)] in chosen:
            continue
        if affine.is_affine(other) if normalizes(module) else fits(module):
            layers.append((calls[str(node.target)], node, str(node.target), module))
    return layers


def behind_choice(record: Traced) -> set[fx.Node]:
    """The nodes whose rows are of boxes that non-maximum suppression kept, so that values decide what they are."""
    chosen: set[fx.Node] = set()
    for node in record.nodes:
        if str(node.target).rpartition(".")[2] == "nms" or not chosen.isdisjoint(inputs(node)):
            chosen.add(node)
    return chosen


@dataclass(frozen=True)
class End:
    """Where a layer's output x goes: scale * x and a shift, then perhaps a sum, in the source's terms.

    Args:
        scale: (C,) or (1,), float64.
        arms: the other arm of the sum, in the source and in the result; empty without a sum.
    """

    scale: Tensor
    arms: tuple[fx.Node, ...]

    @classmethod
    def of(cls, interpreters: list[Interpreter], theirs: fx.Node, ours: fx.Node) -> End:
        """As far as both networks go the same way, and the other arm of the result is known at that time."""
        nodes = (theirs, ours)
        ends = [_follow(each.traced, node) for each, node in zip(interpreters, nodes, strict=True)]
        arms = tuple(arm for end in ends for arm in end.arms)
        if len(arms) < 2 or any(
            each.index[arm] >= each.index[node] for each, arm, node in zip(interpreters, arms, nodes, strict=True)
        ):
            arms = ()
        return cls(ends[0].scale, arms)

    @functools.cached_property
    def alive(self) -> bool:
        """Whether the layer's output says something of what comes of it; read from the device once."""
        return not bool((self.scale.abs() < 1e-6).any())

    def target(self, held: list[Values], source_value: Tensor) -> Tensor:
        """The target for a source value `source_value` (N, C, ...): what the result's other arm lacks is added."""
        if not self.arms:
            return source_value
        theirs, ours = (values[arm.name] for values, arm in zip(held, self.arms, strict=True))
        scale: Tensor = self.scale.to(source_value).view(-1, *(1,) * (source_value.ndim - 2))
        lacking: Tensor = (theirs - ours) / scale
        return source_value + lacking


def _follow(traced: Traced, node: fx.Node) -> End:
    scale = torch.ones(1, dtype=torch.float64)
    arms: tuple[fx.Node, ...] = ()
    while len(traced.users[node]) == 1:
        user = traced.users[node][0]
        module = traced.module(user)
        if is_add(user) and not arms:
            one, two = inputs(user)
            arms = (two if one is node else one,)
        elif module is None or len(inputs(user)) != 1:
            break
        elif affine.is_affine(module) and affine.refusal(module) is None and not arms:
            factor, _ = affine.read(module)
            scale = scale.to(factor) * factor
        elif not isinstance(module, (nn.Identity, nn.Dropout, DropPath, Vacant)) and (arms or not normalizes(module)):
            break
        act = None if module is None else affine.activation(module) or getattr(module, "act", None)
        if act is not None and not isinstance(act, nn.Identity):
            break
        node = user
    return End(scale, arms)


def _fit_linear(module: Any, source: Any, layer: LayerValues, end: End, seed: int, factors: Tensor | None) -> None:
    groups = getattr(module, "groups", 1)
    weight = standardized.computed(source).detach()
    units, zero_sum = torch.ones(groups, 1, 1).to(weight), None
    if factors is not None:
        units = factors.to(weight).view(groups, 1, -1).repeat_interleave(weight[0, 0].numel(), 2)
        zero_sum = 1 / units[:, 0].double()
    prior = weight.reshape(groups, weight.shape[0] // groups, -1) * units
    places = min(PLACES, -(-rows_wanted(prior.shape[2]) // layer.lockstep.shown))
    folds, generator = Folds(biased=module.bias is not None), torch.Generator().manual_seed(seed)
    for held in layer():
        source_value = held[0][layer.theirs.name] = source(held[0][inputs(layer.theirs)[0].name])
        target = end.target(held, source_value) if end.alive else source_value
        seen = held[1][inputs(layer.ours)[0].name]
        x, y = patches(module, seen, target, places, generator)
        x = x if factors is None else x / units
        folds.add(x, y)
    fit = regress(folds, prior, zero_sum=zero_sum)
    set_weight(module, (fit.weight / units).reshape(weight.shape), fit.bias.flatten())


def rows_wanted(fan: int) -> int:
    """How many rows of all images together a layer is fitted to, by the numbers in its patch."""
    plenty = max(LEAST_ROWS, ENOUGH_FOR_EACH * fan)
    return max(LEAST_FOR_EACH * fan, min(MOST_ROWS, plenty))


@torch.no_grad()
def set_weight(module: Linearity, weight: Tensor, bias: Tensor) -> None:
    """Let the layer compute `weight`, and `bias` if it has one: a plan says which tensors there are."""
    standardized.compute(module, weight)
    if module.bias is not None:
        module.bias.copy_(bias)


@torch.no_grad()
def _fit_norm(module: Any, source: nn.Module, layer: LayerValues, end: End, seed: int) -> None:
    """gamma and beta per channel: the least-squares affine map from the normalized input to the source's output."""
    s, t = affine.read(source)
    generator = torch.Generator().manual_seed(seed)
    sums = torch.zeros(5, s.numel(), dtype=torch.float64, device=s.device)
    for values in layer():
        before, after = values[0][inputs(layer.theirs)[0].name], values[1][inputs(layer.ours)[0].name]
        places = draw(math.prod(after.shape[2:]), PLACES, generator).to(after.device)
        x = columns(normalized(module, after.to(torch.promote_types(after.dtype, torch.float32))), places)
        y = s[:, None] * columns(before, places) + t[:, None]
        if end.arms:
            theirs, ours = (columns(held[arm.name], places) for held, arm in zip(values, end.arms, strict=True))
            y = y + theirs - ours
        sums += torch.stack([x.sum(1), y.sum(1), x.square().sum(1), (x * y).sum(1), x.new_full(s.shape, x.shape[1])])
    x_, y_, xx, xy, n = sums
    variance = xx / n - (x_ / n).square()
    gamma = (xy / n - x_ * y_ / n.square()) / variance.clamp_min(1e-12)
    gamma = torch.where(variance > 1e-12, gamma, torch.zeros_like(gamma))
    module.weight.copy_(gamma)
    module.bias.copy_(y_ / n - gamma * x_ / n)
