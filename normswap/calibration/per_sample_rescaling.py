"""The sign and scale of each channel before a norm with statistics per sample, chosen so that these cost least.

Such a norm subtracts each sample's group mean and divides by its group deviation. Sign and scale of a channel are free
before the norm, as gamma and beta behind it make up for them. Channels that rise together cancel in the group's mean
where their signs differ. Where channels are independent and a_c is what one deviation of channel c does to the output,
scales that give it the deviation sqrt(a_c) cost least: sum(phi^2) sum(a^2 / phi^2) has phi^4 = a^2 at its minimum. From
there, with the signs of `least_sum`, `NormInputs.loss` is brought down by gradient descent. How the channels' means go
together is seen on dead leaves, and on the user's images beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from normswap.calibration.channel_values import dead_leaves, image_moments, observed
from normswap.calibration.checked_batches import first_images
from normswap.layers import affine
from normswap.layers.per_sample import before, group_moments, last, move, moved
from normswap.models.calling import Example
from normswap.plan import Body, Step

# So many of the user's images are looked at.
MOST = 256
# Random signs that the search for the best starts from.
STARTS = 8
# Steps and learning rate of the descent, and how far a scale's logarithm may go from where it started.
STEPS, RATE, FARTHEST = 24, 0.12, 1.5
# The share of what the channels' means have in common that is taken for chance.
CHANCE = 0.2
# The least that a channel's cost, and its variance, is taken for, in units of its group's mean.
LEAST_COST, LEAST_VARIANCE = 0.03, 1e-4

Numbers = npt.NDArray[np.float64]


def rescalable(step: Step) -> dict[str, Body]:
    """The arguments of the norms of a step before which channels may be rescaled, by path."""
    return {edit.path: edit.args for edit in step.edits if edit.layer == "GroupNorm" and "eps" in edit.args}


@torch.no_grad()
def choose_rescaling(
    target: nn.Module, result: nn.Module, step: Step, example: Example, batches: Iterable[Example]
) -> None:
    """Rescale target and result before each norm, in place; the function of the target stays.

    The target is the source with its BatchNorms and the rescaling of the step (`groupnorm.fitting_target`).
    """
    args = rescalable(step)
    holders = {edit.reads[0]: edit.path for edit in step.edits if edit.layer == "Rescaled"}
    norms = {path: last(target.get_submodule(path)) for path in args}
    inputs: dict[str, NormInputs] = {}
    for images in (dead_leaves(target, example, norms), first_images(target, batches, MOST)):
        for path, moments in observed(target, norms, images, image_moments).items():
            means, squares = torch.cat(moments, 1).cpu()
            if bool(means.isfinite().all() and squares.isfinite().all()):
                values = NormInputs.of(means, squares, norms[path], args[path]["groups"], args[path]["eps"])
                inputs[path] = inputs[path].beside(values) if path in inputs else values
    for path, scale in _scales(inputs).items():
        norm = norms[path]
        scale = scale.to(norm.weight.device)
        shift = -scale * norm.running_mean.double()
        for network in (target, result):
            move(before(network, path, holders), scale, shift)
        moved(norm, scale, shift)
        _match(last(result.get_submodule(path)), norm, args[path]["groups"])


def _scales(inputs: Mapping[str, NormInputs]) -> dict[str, Tensor]:
    """The signed scales (C,) of each norm; norms of one shape go through one descent, with fewer calls of torch."""
    alike: dict[torch.Size, list[str]] = {}
    for path, norm_inputs in inputs.items():
        alike.setdefault(norm_inputs.means.shape[1:], []).append(path)
    scales: dict[str, Tensor] = {}
    for paths in alike.values():
        together = NormInputs.joined([inputs[path] for path in paths]).least_costly()
        scales |= dict(zip(paths, together.split([inputs[path].var.numel() for path in paths]), strict=True))
    return scales


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
    def of(cls, means: Tensor, squares: Tensor, norm: nn.Module, groups: int, eps: float) -> NormInputs:
        """Of each image's means and mean squares (N, C); an error costs the square of gamma / deviation.

        Every channel is scaled to its running variance: leaves are not what the network was trained on, and a channel
        that these images do not show would dominate its group on others.
        """
        effect = affine.read(norm)[0].square()
        effect = effect / effect.max().clamp_min(1e-30)
        centre = means.mean(0)
        apart = means - centre
        # A constant channel has less variance than that, by rounding, and its mean would outweigh all others.
        squares = (squares - 2 * centre * means + centre.square()).maximum(apart.square())
        x, e = (value.unflatten(1, (groups, -1)).transpose(0, 1) for value in (apart, squares))
        effect, var = torch.stack([effect, affine.statistics(norm)[1].to(effect)]).cpu().view(2, groups, -1)
        ratio = (var / e.mean(1).clamp_min(1e-30)).sqrt()[:, None]
        x, e = x * ratio, e * ratio.square()
        mean_var = var.mean(1, keepdim=True)
        own_eps = (eps * mean_var / mean_var.mean().clamp_min(1e-30)).clamp_min(affine.epsilon(norm))
        # A group whose channels are all constant has nothing to weigh: its variance is taken for 1.
        constant = mean_var <= 1e-30
        x, e = torch.where(constant[:, None], 0.0, x), torch.where(constant[:, None], 1.0, e)
        var = torch.where(constant, 1.0, var)
        return cls(*(value.float().contiguous() for value in (x, e, var, effect, own_eps)))

    @classmethod
    def joined(cls, inputs: Iterable[NormInputs]) -> NormInputs:
        """The groups of all of them; each has as many images, and channels to a group."""
        tensors = zip(*((each.means, each.squares, each.var, each.effect, each.eps) for each in inputs), strict=True)
        return cls(*(torch.cat(values) for values in tensors))

    def beside(self, other: NormInputs) -> NormInputs:
        """The same norm with the images of both."""
        means, squares = torch.cat([self.means, other.means], 1), torch.cat([self.squares, other.squares], 1)
        return NormInputs(means, squares, self.var, self.effect, self.eps)

    def least_costly(self) -> Tensor:
        """Scales (C,), signed, that cost little; within a group they keep the mean variance."""
        scale = self._with_mean_variance(self._by_cost())
        x = self.means * scale[:, None] / self.means.shape[1] ** 0.5
        signs = np.stack([least_sum(group.T @ group) for group in x.double().numpy()])
        with torch.inference_mode(False), torch.enable_grad():
            return self.descended(scale * torch.from_numpy(signs).float()).flatten().double()

    def _by_cost(self) -> Tensor:
        """Scales that give each channel the deviation of the fourth root of what it costs."""
        cost = (self.effect * self.var) ** 0.25
        cost = cost.clamp_min(1e-30).maximum(LEAST_COST * cost.mean(1, keepdim=True))
        return cost / self.var.maximum(LEAST_VARIANCE * self.var.mean(1, keepdim=True)).sqrt()

    def _with_mean_variance(self, scale: Tensor) -> Tensor:
        """Scales with which the group's mean variance is what it was."""
        variance = (self.var * scale * scale).mean(1, keepdim=True).clamp_min(1e-30)
        return scale * (self.var.mean(1, keepdim=True) / variance).sqrt()

    def descended(self, scale: Tensor) -> Tensor:
        """Scales (G, c) nearby that cost less."""
        inputs = NormInputs.joined([self])
        log = torch.zeros_like(scale, requires_grad=True)
        optimizer = torch.optim.Adam([log], lr=RATE)
        unit = inputs.loss(inputs._with_mean_variance(scale)).detach().clamp_min(1e-30)
        for _ in range(STEPS):
            optimizer.zero_grad()
            (inputs.loss(inputs._with_mean_variance(scale * log.exp())) / unit).sum().backward()
            optimizer.step()
            with torch.no_grad():
                log.clamp_(-FARTHEST, FARTHEST)
        return inputs._with_mean_variance(scale * log.detach().exp())

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
        alone = self.means.var(1) * scale.square()
        return cost.mean(1) + CHANCE * per.sum(1) * alone.sum(1) / channels**2


def least_sum(quadratic: Numbers) -> Numbers:
    """Signs t (C,) with a small t' A t, A (C, C) symmetric: the best of a few descents that flip one sign at a time."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, 2, (STARTS, len(quadratic)), generator=generator).double().numpy() * 2 - 1
    diagonal = quadratic.diagonal()
    # Less is rounding, which could turn signs for ever.
    least = -1e-12 * diagonal.sum() / 2
    best: Numbers = starts[0]
    lowest = float("inf")
    for signs in starts:
        gains = (diagonal - signs * (quadratic @ signs)) / 2
        while gains[at := gains.argmin()] < least:
            gain = gains[at]
            gains += signs[at] * signs * quadratic[at]
            gains[at] = -gain
            signs[at] = -signs[at]
        value = (diagonal - 2 * gains).sum()
        if value < lowest:
            best, lowest = signs, value
    return best
