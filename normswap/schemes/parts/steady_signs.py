"""The rescaling before a norm with statistics per sample, chosen so that its answers move least from the source's.

A channel's sign, factor and constant are free before a norm that subtracts and divides: what follows makes up for them.
Channels that rise together cancel in a sample's mean where their signs differ; constants make the variance that a
sample is divided by steady, but for the sum of the channels' means that each brings in. A mistake in a channel costs
the more, the louder what follows makes it: the factor decides how much of the group's mistakes a channel gets, and how
much of them it makes. Where channels are independent and a_c is what a unit of channel c's deviation does to the
answer, factors that give the deviation sqrt(a_c) cost least: sum(phi^2) sum(a^2 / phi^2) has phi^4 = a^2 at its
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

BALANCE = 10.0  # how much a sum of signs that is not 0 costs, in units of a channel's mean square
STARTS = 2
STEPS, RATE, FARTHEST = 24, 0.12, 1.5  # of the descent; how far a factor's logarithm may go from where it started
CHANCE = 0.2  # of what the channels' means have in common, the share that is taken for chance
QUIET, DEAD = 0.03, 1e-4  # the least that a channel's level, and its variance, is taken for; its group has 1

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Letters:
    """Signs and sizes of the channels' scales (`flips`, `factors`) and constants (`leans`, `sizes`): `per_sample`."""

    flips: str
    leans: str
    factors: str = ""
    sizes: str = ""


def alternating(channels: int, groups: int) -> Letters:
    """Where nothing is known: no channel flipped, constants of either sign in turn within each group."""
    size = channels // groups
    return Letters("+" * channels, ("+-" * size)[:size] * groups)


def choose(anatomy: Anatomy, groups: Mapping[str, int], steady: float) -> dict[str, Letters]:
    """The rescaling of each norm that the images of leaves reached; none where the network takes no images.

    Args:
        groups: how many groups each norm, by path, will have.
        steady: the share of a group's variance that the constants make.
    """
    modules = anatomy.traced.modules
    seen = seen_on_leaves(anatomy.traced, {path: modules[path] for path in groups})
    sites = {path: Site.of(*seen[path], modules[path], groups[path]) for path in seen}
    alike: dict[torch.Size, dict[str, Site]] = {}  # all their groups go through one descent: fewer calls of torch
    for path, site in sites.items():
        alike.setdefault(site.means.shape[1:], {})[path] = site
    chosen: dict[str, Letters] = {}
    for some in alike.values():
        channels = [site.var.numel() for site in some.values()]
        scales, offsets = (value.split(channels) for value in Site.joined(some.values()).steadied(steady))
        for path, scale, offset in zip(some, scales, offsets, strict=True):
            chosen[path] = _letters(scale, offset, groups[path])
    return {path: chosen[path] for path in sites}


def _letters(scale: Tensor, offset: Tensor, groups: int) -> Letters:
    flips, leans = ("".join("+" if sign else "-" for sign in (value > 0).tolist()) for value in (scale, offset))
    level = offset.view(groups, -1).square().mean(1, keepdim=True).sqrt().clamp_min(1e-30)
    sizes = (offset.abs().view(groups, -1) / level).flatten().clamp_min(1e-9)
    return Letters(flips, leans, letters_of(scale.abs()), letters_of(sizes))


@dataclass(frozen=True)
class Site:
    """The values that reach a norm with G groups of c channels, and the cost of errors there.

    Args:
        means, squares: each image's, per channel, about the mean of all images, (G, N, c).
        var: of each channel, (G, c), as the network knows it.
        effect: what the square of an error in a channel costs, (G, c).
        eps: the norm's, (G, 1).
    """

    means: Tensor
    squares: Tensor
    var: Tensor
    effect: Tensor
    eps: Tensor

    @classmethod
    def of(cls, means: Tensor, squares: Tensor, norm: nn.Module, groups: int, effect: Tensor | None = None) -> Site:
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
        return cls(x, e, var.float(), effect.float(), torch.full((groups, 1), affine.epsilon(norm)))

    @classmethod
    def joined(cls, sites: Iterable[Site]) -> Site:
        """The groups of all of them; each has as many images, and channels to a group."""
        parts = zip(*((site.means, site.squares, site.var, site.effect, site.eps) for site in sites), strict=True)
        return cls(*(torch.cat(values) for values in parts))

    def beside(self, other: Site) -> Site:
        """The same groups, with the images of both."""
        means, squares = torch.cat([self.means, other.means], 1), torch.cat([self.squares, other.squares], 1)
        return Site(means, squares, self.var, self.effect, self.eps)

    def steadied(self, steady: float) -> tuple[Tensor, Tensor]:
        """Scales (signed) and constants (C,) that cost little; within a group they keep the variance, and sum to 0.

        A group whose channels are all silent has nothing to weigh: its variance is taken for 1, without constants.
        """
        silent = self.var.mean(1)[:, None] <= 1e-30
        if bool(silent.any()):
            means, squares = (
                torch.where(silent[:, None], like, value) for like, value in ((0.0, self.means), (1.0, self.squares))
            )
            heard = Site(means, squares, torch.where(silent, 1.0, self.var), self.effect, self.eps)
            scale, offset = (value.view(len(self.var), -1) for value in heard.steadied(steady))
            return scale.flatten(), torch.where(silent, 0.0, offset).flatten()
        factor = self._kept(self._level())
        x, squares = self.means * factor[:, None], self.squares * factor[:, None].square()
        groups = zip((x / x.shape[1] ** 0.5).numpy(), squares.numpy(), strict=True)
        found = [_of_group(x, energy, steady) for x, energy in groups]
        flip, lean = (torch.from_numpy(np.stack(signs)).float() for signs in zip(*found, strict=True))
        with torch.inference_mode(False), torch.enable_grad():
            scale, offset = self.descended(factor * flip, lean, steady)
        return scale.flatten().double(), offset.flatten().double()

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

    def descended(self, scale: Tensor, offset: Tensor, steady: float) -> tuple[Tensor, Tensor]:
        """Scales and constants (G, c) nearby that cost less.

        Args:
            offset: the constants, up to a factor for each group and the group's mean.
        """
        size = (self._variance(1.0) * steady / (1 - steady)).sqrt()

        def rescaling(log: Tensor, lean: Tensor) -> tuple[Tensor, Tensor]:
            lean = lean - lean.mean(1, keepdim=True)
            return self._kept(scale * log.exp()), size * lean / lean.square().mean(1, keepdim=True).sqrt()

        log, lean = torch.zeros_like(scale, requires_grad=True), offset.clone().requires_grad_()
        optimizer = torch.optim.Adam([log, lean], lr=RATE)
        # copies, as tensors of inference mode have no gradients
        site = Site.joined([self])
        unit = site.loss(*rescaling(log, lean)).detach().clamp_min(1e-30)
        for _ in range(STEPS):
            optimizer.zero_grad()
            (site.loss(*rescaling(log, lean)) / unit).sum().backward()
            optimizer.step()
            with torch.no_grad():
                log.clamp_(-FARTHEST, FARTHEST)
        with torch.no_grad():
            return rescaling(log, lean)

    def loss(self, scale: Tensor, offset: Tensor) -> Tensor:
        """The cost of the images' own statistics in each group (G,), with these scales and constants (G, c).

        With z = scale x, the norm of z + offset, matched to the average image and taken back to x, errs by
        (r - 1) x + q, q = ((r - 1) offset - r mean(z)) / scale, r = sqrt(v / a sample's variance).
        """
        channels, per = scale.shape[1], self.effect / scale.square()
        tilt, lean = self.effect * offset / scale, per * offset.square()
        weights = [scale / channels, scale * offset, tilt, self.effect / scale]
        mean, along, tilted, back = (self.means @ torch.stack(weights, 2)).unbind(2)
        energy, cost = (self.squares @ torch.stack([scale.square(), self.effect], 2)).unbind(2)
        var = (energy + 2 * along) / channels + offset.square().mean(1, keepdim=True) - mean.square()
        usual = var.mean(1, keepdim=True)
        ratio = ((usual + self.eps) / (var.clamp_min(0) + self.eps)).sqrt()
        off, moved = ratio - 1, ratio * mean
        q_q = off.square() * lean.sum(1, keepdim=True) + moved.square() * per.sum(1, keepdim=True)
        q_q = q_q - 2 * off * moved * (tilt / scale).sum(1, keepdim=True)
        cost = (off.square() * cost + 2 * off * (off * tilted - moved * back) + q_q).mean(1)
        alone = self.means.var(1) * scale.square()  # channels that go each its own way
        noise = per.sum(1) * alone.sum(1) / channels**2
        shaken = lean.sum(1) * (offset.square() * alone).sum(1) / (channels * (usual + self.eps)[:, 0]).square()
        return cost + CHANCE * (noise + shaken)


def _of_group(x: Numbers, energy: Numbers, steady: float) -> tuple[Numbers, Numbers]:
    """The signs of a group's channels, and those of their constants.

    Args:
        x: each image's means about those of all images, over the root of their number (N, C); energy: mean squares.
    """
    narrow = x.astype(np.float32)
    quadratic = narrow.T @ narrow  # (C, C), the largest thing here: made once, and half as large
    flip = quietest(quadratic, np.zeros(x.shape[1]))
    fluctuation = (energy.mean(1) - energy.mean()) / len(x) ** 0.5
    size = max(float(energy.mean()) * steady / (1 - steady), 1e-60) ** 0.5
    balance = BALANCE * float(quadratic.diagonal().mean(dtype=np.float64))
    return flip, quietest(quadratic, fluctuation @ (x * flip) * x.shape[1] / (2 * size), flip, balance)


def quietest(quadratic: Numbers, linear: Numbers, flip: Numbers | None = None, balance: float = 0.0) -> Numbers:
    """Signs t (C,) that make t' B t + 2 b' t small: the best of a few descents that flip one sign at a time.

    Args:
        quadratic: A (C, C), symmetric; B is A, its rows and columns times `flip`, and `balance` more everywhere.
        linear: b (C,).
    """
    generator = torch.Generator().manual_seed(0)
    starts = (torch.randint(0, 2, (STARTS, len(linear)), generator=generator) * 2.0 - 1).double().numpy()
    turn = np.ones_like(linear) if flip is None else flip
    diagonal = quadratic.diagonal().astype(np.float64) + balance
    least = -1e-12 * diagonal.sum() / 2
    slopes = turn * ((turn * starts).astype(quadratic.dtype) @ quadratic)
    slopes += balance * starts.sum(1, keepdims=True) + linear
    best, lowest = linear, float("inf")
    step = np.empty_like(quadratic[0])
    for signs, slope in zip(starts, slopes, strict=True):
        gains = (diagonal - signs * slope) / 2  # an eighth of what flipping each would change
        # kept as signs turn, not made anew: these steps take most of the time
        turned, balanced = (turn * signs).astype(quadratic.dtype), balance * signs
        while (gain := gains[at := gains.argmin()]) < least:
            np.multiply(turned, quadratic[at], out=step)
            (np.add if turned[at] > 0 else np.subtract)(gains, step, out=gains)
            if balance:
                (np.add if signs[at] > 0 else np.subtract)(gains, balanced, out=gains)
            gains[at] = -gain
            for own in (signs, turned, balanced):
                own[at] = -own[at]
        value = (diagonal - 2 * gains).sum() + linear @ signs
        if value < lowest:
            best, lowest = signs, value
    return best
