"""The sign and scale of each channel before a norm with statistics per sample, chosen so that these cost least.

Such a norm subtracts each sample's group mean and divides by its group deviation. A large eps makes the divisor nearly
constant. The means stay: channels that rise together cancel in the group's mean where their signs differ. Sign and
scale of a channel are free before the norm, as gamma and beta behind it make up for them. An error in a channel costs
as much as gamma makes of it. Where channels are independent and a_c is what one deviation of channel c does to the
output, scales that give it the deviation sqrt(a_c) cost least: sum(phi^2) sum(a^2 / phi^2) has phi^4 = a^2 at its
minimum. From there, with the signs of `least_sum`, `NormInputs.loss` is brought down by gradient descent.

What is needed is how the channels' means go together from image to image. Images of dead leaves show that well enough
(`channel_values`), each channel scaled to its running variance. With 100 photographs instead nothing measurable was
gained (`tests/lab/ablation.md`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from normswap.calibration.channel_values import joined, watched_on_leaves, watching_moments
from normswap.calibration.fit_task import FitTask
from normswap.layers import affine
from normswap.layers.per_sample import before, group_moments, last, move, moved

# Random signs that the search for the best starts from.
STARTS = 8
# Steps and learning rate of the descent, and how far a scale's logarithm may go from where it started.
STEPS, RATE, FARTHEST = 24, 0.12, 1.5
# The share of what the channels' means have in common that is taken for chance.
CHANCE = 0.2
# The least that a channel's cost, and its variance, is taken for, in units of its group's mean.
LEAST_COST, LEAST_VARIANCE = 0.03, 1e-4

Numbers = npt.NDArray[np.float64]


@torch.no_grad()
def choose_rescaling(task: FitTask) -> None:
    """Give source and result, in place, the best rescaling before each norm; the source computes the same.

    Args:
        task: its source has its BatchNorms, and the rescaling of the step (`groupnorm.fitting_target`).
    """
    source, result, step = task.source, task.result, task.step
    holders = {edit.reads[0]: edit.path for edit in step.edits if edit.layer == "Steadied"}
    free = {edit.path: edit.args for edit in step.edits if edit.layer == "GroupNorm" and "eps" in edit.args}
    norms = {path: last(source.get_submodule(path)) for path in free}
    if not norms:
        return
    moments = joined(watched_on_leaves(source, task.example, norms, watching_moments))
    inputs = {
        path: NormInputs.of(*pair, norms[path], free[path]["groups"], free[path]["eps"])
        for path, pair in moments.items()
    }
    for path, scale in _scales(inputs).items():
        norm = norms[path]
        scale = scale.to(norm.weight.device)
        shift = -scale * norm.running_mean.double()
        for network in (source, result):
            move(before(network, path, holders), scale, shift)
        moved(norm, scale, shift)
        _match(last(result.get_submodule(path)), norm, free[path]["groups"])


def _scales(inputs: dict[str, NormInputs]) -> dict[str, Tensor]:
    """The signed scales (C,) of each norm; norms of one shape go through one descent, with fewer calls of torch."""
    alike: dict[torch.Size, dict[str, NormInputs]] = {}
    for path, one in inputs.items():
        alike.setdefault(one.means.shape[1:], {})[path] = one
    scales: dict[str, Tensor] = {}
    for some in alike.values():
        channels = [one.var.numel() for one in some.values()]
        parts = NormInputs.joined(some.values()).least_costly().split(channels)
        scales |= dict(zip(some, parts, strict=True))
    return {path: scales[path] for path in inputs}


def _match(norm: Any, like: Any, groups: int) -> None:
    """Gamma and beta of a per-sample norm that on an average sample computes what the BatchNorm does."""
    scale, offset = affine.read(like)
    mean, var = group_moments(like.running_mean.double(), like.running_var.double(), groups)
    mean, var = (value.repeat_interleave(scale.numel() // groups) for value in (mean, var))
    norm.weight.copy_(scale * (var + norm.eps).sqrt())
    norm.bias.copy_(offset + scale * mean)


@dataclass(frozen=True)
class NormInputs:
    """The values that reach a norm with G groups of c channels, and the cost of errors there.

    Args:
        means, squares: each image's, per channel, about the mean of all images, (G, N, c).
        var: of each channel, (G, c), as the network knows it.
        effect: what the square of an error in a channel costs, (G, c).
        eps: the norm's, (G, 1), in units of a group of mean variance.
    """

    means: Tensor
    squares: Tensor
    var: Tensor
    effect: Tensor
    eps: Tensor

    @classmethod
    def of(
        cls, means: Tensor, squares: Tensor, norm: nn.Module, groups: int, eps: float, effect: Tensor | None = None
    ) -> NormInputs:
        """Of each image's means and mean squares (N, C), and effects (C,): by default the square of gamma / deviation.

        Every channel is scaled to its running variance: leaves are not what the network was trained on, and a channel
        that these images do not show would dominate its group on others.
        """
        effect = affine.read(norm)[0].square() if effect is None else effect
        effect = effect / effect.max().clamp_min(1e-30)  # only their ratios count: none is too large for float32
        centre = means.mean(0)
        apart = means - centre
        # where a channel is constant rounding leaves less: then the smallest mean would outweigh all others
        squares = (squares - 2 * centre * means + centre.square()).maximum(apart.square())
        x, e = (value.unflatten(1, (groups, -1)).transpose(0, 1) for value in (apart, squares))
        effect, var = torch.stack([effect, affine.statistics(norm)[1].to(effect)]).cpu().view(2, groups, -1)
        ratio = (var / e.mean(1).clamp_min(1e-30)).sqrt()[:, None]
        x, e = (value.float().contiguous() for value in (x * ratio, e * ratio.square()))
        mean_var = var.mean(1, keepdim=True)
        own = eps * mean_var / mean_var.mean().clamp_min(1e-30)
        return cls(x, e, var.float(), effect.float(), own.clamp_min(affine.epsilon(norm)).float())

    @classmethod
    def joined(cls, inputs: Iterable[NormInputs]) -> NormInputs:
        """The groups of all of them; each has as many images, and channels to a group."""
        tensors = zip(*((one.means, one.squares, one.var, one.effect, one.eps) for one in inputs), strict=True)
        return cls(*(torch.cat(values) for values in tensors))

    def least_costly(self) -> Tensor:
        """Scales (C,), signed, that cost little; within a group they keep the mean variance.

        A group whose channels are all constant has nothing to weigh: its variance is taken for 1.
        """
        constant = self.var.mean(1)[:, None] <= 1e-30
        if bool(constant.any()):
            means, squares = (
                torch.where(constant[:, None], like, value) for like, value in ((0.0, self.means), (1.0, self.squares))
            )
            return NormInputs(
                means, squares, torch.where(constant, 1.0, self.var), self.effect, self.eps
            ).least_costly()
        scale = self._kept(self._by_cost())
        x = self.means * scale[:, None] / self.means.shape[1] ** 0.5
        signs = np.stack([least_sum(group.T @ group) for group in x.numpy()])
        with torch.inference_mode(False), torch.enable_grad():
            return self.descended(scale * torch.from_numpy(signs).float()).flatten().double()

    def _by_cost(self) -> Tensor:
        """Scales that give each channel the deviation of the fourth root of what it costs."""
        cost = (self.effect * self.var) ** 0.25
        cost = cost.clamp_min(1e-30).maximum(LEAST_COST * cost.mean(1, keepdim=True))
        mean_var = self.var.mean(1, keepdim=True)
        scale = cost / self.var.clamp_min(1e-30).maximum(LEAST_VARIANCE * mean_var).sqrt()
        return torch.where(mean_var > 1e-30, scale, torch.ones_like(scale))

    def _kept(self, scale: Tensor) -> Tensor:
        """Scales with which the group's mean variance is what it was."""
        return scale * (self._variance(1.0) / self._variance(scale)).sqrt()

    def _variance(self, scale: Tensor | float) -> Tensor:
        return (self.var * scale * scale).mean(1, keepdim=True).clamp_min(1e-30)

    def descended(self, scale: Tensor) -> Tensor:
        """Scales (G, c) nearby that cost less."""
        inputs = NormInputs.joined([self])  # copies, as tensors of inference mode have no gradients
        log = torch.zeros_like(scale, requires_grad=True)
        optimizer = torch.optim.Adam([log], lr=RATE)

        def nearby() -> Tensor:
            return inputs._kept(scale * log.exp())

        unit = inputs.loss(nearby()).detach().clamp_min(1e-30)
        for _ in range(STEPS):
            optimizer.zero_grad()
            (inputs.loss(nearby()) / unit).sum().backward()
            optimizer.step()
            with torch.no_grad():
                log.clamp_(-FARTHEST, FARTHEST)
        with torch.no_grad():
            return nearby()

    def loss(self, scale: Tensor) -> Tensor:
        """The cost of the images' own statistics in each group (G,), with these scales (G, c).

        With z = scale x, the norm of z, matched to the average image and taken back to x, errs by
        (r - 1) x - r mean(z) / scale, r = sqrt((v + eps) / (a sample's variance + eps)).
        """
        channels, per = scale.shape[1], self.effect / scale.square()
        mean, back = (self.means @ torch.stack([scale / channels, self.effect / scale], 2)).unbind(2)
        energy, cost = (self.squares @ torch.stack([scale.square(), self.effect], 2)).unbind(2)
        var = (energy / channels - mean.square()).clamp_min(0)
        ratio = ((var.mean(1, keepdim=True) + self.eps) / (var + self.eps)).sqrt()
        off, moved_mean = ratio - 1, ratio * mean
        cost = off.square() * cost - 2 * off * moved_mean * back + moved_mean.square() * per.sum(1, keepdim=True)
        alone = self.means.var(1) * scale.square()  # channels that go each its own way
        return cost.mean(1) + CHANCE * per.sum(1) * alone.sum(1) / channels**2


def least_sum(quadratic: Numbers) -> Numbers:
    """Signs t (C,) that make t' A t small: the best of a few descents that flip one sign at a time.

    Args:
        quadratic: A (C, C), symmetric.
    """
    generator = torch.Generator().manual_seed(0)
    starts = (torch.randint(0, 2, (STARTS, len(quadratic)), generator=generator) * 2.0 - 1).numpy()
    diagonal = quadratic.diagonal().astype(np.float64)
    least = -1e-12 * diagonal.sum() / 2
    # in float64, as all sums of it: what rounding leaves over could turn signs for ever
    slopes = starts.astype(np.float64) @ quadratic.astype(np.float64)
    best: Numbers = np.ones(len(quadratic))
    lowest = float("inf")
    step = np.empty_like(quadratic[0])
    for signs, slope in zip(starts.astype(np.float64), slopes, strict=True):
        gains = (diagonal - signs * slope) / 2  # an eighth of what flipping each would change
        turned = signs.astype(quadratic.dtype)
        # kept as signs turn, not made anew: these steps take most of the time
        while (gain := gains[at := gains.argmin()]) < least:
            np.multiply(turned, quadratic[at], out=step)
            (np.add if turned[at] > 0 else np.subtract)(gains, step, out=gains)
            gains[at] = -gain
            turned[at] = -turned[at]
        value = (diagonal - 2 * gains).sum()
        if value < lowest:
            best, lowest = turned.astype(np.float64), value
    return best
