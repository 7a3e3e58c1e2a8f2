"""The signs and factors of channels before a norm with statistics per sample, chosen so that these cost least.

Such a norm takes two numbers of each sample and group out of what it reads: the deviation, by which it divides, and
the mean. A large eps makes the first steady. A channel's sign and factor are free before the norm, since what follows
makes up for them, and make the second small: channels that rise together cancel where their signs differ. A mistake in
a channel costs the more, the louder what follows makes it: the factor decides how much of the group's mean a channel
gets, and how much of it it makes. Where channels are independent and a_c is what a unit of channel c's deviation does
to the answer, factors that give the deviation sqrt(a_c) cost least: sum(phi^2) sum(a^2 / phi^2) has phi^4 = a^2 at its
minimum. From there, with signs that cancel (`quietest`), `Site.loss` is brought down by gradient descent.

It asks how channels' means go together from image to image. That is seen well enough on images of dead leaves
(`natural_noise`), each channel made as loud as the running statistics say: no data are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from normswap.graph.inspection import Anatomy
from normswap.layers import affine
from normswap.layers.per_sample import letters_of
from normswap.schemes.parts.channels_seen import seen_on_leaves

STARTS = 8
STEPS, RATE, FARTHEST = 24, 0.12, 1.5  # of the descent; how far a factor's logarithm may go from where it started
CHANCE = 0.2  # of what the channels' means have in common, the share that is taken for chance
QUIET, DEAD = 0.03, 1e-4  # the least that a channel's level, and its variance, is taken for; its group has 1

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Letters:
    """Signs and sizes of the channels' scales: `per_sample.ChannelRescaling`."""

    flips: str
    factors: str = ""


def unmoved(channels: int) -> Letters:
    """Where nothing is known: no channel flipped, each as loud as it is."""
    return Letters("+" * channels)


def choose(anatomy: Anatomy, groups: Mapping[str, int], eps: Mapping[str, float]) -> dict[str, Letters]:
    """The rescaling of each norm that the images of leaves reached; none where the network takes no images.

    Args:
        groups: how many groups each norm, by path, will have.
        eps: which eps, where the channels' mean variance is what it is.
    """
    modules = anatomy.traced.modules
    seen = seen_on_leaves(anatomy.traced, {path: modules[path] for path in groups})
    sites = {path: Site.of(*seen[path], modules[path], groups[path], eps[path]) for path in seen}
    alike: dict[torch.Size, dict[str, Site]] = {}  # all their groups go through one descent: fewer calls of torch
    for path, site in sites.items():
        alike.setdefault(site.means.shape[1:], {})[path] = site
    chosen: dict[str, Letters] = {}
    for some in alike.values():
        channels = [site.var.numel() for site in some.values()]
        scales = Site.joined(some.values()).quieted().split(channels)
        chosen |= {path: _letters(scale) for path, scale in zip(some, scales, strict=True)}
    return {path: chosen[path] for path in sites}


def _letters(scale: Tensor) -> Letters:
    return Letters("".join("+" if sign else "-" for sign in (scale > 0).tolist()), letters_of(scale.abs()))


@dataclass(frozen=True)
class Site:
    """The values that reach a norm with G groups of c channels, and the cost of errors there.

    Args:
        means, squares: each image's, per channel, about the mean of all images, (G, N, c).
        var: of each channel, (G, c), as the network knows it.
        effect: what the square of an error in a channel costs, (G, c).
        eps: the norm's, (G, 1), as if the group were as loud as all channels are in the mean.
    """

    means: Tensor
    squares: Tensor
    var: Tensor
    effect: Tensor
    eps: Tensor

    @classmethod
    def of(
        cls, means: Tensor, squares: Tensor, norm: nn.Module, groups: int, eps: float, effect: Tensor | None = None
    ) -> Site:
        """Of each image's means and mean squares (N, C), and effects (C,): if they are not known, as gamma says.

        Every channel is made as loud as the running statistics say: leaves are not what the network was trained on, and
        a channel that these images do not show would drown its group in others.
        """
        effect = affine.read(norm)[0].square() if effect is None else effect
        effect = effect / effect.max().clamp_min(1e-30)  # only their ratios count: none is too large for float32
        centre = means.mean(0)
        apart = means - centre
        # where a channel is constant rounding leaves less: then the smallest mean would be made louder than all others
        squares = (squares - 2 * centre * means + centre.square()).maximum(apart.square())
        x, e = (value.unflatten(1, (groups, -1)).transpose(0, 1) for value in (apart, squares))
        effect, var = torch.stack([effect, affine.statistics(norm)[1].to(effect)]).cpu().view(2, groups, -1)
        loud = (var / e.mean(1).clamp_min(1e-30)).sqrt()[:, None]
        x, e = (value.float().contiguous() for value in (x * loud, e * loud.square()))
        usual = var.mean(1, keepdim=True)
        own = eps * usual / usual.mean().clamp_min(1e-30)
        return cls(x, e, var.float(), effect.float(), own.clamp_min(affine.epsilon(norm)).float())

    @classmethod
    def joined(cls, sites: Iterable[Site]) -> Site:
        """The groups of all of them; each has as many images, and channels to a group."""
        parts = zip(*((site.means, site.squares, site.var, site.effect, site.eps) for site in sites), strict=True)
        return cls(*(torch.cat(values) for values in parts))

    def beside(self, other: Site) -> Site:
        """The same groups, with the images of both."""
        means, squares = torch.cat([self.means, other.means], 1), torch.cat([self.squares, other.squares], 1)
        return Site(means, squares, self.var, self.effect, self.eps)

    def quieted(self) -> Tensor:
        """Scales (C,), signed, that cost little; within a group they keep the variance.

        A group whose channels are all silent has nothing to weigh: its variance is taken for 1.
        """
        silent = self.var.mean(1)[:, None] <= 1e-30
        if bool(silent.any()):
            means, squares = (
                torch.where(silent[:, None], like, value) for like, value in ((0.0, self.means), (1.0, self.squares))
            )
            return Site(means, squares, torch.where(silent, 1.0, self.var), self.effect, self.eps).quieted()
        factor = self._kept(self._level())
        x = self.means * factor[:, None] / self.means.shape[1] ** 0.5
        flip = np.stack([quietest(one.T @ one) for one in x.numpy()])
        with torch.inference_mode(False), torch.enable_grad():
            return self.descended(factor * torch.from_numpy(flip).float()).flatten().double()

    def _level(self) -> Tensor:
        """Factors that give each channel the deviation of the fourth root of what it costs."""
        cost = (self.effect * self.var) ** 0.25
        cost = cost.clamp_min(1e-30).maximum(QUIET * cost.mean(1, keepdim=True))
        usual = self.var.mean(1, keepdim=True)
        level = cost / self.var.clamp_min(1e-30).maximum(DEAD * usual).sqrt()
        return torch.where(usual > 1e-30, level, torch.ones_like(level))

    def _kept(self, scale: Tensor) -> Tensor:
        """Scales with which the group's mean variance is what it was."""
        return scale * (self._variance(1.0) / self._variance(scale)).sqrt()

    def _variance(self, scale: Tensor | float) -> Tensor:
        return (self.var * scale * scale).mean(1, keepdim=True).clamp_min(1e-30)

    def descended(self, scale: Tensor) -> Tensor:
        """Scales (G, c) nearby that cost less."""
        site = Site.joined([self])  # copies, as tensors of inference mode have no gradients
        log = torch.zeros_like(scale, requires_grad=True)
        optimizer = torch.optim.Adam([log], lr=RATE)

        def nearby() -> Tensor:
            return site._kept(scale * log.exp())

        unit = site.loss(nearby()).detach().clamp_min(1e-30)
        for _ in range(STEPS):
            optimizer.zero_grad()
            (site.loss(nearby()) / unit).sum().backward()
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
        off, moved = ratio - 1, ratio * mean
        cost = off.square() * cost - 2 * off * moved * back + moved.square() * per.sum(1, keepdim=True)
        alone = self.means.var(1) * scale.square()  # channels that go each its own way
        return cost.mean(1) + CHANCE * per.sum(1) * alone.sum(1) / channels**2


def quietest(quadratic: Numbers) -> Numbers:
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
