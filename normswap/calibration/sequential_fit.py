"""Sequential regression: layer by layer, the converted network learns the source's values on its own inputs.

For each convolution, linear map and per-sample norm of the converted network, in topological order, the target is what
the source has at the same place, and the input what the converted network, as far as it is fitted, makes of the same
images: so later layers repair what earlier ones lost. Where the layer's output goes straight into a sum, the target is
the source's sum less the converted network's other arm, which repairs the residual stream as well. Closed form, no
gradient, no labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import DropPath
from torch import Tensor, fx, nn

from normswap.calibration.least_squares import Fit, Folds, by_group, naming, regress
from normswap.calibration.lockstep import March, Values, Walker, walkers
from normswap.calibration.sampling import fits, patches
from normswap.graph.tracing import Traced, inputs, is_add
from normswap.layers import affine, standardized
from normswap.layers.activations import RELU_FUNCTIONS
from normswap.layers.per_sample import normalized, normalizes
from normswap.layers.placeholders import Vacant
from normswap.layers.seat import Linearity
from normswap.models.modes import Progress, evaluating

PLACES = 64  # sampled per image and layer, at most
# Rows that all images together give, and for each number in a patch: that number over the rows is the share by which
# the fit's squared error exceeds the least there is.
ROWS, FAN = 2**15, 12


@torch.no_grad()
def refit(
    source: nn.Module,
    result: nn.Module,
    batches: Iterable[object],
    *,
    zero_sum: Callable[[str, nn.Module], Tensor | None] = lambda path, module: None,
    only: Callable[[str, nn.Module], bool] = lambda path, module: True,
    streams: bool = True,
    rounds: int = 2,
    mirror: bool = True,
    seed: int = 0,
    needed: int = 2,
    progress: Progress | None = None,
) -> None:
    """Fit the values of `result`, in place, to those of `source`; the modules of both go by the same paths.

    Args:
        batches: what they take (`Example.read`), such as images (N, C, H, W) or (images, labels); read once.
        zero_sum: where filters must sum to zero, the factors (I,) that the channels they read were scaled by: ridges
            count as in the units before.
        only: which layers to fit.
        streams: aim at residual sums where a layer ends in one.
        rounds: times to fit again, asking for nothing where a ReLU hides the difference.
        mirror: take every image's mirror image, too, if there are few (`lockstep.MIRRORED`).
        needed: fewer images than this are an error.
        progress: called after each layer with the layers done and their total.

    Raises:
        SourceError: unusable or too few images, or weights that make numbers whose squares overflow.
    """
    with evaluating(source, result):
        pair, examples = walkers(batches, source, result)
        stops = [stop for stop in stations(*(walker.traced for walker in pair)) if only(*stop[2:])]
        march = March(pair, examples, mirror=mirror, needed=needed)
        try:
            for done, (theirs, ours, path, module) in enumerate(stops):
                end = End.of(pair, theirs, ours, streams)
                stop = Stop(march, theirs, ours)
                with naming(path, "fitted"):
                    if normalizes(module):
                        _fit_norm(module, source.get_submodule(path), stop, end)
                    else:
                        _fit_linear(
                            module, source.get_submodule(path), stop, end, seed + done, zero_sum(path, module), rounds
                        )
                if progress is not None:
                    progress(done + 1, len(stops))
        finally:
            march.close()


@dataclass(frozen=True)
class Stop:
    """The values around one layer, batch by batch, as often as they are asked for."""

    march: March
    theirs: fx.Node
    ours: fx.Node

    def __call__(self) -> Iterator[list[Values]]:
        return self.march.stop([self.theirs, self.ours])


def stations(theirs: Traced, ours: Traced) -> list[tuple[fx.Node, fx.Node, str, nn.Module]]:
    """Every layer that can be fitted: its node in the source, in the result, its path and the module, in order."""
    calls = {str(node.target): node for node in theirs.nodes if node.op == "call_module"}
    found = []
    for node in ours.nodes:
        module = ours.module(node)
        if module is None or len(ours.calls[id(module)]) > 1 or str(node.target) not in calls:
            continue
        other = theirs.modules[str(node.target)]
        if len(theirs.calls[id(other)]) > 1:
            continue
        if affine.is_affine(other) if normalizes(module) else fits(module):
            found.append((calls[str(node.target)], node, str(node.target), module))
    return found


@dataclass(frozen=True)
class End:
    """Where a layer's output x goes: scale * x + shift, then perhaps a sum, then perhaps a ReLU, in the source's terms.

    Args:
        scale, shift: (C,) or (1,), float64.
        arms: the other arm of the sum, in the source and in the result; empty without a sum.
        relu: only what is positive there matters.
    """

    scale: Tensor
    shift: Tensor
    arms: tuple[fx.Node, ...]
    relu: bool

    @classmethod
    def of(cls, walkers: list[Walker], theirs: fx.Node, ours: fx.Node, streams: bool = True) -> End:
        """As far as both networks go the same way, and the other arm of the result is known at that time."""
        one, two = (_follow(w.traced, n) for w, n in zip(walkers, (theirs, ours), strict=True))
        if one.arms and two.arms:
            arms = (one.arms[0], two.arms[0])
            if streams and all(w.index[a] < w.index[n] for w, a, n in zip(walkers, arms, (theirs, ours), strict=True)):
                return cls(one.scale, one.shift, arms, one.relu)
            return cls(one.scale, one.shift, (), False)
        return cls(one.scale, one.shift, (), one.relu and not one.arms)

    def alive(self) -> bool:
        return not bool((self.scale.abs() < 1e-6).any())

    def target(self, held: list[Values], own: Tensor) -> tuple[Tensor, Tensor]:
        """What the result should give for the source's `own` (N, C, ...), and the offset d of scale * x + d there."""
        per = (1, -1, *(1,) * (own.ndim - 2))
        offset = self.shift.to(own).view(per).expand_as(own)
        if not self.arms:
            return own, offset
        theirs, ours = (values[arm.name] for values, arm in zip(held, self.arms, strict=True))
        return own + (theirs - ours) / self.scale.to(own).view(per), offset + ours


def _follow(traced: Traced, node: fx.Node) -> End:
    scale, shift = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    arms: tuple[fx.Node, ...] = ()
    while len(traced.users[node]) == 1:
        user = traced.users[node][0]
        module = traced.module(user)
        if is_add(user) and not arms:
            one, two = inputs(user)
            arms = (two if one is node else one,)
        elif user.target in RELU_FUNCTIONS or type(module) is nn.ReLU:
            return End(scale, shift, arms, True)
        elif module is None or len(inputs(user)) != 1:
            break
        elif affine.is_affine(module) and affine.refusal(module) is None and not arms:
            s, t = affine.read(module)
            scale, shift = scale * s, shift * s + t
        elif not isinstance(module, (nn.Identity, nn.Dropout, DropPath, Vacant)) and (arms or not normalizes(module)):
            break
        act = None if module is None else affine.activation(module) or getattr(module, "act", None)
        if act is not None and not isinstance(act, nn.Identity):
            return End(scale, shift, arms, type(act) is nn.ReLU)
        node = user
    return End(scale, shift, arms, False)


def _fit_linear(module: Any, source: Any, stop: Stop, end: End, seed: int, factors: Tensor | None, rounds: int) -> None:
    groups = getattr(module, "groups", 1)
    weight = standardized.computed(source).detach()
    units, zero_sum = torch.ones(groups, 1, 1).to(weight), None
    if factors is not None:
        units = factors.to(weight).view(groups, 1, -1).repeat_interleave(weight[0, 0].numel(), 2)
        zero_sum = 1 / units[:, 0].double()
    prior = weight.reshape(groups, weight.shape[0] // groups, -1) * units
    relaxing = rounds if end.relu and end.alive() else 0
    places = min(PLACES, -(-max(ROWS, FAN * prior.shape[2]) // stop.march.shown))
    folds, generator = Folds(), torch.Generator().manual_seed(seed)
    for i, held in enumerate(stop()):
        own = held[0][stop.theirs.name] = source(held[0][inputs(stop.theirs)[0].name])
        target, offset = end.target(held, own) if end.alive() else (own, own)
        draw, seen = generator.get_state(), held[1][inputs(stop.ours)[0].name]
        x, y = patches(module, seen, target, places, generator)
        x = x if factors is None else x / units
        folds.add(x, y)
        if relaxing:
            generator.set_state(draw)
            _, d = patches(module, seen, offset, places, generator)
            stop.march.spool(i, (x, y, d))
    fit = regress(folds, prior, zero_sum=zero_sum)
    for _ in range(relaxing):
        folds = folds.retargeted((x, _relaxed(x, y, d, end.scale, fit)) for x, y, d in stop.march.unspool())
        fit = regress(folds, prior, zero_sum=zero_sum, like=fit)
    set_weight(module, (fit.weight / units).reshape(weight.shape), fit.bias.flatten())


def _relaxed(x: Tensor, y: Tensor, offset: Tensor, scale: Tensor, fit: Fit) -> Tensor:
    """Targets (N, G, p, o) that ask for nothing where the ReLU hides it: z' = z if z > 0 else min(0, ours)."""
    groups, out, _ = fit.weight.shape
    # by group: else the weights would be copied for each image
    ours = torch.baddbmm(fit.bias.to(x)[:, None], by_group(x), fit.weight.to(x).transpose(1, 2))
    ours = ours.unflatten(1, (len(x), -1)).transpose(0, 1)
    s = scale.expand(groups * out).reshape(groups, 1, out).to(x)
    wanted = s * y + offset
    wanted = torch.where(wanted > 0, wanted, (s * ours + offset).clamp_max(0))
    return (wanted - offset) / s


@torch.no_grad()
def set_weight(module: Linearity, weight: Tensor, bias: Tensor) -> None:
    """Let the layer compute `weight` and `bias`."""
    standardized.compute(module, weight)
    if module.bias is None:
        module.bias = nn.Parameter(bias.to(module.weight))
    else:
        module.bias.copy_(bias)


@torch.no_grad()
def _fit_norm(module: Any, source: nn.Module, stop: Stop, end: End) -> None:
    """gamma and beta per channel: the least-squares affine map from the normalized input to the source's output."""
    s, t = affine.read(source)
    sums = torch.zeros(5, s.numel(), dtype=torch.float64, device=s.device)
    for values in stop():
        x = normalized(module, values[1][inputs(stop.ours)[0].name].double())
        y = values[0][inputs(stop.theirs)[0].name].double()
        per = (1, -1, *(1,) * (y.ndim - 2))
        y = s.view(per) * y + t.view(per)
        if end.arms:
            theirs, ours = (held[arm.name].double() for held, arm in zip(values, end.arms, strict=True))
            y = y + theirs - ours
        x, y = x.transpose(0, 1).flatten(1), y.transpose(0, 1).flatten(1)
        sums += torch.stack([x.sum(1), y.sum(1), x.square().sum(1), (x * y).sum(1), x.new_full(s.shape, x.shape[1])])
    x_, y_, xx, xy, n = sums
    variance = xx / n - (x_ / n).square()
    gamma = (xy / n - x_ * y_ / n.square()) / variance.clamp_min(1e-12)
    gamma = torch.where(variance > 1e-12, gamma, torch.zeros_like(gamma))
    module.weight.copy_(gamma)
    module.bias.copy_(y_ / n - gamma * x_ / n)
