"""Choose the sign and scale of each channel before a GroupNorm, so that the norm costs least.

The GroupNorm takes the place of a BatchNorm. It subtracts each sample's group mean and divides by
its group deviation, which differ from the BatchNorm's statistics. The cost is the error that this
makes. A channel may be multiplied by any factor before the norm, as gamma and beta compensate it.
Correlated channels cancel in the group's mean if their signs differ. For independent channels,
where one deviation of channel c moves the output by a_c, the best deviations are sqrt(a_c):
sum(phi^2) sum(a^2 / phi^2) has its minimum at phi^4 = a^2. From there, with the signs of
`least_sum`, gradient descent lowers `NormInputs.loss`.

The loss needs each image's mean and mean square per channel. These come from dead leaves (images of
random shapes), so that no images are needed, and from the user's images if there are any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from normswap.calibration.channel_values import dead_leaves, image_moments, observed
from normswap.calibration.checked_batches import first_images
from normswap.calibration.host_descent import Adam, Numbers
from normswap.layers.per_sample import (
    follow_rescaling,
    rescale_output,
    rescaling_layer,
    set_average_map,
    without_lead,
)
from normswap.models.calling import Example
from normswap.plan import Body, Step
from normswap.sites.site import site_of

# At most so many of the user's images are used.
MOST = 256
# The search for the signs of channels starts from so many random choices.
STARTS = 8
# The descent has so many steps with this learning rate, and changes a scale's logarithm at most by
# FARTHEST.
STEPS = 24
RATE = 0.12
FARTHEST = 1.5
# On few images correlations between channels may be chance. So this share of what uncorrelated
# channels would cost is added to the loss.
CHANCE = 0.2
# Lower bounds of a channel's cost and variance, in units of its group's mean.
LEAST_COST = 0.03
LEAST_VARIANCE = 1e-4


def rescalable(step: Step) -> dict[str, Body]:
    """Return the plan's arguments (groups, eps) of each GroupNorm whose input may be rescaled.

    They are by the path of the GroupNorm. Its input may be rescaled if the plan states an eps.
    """
    return {
        edit.path: edit.args
        for edit in step.edits
        if edit.layer == "GroupNorm" and "eps" in edit.args
    }


@torch.no_grad()
def choose_rescaling(
    target: nn.Module, result: nn.Module, step: Step, example: Example, batches: Iterable[Example]
) -> None:
    """Rescale the channels before each GroupNorm, in place, so that the norm costs least.

    Scales are chosen for the GroupNorms of the result. The same channels of the target, which has
    BatchNorms, get the same scales, so that the result can be fitted to it layer by layer.

    Args:
        target: The network that the result is fitted to, with BatchNorms in place of the GroupNorms
            (`groupnorm.fitting_target`). Its BatchNorms undo the scales, so it computes the same
            function as before.
        result: The network with GroupNorms.
        step: The step of the plan that made the result.
        example: A call of the networks, in which dead leaves take the place of the images.
        batches: Calls with the user's images. It is empty if the user gave none.
    """
    args = rescalable(step)
    # By the path of a norm, the path of the convolution before it, which holds the norm's scales.
    holders = {edit.reads[0]: edit.path for edit in step.edits if edit.layer == "Rescaled"}
    # A norm may have a layer in front (its lead) that holds its scales instead. `without_lead`
    # returns the norm behind that layer.
    norms = {path: without_lead(target.get_submodule(path)) for path in args}

    # Dead leaves are always among the images, so that scales can be chosen without the user's, and
    # so that a few images do not decide alone.
    leaves = observed(target, norms, dead_leaves(target, example, norms), image_moments)
    users = observed(target, norms, first_images(target, batches, MOST), image_moments)

    inputs: dict[str, NormInputs] = {}
    for path, norm in norms.items():
        moments = [torch.cat(part[path], 1).cpu() for part in (leaves, users) if path in part]
        finite = [part for part in moments if np.isfinite(part.numpy()).all()]
        if finite:
            inputs[path] = NormInputs.of(finite, norm, args[path]["groups"], args[path]["eps"])

    for path, scale in _scales(inputs).items():
        norm = norms[path]
        # The shift gives the scaled channel the mean 0.
        scale = scale.to(norm.weight.device)
        shift = -scale * norm.running_mean
        for network in (target, result):
            rescale_output(rescaling_layer(network, path, holders), scale, shift)

        # The target's BatchNorm undoes the rescaling. The result's GroupNorm gets the map that the
        # BatchNorm then has, for an average sample.
        follow_rescaling(norm, scale, shift)
        group_norm = without_lead(result.get_submodule(path))
        set_average_map(group_norm, site_of(norm).scale_and_shift, *site_of(norm).input_moments)


def _scales(inputs: Mapping[str, NormInputs]) -> dict[str, Tensor]:
    """Return the signed scales (C,) of each norm's input channels, by the norm's path.

    Norms whose inputs have the same shape share one descent, which takes fewer calls of torch.

    Args:
        inputs: The inputs of each norm, by the norm's path.
    """
    by_shape: dict[torch.Size, list[str]] = {}
    for path, norm_inputs in inputs.items():
        by_shape.setdefault(norm_inputs.means.shape[1:], []).append(path)

    scales: dict[str, Tensor] = {}
    for paths in by_shape.values():
        together = NormInputs.joined([inputs[path] for path in paths]).least_costly()
        scales |= dict(
            zip(paths, together.split([inputs[path].var.numel() for path in paths]), strict=True)
        )
    return scales


def _scaled_to(variances: Numbers, means: Numbers, squares: Numbers) -> tuple[Numbers, Numbers]:
    """Return means and mean squares of images, centred, and scaled to given variances.

    Args:
        variances: The variance that each channel gets, averaged over the images, (G, c).
        means: The mean of each channel in each image, (N, C).
        squares: The mean square of each channel in each image, (N, C).

    Returns:
        The means and the mean squares about the mean of all images, both (G, N, c).
    """
    centre = means.mean(0)
    # E (x - c)^2 = E x^2 - 2 c E x + c^2. A mean square is no smaller than the squared mean.
    # Rounding can make it smaller in a constant channel, whose mean would then outweigh all others.
    apart = means - centre
    about_mean = np.maximum(squares - 2 * centre * means + centre**2, apart**2)

    # Part the channels into groups, (N, C) to (G, N, c), and scale each to its variance.
    groups = len(variances)
    centred = apart.reshape(len(apart), groups, -1).swapaxes(0, 1)
    energy = about_mean.reshape(len(apart), groups, -1).swapaxes(0, 1)
    ratio = np.sqrt(variances / np.maximum(energy.mean(1), 1e-30))[:, None]
    return centred * ratio, energy * ratio**2


@dataclass(frozen=True)
class NormInputs:
    """Moments of the inputs of a norm with G groups of c channels, and the cost of errors there.

    Args:
        means: The mean of each channel in each image, less the mean over all images, (G, N, c).
        squares: The mean square of each channel in each image about the same mean, (G, N, c).
        var: The running variance of each channel, (G, c).
        effect: What a squared error in a channel's input costs in the norm's output, (G, c). It is
            (gamma / deviation)^2, relative to the largest of the norm's channels.
        eps: The eps that is added to each group's variance, (G, 1). It is the norm's eps times the
            group's mean variance over the mean variance of all groups, but no less than the eps of
            the BatchNorm.
    """

    means: Tensor
    squares: Tensor
    var: Tensor
    effect: Tensor
    eps: Tensor

    @classmethod
    def of(cls, moments: Sequence[Tensor], norm: nn.Module, groups: int, eps: float) -> NormInputs:
        """Return the record of a norm's inputs, with each channel scaled to its running variance.

        The network was not trained on the synthetic images (dead leaves). Without that scaling, a
        channel that is nearly constant on them would get a large scale, and dominate its group on
        other images. A squared error of channel c costs (gamma_c / deviation_c)^2.

        Args:
            moments: For each kind of images the mean and the mean square of each channel in each
                image, (2, N, C). Each kind is scaled by itself.
            norm: The target's BatchNorm.
            groups: The number of groups of the result's GroupNorm.
            eps: The eps of the result's GroupNorm.
        """
        # The norm's scale is gamma / deviation. A squared error of 1 in a channel's input changes
        # the norm's output by the scale's square. Only the ratios between channels matter.
        scale, _ = site_of(norm).scale_and_shift
        _, variance = site_of(norm).input_moments
        on_cpu = torch.stack([scale, variance]).cpu()
        scales, variances = on_cpu.numpy().reshape(2, groups, -1)
        effect = scales**2
        effect = effect / max(effect.max(), 1e-30)

        kinds = [_scaled_to(variances, *kind.double().numpy()) for kind in moments]
        centred, energy = (np.concatenate(values, 1) for values in zip(*kinds, strict=True))

        # The eps of a group is the GroupNorm's, times the group's mean variance over the mean
        # variance of all groups. It is no less than the BatchNorm's.
        mean_var = variances.mean(1, keepdims=True)
        share = mean_var / max(mean_var.mean(), 1e-30)
        own_eps = np.maximum(eps * share, site_of(norm).eps)

        # A group of constant channels gets the variance 1, so that nothing is divided by 0.
        constant = mean_var <= 1e-30
        centred = np.where(constant[:, None], 0.0, centred)
        energy = np.where(constant[:, None], 1.0, energy)
        var = np.where(constant, 1.0, variances)

        values = (centred, energy, var, effect, own_eps)
        return cls(*(torch.from_numpy(value.astype(np.float32, order="C")) for value in values))

    @classmethod
    def joined(cls, inputs: Iterable[NormInputs]) -> NormInputs:
        """Return one record with the groups of several norms, one norm after the other.

        All inputs must have the same number of images, and of channels in a group.
        """
        tensors = zip(
            *((each.means, each.squares, each.var, each.effect, each.eps) for each in inputs),
            strict=True,
        )
        return cls(*(torch.cat(values) for values in tensors))

    def least_costly(self) -> Tensor:
        """Return a signed scale for each channel of the norm's input (C,), with a low loss.

        The loss is the error that the norm makes by taking statistics from each sample. The mean
        variance of the channels in a group is the same with these scales as without.
        """
        # The signs make the variance of each group's mean small: with A = x' x, t' A t adds up over
        # the images the square of the sum of a group's signed means.
        scale = self._with_mean_variance(self._best_if_independent())
        x = self.means * scale[:, None]
        signs = np.stack([least_sum(group.T @ group) for group in x.double().numpy()])
        return self.descended(scale * torch.from_numpy(signs).float()).flatten().double()

    def _best_if_independent(self) -> Tensor:
        """Return the scales (G, c) that would be best if the channels were independent.

        An error of one deviation in channel c costs a^2 = effect * variance. Then the best
        deviation of the scaled channel is sqrt(a), so its scale is sqrt(a) over its own deviation.
        Costs and variances have lower bounds, so that no scale is extreme.
        """
        cost = (self.effect * self.var) ** 0.25
        cost = cost.clamp_min(1e-30).maximum(LEAST_COST * cost.mean(1, keepdim=True))
        return cost / self.var.maximum(LEAST_VARIANCE * self.var.mean(1, keepdim=True)).sqrt()

    def _with_mean_variance(self, scale: Tensor) -> Tensor:
        """Return scales (G, c) times a factor per group that keeps the group's mean variance.

        The scaled channels then have the same variance on average as the unscaled ones.
        """
        variance = (self.var * scale * scale).mean(1, keepdim=True).clamp_min(1e-30)
        return scale * (self.var.mean(1, keepdim=True) / variance).sqrt()

    def descended(self, scale: Tensor) -> Tensor:
        """Return the scales (G, c) to which Adam's descent on the loss leads from given scales.

        A scale keeps its sign, as the descent changes the logarithm of its size. The descent runs
        in NumPy, as the steps are many and small, and run on the CPU whatever the network's device
        is.
        """
        # Each group's gradient is divided by its loss at the start.
        unit = self.loss(self._with_mean_variance(scale)).clamp_min(1e-30).double().numpy()
        loss = _Loss(
            means=self.means.double().numpy(),
            squares=self.squares.double().numpy(),
            var=self.var.double().numpy(),
            effect=self.effect.double().numpy(),
            eps=self.eps.double().numpy(),
            chance=self.means.double().var(1).numpy(),
        )

        # The values that are changed are the logarithms of the scales, relative to the start.
        start = scale.double().numpy()
        descent = Adam(np.zeros_like(start), RATE, FARTHEST)
        for _ in range(STEPS):
            descent.step(loss.gradient(start * np.exp(descent.values)) / unit[:, None])

        factors = torch.from_numpy(np.exp(descent.values)).to(scale)
        return self._with_mean_variance(scale * factors)

    def loss(self, scale: Tensor) -> Tensor:
        """Return the error that each group makes by taking its statistics from each image, (G,).

        The GroupNorm subtracts the mean of z = scale x in an image and group, and divides by the
        deviation sqrt(u + eps) there. Its gamma and beta are right for mean 0 and the mean v of u
        over the images. In units of x, its output then errs by (r - 1) x - r mean(z) / scale, with
        r = sqrt((v + eps) / (u + eps)). The cost is the mean square of this error, in which each
        channel is weighted by its effect on the result.

        Args:
            scale: The scale of each channel, (G, c).
        """
        channels = scale.shape[1]
        # `means` and `squares` (G, N, c) are the mean and the mean square of x in each image, by
        # channel. A product with weights (G, c, 2) gives two sums over the channels at once, (G, N)
        # each. `mean` and `var` are the mean and the variance of z in each image and group.
        mean_weights = torch.stack([scale / channels, self.effect / scale], 2)
        mean, cross = (self.means @ mean_weights).unbind(2)
        square_weights = torch.stack([scale.square(), self.effect], 2)
        energy, square = (self.squares @ square_weights).unbind(2)
        var = (energy / channels - mean.square()).clamp_min(0)

        # With d = (r - 1) x and m = r mean(z) / scale, the error squared is d^2 - 2 d m + m^2.
        # `square`, `cross` and `shift_cost` are the sums over channels that these terms need.
        ratio = ((var.mean(1, keepdim=True) + self.eps) / (var + self.eps)).sqrt()
        off = ratio - 1
        moved_mean = ratio * mean
        shift_cost = self.effect / scale.square()
        cost = (
            off.square() * square
            - 2 * off * moved_mean * cross
            + moved_mean.square() * shift_cost.sum(1, keepdim=True)
        )

        # The channels' means may cancel in mean(z) by chance on these few images. On other images
        # they would not. So the loss has a second term: a share (`CHANCE`) of what mean(z) would
        # cost if the channels were independent, so that the variances of their means add up.
        independent = self.means.var(1) * scale.square()
        variance_of_mean = independent.sum(1) / channels**2
        return cost.mean(1) + CHANCE * shift_cost.sum(1) * variance_of_mean


@dataclass(frozen=True)
class _Loss:
    """A function of scales in NumPy: the gradient of `NormInputs.loss` for some norm inputs.

    Args:
        means: `NormInputs.means`, (G, N, c).
        squares: `NormInputs.squares`, (G, N, c).
        var: `NormInputs.var`, (G, c).
        effect: `NormInputs.effect`, (G, c).
        eps: `NormInputs.eps`, (G, 1).
        chance: The variance of the means over the images, (G, c).
    """

    means: Numbers
    squares: Numbers
    var: Numbers
    effect: Numbers
    eps: Numbers
    chance: Numbers

    def gradient(self, scale: Numbers) -> Numbers:
        """Return the derivative of each group's loss by the logarithms of its scales, (G, c).

        The loss is taken at the scales that `NormInputs._with_mean_variance` returns: if one scale
        grows, all scales of its group are divided by a factor that keeps the group's mean variance.

        Args:
            scale: The scales before that factor, (G, c).
        """
        variances = self.var * scale**2
        total = np.maximum(variances.sum(1, keepdims=True), 1e-30)
        # The share of each channel in the variance of its group is the derivative of the factor's
        # logarithm, with the sign reversed.
        shares = variances / total
        by_scale = self._by_log_scale(scale * np.sqrt(self.var.sum(1, keepdims=True) / total))
        gradient: Numbers = by_scale - by_scale.sum(1, keepdims=True) * shares
        return gradient

    def _by_log_scale(self, scale: Numbers) -> Numbers:
        """Return the derivative of `NormInputs.loss` by the logarithm of each scale, (G, c).

        It repeats the steps of the loss, and then goes back through them by the chain rule. The
        names are those of `NormInputs.loss`. A name that begins with `by_` is the derivative of
        the mean cost over images by the value that follows.
        """
        images, channels = self.means.shape[1:]
        inverse = self.effect / scale

        # The terms of the loss, as in `NormInputs.loss`.
        mean, cross = np.moveaxis(self.means @ np.stack([scale / channels, inverse], 2), 2, 0)
        energy, square = np.moveaxis(self.squares @ np.stack([scale**2, self.effect], 2), 2, 0)
        var = energy / channels - mean**2
        positive = var > 0
        var = np.where(positive, var, 0.0)
        mean_var = var.mean(1, keepdims=True) + self.eps
        ratio = np.sqrt(mean_var / (var + self.eps))
        off = ratio - 1
        shift_cost = inverse / scale
        total_shift = shift_cost.sum(1, keepdims=True)

        # The cost is off^2 square - 2 off ratio mean cross + (ratio mean)^2 total_shift.
        by_ratio = (
            2 * off * square
            - 2 * (2 * ratio - 1) * mean * cross
            + 2 * ratio * mean**2 * total_shift
        ) / images
        by_cross = -2 * off * ratio * mean / images
        by_total_shift = (ratio**2 * mean**2).mean(1, keepdims=True)

        # The ratio depends on each image's variance, and on the mean variance of all images. Where
        # the variance was clamped to 0, its derivative is 0.
        pull = by_ratio * ratio / 2
        by_var = pull.sum(1, keepdims=True) / mean_var / images - pull / (var + self.eps)
        by_var = np.where(positive, by_var, 0.0)
        by_mean = 2 * ratio * (ratio * mean * total_shift - off * cross) / images
        by_mean = by_mean - 2 * mean * by_var

        # The second term of the loss: what mean(z) would cost if the channels were independent.
        independent = self.chance * scale**2 * CHANCE / channels**2
        by_total_shift = by_total_shift + independent.sum(1, keepdims=True)

        # From these to the logarithms of the scales, which enter through z = scale x and 1 / scale.
        by_means = np.stack([by_mean, by_cross], 1) @ self.means
        by_energy = (by_var[:, None] / channels @ self.squares)[:, 0]
        gradient: Numbers = (
            by_means[:, 0] * scale / channels
            - by_means[:, 1] * inverse
            + 2 * by_energy * scale**2
            - 2 * shift_cost * by_total_shift
            + 2 * total_shift * independent
        )
        return gradient


def least_sum(quadratic: Numbers) -> Numbers:
    """Return signs t (C,), each 1 or -1, that make t' A t small.

    Several descents start from random signs and flip one sign at a time, until no flip lowers the
    value. The signs with the lowest value are returned.

    Args:
        quadratic: The symmetric matrix A, (C, C).
    """
    generator = torch.Generator().manual_seed(0)
    starts = (
        torch.randint(0, 2, (STARTS, len(quadratic)), generator=generator).double().numpy() * 2 - 1
    )
    diagonal = quadratic.diagonal()
    # A smaller decrease may be rounding. Following it could flip signs forever.
    least_change = -1e-12 * diagonal.sum() / 2
    best: Numbers = starts[0]

    lowest = float("inf")
    for signs in starts:
        # Flipping the sign of channel c changes t' A t by 8 times `changes[c]`.
        changes = (diagonal - signs * (quadratic @ signs)) / 2
        while changes[channel := changes.argmin()] < least_change:
            # Flip the sign that lowers the value most, and update the changes of the others.
            change = changes[channel]
            changes += signs[channel] * signs * quadratic[channel]
            # Flipping the same sign back would undo the change.
            changes[channel] = -change
            signs[channel] = -signs[channel]
        # This is t' A t, as its terms are t_c (A t)_c = A_cc - 2 changes[c].
        value = (diagonal - 2 * changes).sum()
        if value < lowest:
            best = signs
            lowest = value

    return best
