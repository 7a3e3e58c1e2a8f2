"""Which signs to give the channels before a norm with statistics per sample, so that its statistics fluctuate least.

A channel's sign and its constant are free before a norm that subtracts and divides: what follows makes up for both. A
sample's mean over a group is the sum of its channels' means; channels that rise together cancel where their signs
differ. A constant of size a in every channel is part of the variance that a sample is divided by; what it adds to the
variance's fluctuation is 2a times the sum of the channels' means under the constants' signs, which can be made small,
or even opposed to how the samples' energy fluctuates. Both choices ask how channel means go together from image to
image. That is seen well enough on noise with the spectrum of natural images, 1/f (Field 1987): no data are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normswap.graph.inspection import Anatomy
from normswap.models import network_input
from normswap.models.calling import Example
from normswap.models.modes import evaluating

COUNT, BATCH, LARGEST = 64, 32, 64  # images of noise, and their largest side
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
    seen = _observe(modules[""], anatomy.traced.form, {path: modules[path] for path in groups})
    return {path: _signs(*seen[path], modules[path].running_var, groups[path], steady) for path in seen}


def pink(count: int, size: tuple[int, int, int], seed: int) -> Tensor:
    """Images (N, C, H, W) of unit variance whose amplitude falls as 1/f and whose colours go together."""
    chans, height, width = size
    white = torch.randn(count, chans, height, width, generator=torch.Generator().manual_seed(seed))
    frequency = (torch.fft.fftfreq(height)[:, None].square() + torch.fft.rfftfreq(width).square()).sqrt()
    frequency[0, 0] = 1 / max(height, width)
    images = torch.fft.irfft2(torch.fft.rfft2(white) / frequency, s=(height, width))
    images = 0.8**0.5 * images[:, :1] + 0.2**0.5 * images
    return images / images.std()


Seen = tuple[Tensor, Tensor]


@torch.no_grad()
def _observe(model: nn.Module, form: Example, norms: Mapping[str, nn.Module]) -> dict[str, Seen]:
    """Per norm, what reaches it about its running mean: each image's means and mean squares, (N, C); maybe nothing."""
    found: dict[str, list[Seen]] = {}

    def spy(path: str) -> Any:
        def hook(norm: Any, args: tuple[Tensor, ...]) -> None:
            x = args[0].flatten(2) if args[0].ndim > 2 else args[0].unsqueeze(2)
            mean, square = x.mean(2).double(), torch.linalg.vector_norm(x, dim=2).double().square() / x.shape[2]
            centre = norm.running_mean.double()
            energy = (square - 2 * centre * mean + centre.square()).clamp_min(0)
            found.setdefault(path, []).append(((mean - centre).cpu(), energy.cpu()))

        return hook

    like = next(p for p in model.parameters() if p.is_floating_point())
    sizes = _sizes(network_input.size(model))  # before the spies are there: it may run the network
    handles = [norm.register_forward_pre_hook(spy(path)) for path, norm in norms.items()]
    try:
        with evaluating(model):
            for size in sizes:
                found.clear()
                try:
                    for i in range(COUNT // BATCH):
                        form.of(pink(BATCH, size, i).to(like)).call(model)
                    break
                except Exception:  # whatever the network raises: not of that size, or it takes no images at all
                    found.clear()
    finally:
        for handle in handles:
            handle.remove()
    seen = {path: (torch.cat([m for m, _ in parts]), torch.cat([e for _, e in parts])) for path, parts in found.items()}
    return {path: pair for path, pair in seen.items() if all(bool(torch.isfinite(value).all()) for value in pair)}


def _sizes(size: tuple[int, ...]) -> list[Any]:
    """Sizes to try: small ones cost less."""
    return [(size[0], *(min(side, LARGEST) for side in size[1:])), size] if len(size) == 3 else []


def _signs(means: Tensor, squares: Tensor, var: Any, groups: int, steady: float) -> Signs:
    scale = (
        var.double().cpu() / squares.mean(0).clamp_min(1e-30)
    ).sqrt()  # noise is not what the network was trained on
    means, squares = means * scale, squares * scale.square()
    means = means - means.mean(0)
    flips, leans = [], []
    for x, energy in zip(means.chunk(groups, 1), squares.chunk(groups, 1), strict=True):
        size = x.shape[1]
        x = x / len(x) ** 0.5
        quadratic = x.float().T @ x.float()  # (C, C), the largest thing here: made once, and half as large
        flip = quietest(quadratic, x.new_zeros(size))
        fluctuation = (energy.mean(1) - energy.mean()) / len(x) ** 0.5
        size_of = (energy.mean() * steady / (1 - steady)).sqrt().clamp_min(1e-30)
        balance = BALANCE * float(quadratic.diagonal().mean())
        lean = quietest(quadratic, fluctuation @ (x * flip) * size / (2 * size_of), flip, balance)
        flips.append(flip)
        leans.append(lean)
    return Signs(*("".join("+" if sign > 0 else "-" for sign in torch.cat(signs).tolist()) for signs in (flips, leans)))


def quietest(quadratic: Tensor, linear: Tensor, flip: Tensor | None = None, balance: float = 0.0) -> Tensor:
    """Signs t (C,) that make t' B t + 2 b' t small: the best of a few descents that flip one sign at a time.

    Args:
        quadratic: A (C, C), symmetric; B is A, its rows and columns times `flip`, and `balance` more everywhere.
        linear: b (C,).
    """
    generator = torch.Generator().manual_seed(0)
    starts = (torch.randint(0, 2, (STARTS, len(linear)), generator=generator) * 2.0 - 1).double().numpy()
    squared, along = quadratic.numpy(), linear.numpy()  # many small steps: PyTorch takes several times as long
    turn = np.ones_like(along) if flip is None else flip.numpy()
    diagonal = squared.diagonal() + balance
    least = -1e-12 * diagonal.sum()
    slopes = turn * ((turn * starts).astype(squared.dtype) @ squared) + balance * starts.sum(1, keepdims=True) + along
    best, lowest = along, float("inf")
    for signs, slope in zip(starts, slopes, strict=True):
        while True:
            gains = diagonal - signs * slope  # a quarter of what flipping each would change
            at = gains.argmin()
            if not gains[at] < least:
                break
            signs[at] = -signs[at]
            row = squared[at] if flip is None else turn * (turn[at] * squared[at])
            slope += 2 * signs[at] * (row + balance)
        value = signs @ slope + along @ signs
        if value < lowest:
            best, lowest = signs, value
    return torch.from_numpy(best)
