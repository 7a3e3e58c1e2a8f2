"""Choose the sign and scale of each channel before a per-sample norm, so that the norm costs least.

Such a norm subtracts each sample's group mean and divides by its group deviation; gamma and beta
compensate the sign and scale of a channel. Correlated channels cancel in the group's mean where
their signs differ. For independent channels, where one deviation of channel c moves the output by
a_c, the best deviations are sqrt(a_c): sum(phi^2) sum(a^2 / phi^2) has its minimum at phi^4 = a^2.
From there, with the signs of `least_sum`, gradient descent lowers `NormInputs.loss`. Means and mean
squares come from dead leaves and from the user's images.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from normswap.calibration.channel_values import dead_leaves, image_moments, observed
from normswap.calibration.checked_batches import first_images
from normswap.layers import affine
from normswap.layers.per_sample import (
    follow_rescaling,
    rescale_output,
    rescaling_layer,
    set_average_map,
    without_lead,
)
from normswap.models.calling import Example
from normswap.plan import Body, Step

# At most so many of the user's images are used.
MOST = 256
# The search for signs starts from so many random ones.
STARTS = 8
# Steps and learning rate of the descent, and the largest change of a scale's logarithm.
STEPS = 24
RATE = 0.12
FARTHEST = 1.5
# This share of the channels' own variances of means is added, as their correlations may be chance.
CHANCE = 0.2
# Lower bounds of a channel's cost and variance, in units of its group's mean.
LEAST_COST = 0.03
LEAST_VARIANCE = 1e-4

Numbers = npt.NDArray[np.float64]


def rescalable(step: Step) -> dict[str, Body]:
    """The arguments of the norms of a step before which channels may be rescaled, by path."""
    return {
        edit.path: edit.args
        for edit in step.edits
        if edit.layer == "GroupNorm" and "eps" in edit.args
    }


@torch.no_grad()
def choose_rescaling(
    target: nn.Module, result: nn.Module, step: Step, example: Example, batches: Iterable[Example]
) -> None:
    """Rescale the channels before each norm of both networks, in place.

    The target (`groupnorm.fitting_target`) computes the same function before and after.
    """
    args = rescalable(step)
    holders = {edit.reads[0]: edit.path for edit in step.edits if edit.layer == "Rescaled"}
    norms = {path: without_lead(target.get_submodule(path)) for path in args}

    inputs: dict[str, NormInputs] = {}
    for images in (dead_leaves(target, example, norms), first_images(target, batches, MOST)):
        for path, moments in observed(target, norms, images, image_moments).items():
            means, squares = torch.cat(moments, 1).cpu()
            if bool(means.isfinite().all() and squares.isfinite().all()):
                values = NormInputs.of(
                    means, squares, norms[path], args[path]["groups"], args[path]["eps"]
                )
                inputs[path] = inputs[path].beside(values) if path in inputs else values

    for path, scale in _scales(inputs).items():
        norm = norms[path]
        scale = scale.to(norm.weight.device)
        shift = -scale * norm.running_mean.double()
        for network in (target, result):
            rescale_output(rescaling_layer(network, path, holders), scale, shift)
        follow_rescaling(norm, scale, shift)
        stand_in = without_lead(result.get_submodule(path))
        set_average_map(stand_in, affine.read_map(norm), *affine.statistics(norm))


def _scales(inputs: Mapping[str, NormInputs]) -> dict[str, Tensor]:
    """Return the signed scales (C,) of each norm, by path.

    Norms of one shape go through one descent together, which takes fewer calls of torch.
    """
    alike: dict[torch.Size, list[str]] = {}
    for path, norm_inputs in inputs.items():
        alike.setdefault(norm_inputs.means.shape[1:], []).append(path)
    scales: dict[str, Tensor] = {}
    for paths in alike.values():
        together = NormInputs.joined([inputs[path] for path in paths]).least_costly()
        scales |= dict(
            zip(paths, together.split([inputs[path].var.numel() for path in paths]), strict=True)
        )
    return scales


@dataclass(frozen=True)
class NormInputs:
    """The inputs of a norm with G groups of c channels, and the cost of errors there.

    Args:
        means: Each image's mean per channel, (G, N, c), minus the mean of all images.
        squares: Each image's mean square per channel, (G, N, c), about the mean of all images.
        var: The running variance of each channel, (G, c).
        effect: The cost of a squared error in a channel, (G, c).
        eps: The norm's eps, (G, 1), in units of a group of mean variance.
    """

    means: Tensor
    squares: Tensor
    var: Tensor
    effect: Tensor
    eps: Tensor

    @classmethod
    def of(
        cls, means: Tensor, squares: Tensor, norm: nn.Module, groups: int, eps: float
    ) -> NormInputs:
        """Read what a norm's channels are on images: means and mean squares (N, C) of each image.

        A squared error of channel c costs (gamma_c / deviation_c)^2. Every channel is scaled to its
        running variance: the network was not trained on dead leaves, and a channel that is nearly
        constant on them would dominate its group on other images.
        """
        effect = affine.read_map(norm)[0].square()
        effect = effect / effect.max().clamp_min(1e-30)
        centre = means.mean(0)
        apart = means - centre
        # Rounding can give a constant channel less than this, and its mean would outweigh all
        # others.
        squares = (squares - 2 * centre * means + centre.square()).maximum(apart.square())
        x, e = (value.unflatten(1, (groups, -1)).transpose(0, 1) for value in (apart, squares))
        effect, var = (
            torch.stack([effect, affine.statistics(norm)[1].to(effect)]).cpu().view(2, groups, -1)
        )
        ratio = (var / e.mean(1).clamp_min(1e-30)).sqrt()[:, None]
        x = x * ratio
        e = e * ratio.square()
        mean_var = var.mean(1, keepdim=True)
        own_eps = (eps * mean_var / mean_var.mean().clamp_min(1e-30)).clamp_min(
            affine.epsilon(norm)
        )
        # A group of constant channels gets the variance 1.
        constant = mean_var <= 1e-30
        x = torch.where(constant[:, None], 0.0, x)
        e = torch.where(constant[:, None], 1.0, e)
        var = torch.where(constant, 1.0, var)

        return cls(*(value.float().contiguous() for value in (x, e, var, effect, own_eps)))

    @classmethod
    def joined(cls, inputs: Iterable[NormInputs]) -> NormInputs:
        """The groups of all inputs, which have as many images, and channels to a group."""
        tensors = zip(
            *((each.means, each.squares, each.var, each.effect, each.eps) for each in inputs),
            strict=True,
        )
        return cls(*(torch.cat(values) for values in tensors))

    def beside(self, other: NormInputs) -> NormInputs:
        means = torch.cat([self.means, other.means], 1)
        squares = torch.cat([self.squares, other.squares], 1)
        return NormInputs(means, squares, self.var, self.effect, self.eps)

    def least_costly(self) -> Tensor:
        """Signed scales (C,) with a low loss, which keep each group's mean variance."""
        scale = self._with_mean_variance(self._by_cost())
        x = self.means * scale[:, None] / self.means.shape[1] ** 0.5
        signs = np.stack([least_sum(group.T @ group) for group in x.double().numpy()])
        with torch.inference_mode(False), torch.enable_grad():
            return self.descended(scale * torch.from_numpy(signs).float()).flatten().double()

    def _by_cost(self) -> Tensor:
        """Scales (G, c) that give each channel the deviation sqrt(a) of the module's docstring."""
        cost = (self.effect * self.var) ** 0.25
        cost = cost.clamp_min(1e-30).maximum(LEAST_COST * cost.mean(1, keepdim=True))
        return cost / self.var.maximum(LEAST_VARIANCE * self.var.mean(1, keepdim=True)).sqrt()

    def _with_mean_variance(self, scale: Tensor) -> Tensor:
        variance = (self.var * scale * scale).mean(1, keepdim=True).clamp_min(1e-30)
        return scale * (self.var.mean(1, keepdim=True) / variance).sqrt()

    def descended(self, scale: Tensor) -> Tensor:
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
        channels = scale.shape[1]
        per = self.effect / scale.square()
        mean, back = (self.means @ torch.stack([scale / channels, self.effect / scale], 2)).unbind(
            2
        )
        energy, cost = (self.squares @ torch.stack([scale.square(), self.effect], 2)).unbind(2)
        var = (energy / channels - mean.square()).clamp_min(0)
        ratio = ((var.mean(1, keepdim=True) + self.eps) / (var + self.eps)).sqrt()
        off = ratio - 1
        moved_mean = ratio * mean
        cost = (
            off.square() * cost
            - 2 * off * moved_mean * back
            + moved_mean.square() * per.sum(1, keepdim=True)
        )
        alone = self.means.var(1) * scale.square()

        return cost.mean(1) + CHANCE * per.sum(1) * alone.sum(1) / channels**2


def least_sum(quadratic: Numbers) -> Numbers:
    """Return signs t (C,) that make t' A t small, for a symmetric A (C, C).

    Several descents each flip one sign at a time; the best end is returned.
    """
    generator = torch.Generator().manual_seed(0)
    starts = (
        torch.randint(0, 2, (STARTS, len(quadratic)), generator=generator).double().numpy() * 2 - 1
    )
    diagonal = quadratic.diagonal()
    # Smaller gains are rounding, and could flip signs forever.
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
            best = signs
            lowest = value

    return best
