"""Which signs to give the channels before a norm with statistics per sample, so that its statistics fluctuate least.

A channel's sign and its constant are free before a norm that subtracts and divides: what follows makes up for both. A
sample's mean over a group is the sum of its channels' means; channels that rise together cancel where their signs
differ. A constant of size a in every channel is part of the variance that a sample is divided by; what it adds to the
variance's fluctuation is 2a times the sum of the channels' means under the constants' signs, which can be made small,
or even opposed to how the samples' energy fluctuates. Both choices ask how channel means go together from image to
image. That is seen well enough on noise with the spectrum of natural images, 1/f (Field 1987): no data are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from normswap.calibration.natural_noise import pink
from normswap.graph.inspection import Anatomy
from normswap.graph.tracing import Traced
from normswap.layers import affine
from normswap.models.modes import evaluating

COUNT, BATCH = 64, 32  # images of noise
LARGEST = {1: 4096, 2: 64, 3: 32}  # their largest side, by its dimensions
BALANCE = 10.0  # how much a sum of signs that is not 0 costs, in units of a channel's mean square
STARTS = 2


@dataclass(frozen=True)
class Signs:
    """One '+' or '-' per channel: of the channel (`flips`) and of its constant (`leans`)."""

    flips: str
    leans: str


def alternating(channels: int, groups: int) -> Signs:
    """Where nothing is known: no channel flipped, constants of either sign in turn within each group."""
    size = channels // groups
    return Signs("+" * channels, ("+-" * size)[:size] * groups)


def choose(anatomy: Anatomy, groups: Mapping[str, int], steady: float) -> dict[str, Signs]:
    """The signs for each norm that the noise reached; none where the network takes no images.

    Args:
        groups: how many groups each norm, by path, will have.
        steady: the share of a group's variance that the constants make.
    """
    modules = anatomy.traced.modules
    seen = _observe(anatomy.traced, {path: modules[path] for path in groups})
    return {path: _signs(*seen[path], affine.statistics(modules[path])[1], groups[path], steady) for path in seen}


Seen = tuple[Tensor, Tensor]
Numbers = npt.NDArray[np.float64]


@torch.no_grad()
def _observe(traced: Traced, norms: Mapping[str, nn.Module]) -> dict[str, Seen]:
    """Per norm, what reaches it about its running mean: each image's means and mean squares, (N, C); maybe nothing."""
    found: dict[str, list[Seen]] = {}

    def spy(path: str) -> Callable[..., None]:
        def hook(norm: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0].flatten(2) if args[0].ndim > 2 else args[0].unsqueeze(2)
            mean, square = x.mean(2).double(), torch.linalg.vector_norm(x, dim=2).double().square() / x.shape[2]
            centre = affine.statistics(norm)[0]
            energy = (square - 2 * centre * mean + centre.square()).clamp_min(0)
            found.setdefault(path, []).append(((mean - centre).cpu(), energy.cpu()))

        return hook

    model = traced.modules[""]
    like = next(p for p in model.parameters() if p.is_floating_point())
    handles = [norm.register_forward_pre_hook(spy(path)) for path, norm in norms.items()]
    try:
        with evaluating(model):
            for size in _sizes(traced):
                found.clear()
                try:
                    for i in range(COUNT // BATCH):
                        traced.form.of(pink(BATCH, size, i).to(like)).call(model)
                    break
                except Exception:  # whatever the network raises: not of that size, or it takes no images at all
                    found.clear()
    finally:
        for handle in handles:
            handle.remove()
    seen = {path: (torch.cat([m for m, _ in parts]), torch.cat([e for _, e in parts])) for path, parts in found.items()}
    return {path: pair for path, pair in seen.items() if all(bool(torch.isfinite(value).all()) for value in pair)}


def _sizes(traced: Traced) -> list[list[int]]:
    """Sizes to try, none of what are no images, signals or clips: small ones cost less."""
    shape = next(node.meta["shape"] for node in traced.nodes if node.op == "placeholder")
    channels, *sides = shape if traced.form.listed else shape[1:]
    largest = LARGEST.get(len(sides))
    return [[channels, *(min(side, largest) for side in sides)], [channels, *sides]] if largest else []


def _signs(means: Tensor, squares: Tensor, var: Tensor, groups: int, steady: float) -> Signs:
    # in NumPy: many small steps, for which PyTorch takes several times as long
    x, energy, known = means.numpy(), squares.numpy(), var.cpu().numpy()
    scale = np.sqrt(known / energy.mean(0).clip(1e-30))  # noise is not what the network was trained on
    x, energy = x * scale, energy * scale**2
    x = (x - x.mean(0)) / len(x) ** 0.5
    parts = zip(np.split(x, groups, 1), np.split(energy, groups, 1), strict=True)
    found = [_of_group(own, theirs, steady) for own, theirs in parts]
    return Signs(*("".join(np.where(np.concatenate(signs) > 0, "+", "-")) for signs in zip(*found, strict=True)))


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
