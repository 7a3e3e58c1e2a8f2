"""Factors that bring channels with long tails down before a tanh, so that it bends none more than it bends N(0, 1).

What is bent is lost: of a channel x, the share of its variance that no line through tanh(alpha x) gives back. It grows
with the tails, and with alpha. A factor before the tanh is free, as gamma makes up for it; each channel gets the
largest, at most 1, with which it loses no more than N(0, 1) does without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normswap.calibration.channel_values import watched_on_images, watched_on_leaves
from normswap.calibration.fit_task import FitTask
from normswap.layers.dynamic_tanh import gain, gains
from normswap.layers.per_sample import before, last, move
from normswap.models.modes import hooked

# Values of each image and channel, at most.
PLACES = 16
# Values of a channel, from which on the user's images count.
ENOUGH = 256
# Factors go down in quarters of an octave, at most so many octaves.
STEPS, OCTAVES = 4, 5
# Quantiles that stand for N(0, 1).
NORMAL = 2**14


@contextmanager
def sampling(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Tensor]]]:
    """By path, values (C, n) of each channel that reaches each layer meanwhile, a part for each call."""
    seen: dict[str, list[Tensor]] = {}
    generator = torch.Generator().manual_seed(0)

    def spy(path: str, layer: nn.Module) -> RemovableHandle:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0].detach().flatten(2) if args[0].ndim > 2 else args[0].detach().unsqueeze(2)
            places = torch.randperm(x.shape[2], generator=generator, device="cpu")[:PLACES]
            seen.setdefault(path, []).append(x[:, :, places.to(x.device)].transpose(0, 1).flatten(1).float().cpu())

        return layer.register_forward_pre_hook(hook)

    with hooked(spy(path, layer) for path, layer in layers.items()):
        yield seen


@torch.no_grad()
def choose_factors(task: FitTask) -> None:
    """Give source and result, in place, the largest factors with which no channel is bent too much.

    Where the user's images give too few values, images of dead leaves do. The source computes the same.

    Args:
        task: its source has straight layers in place of the tanhs (`dyt.fitting_target`), its result has the tanhs.
    """
    holders = {edit.reads[0]: edit.path for edit in task.step.edits if edit.layer == "Whitened"}
    alphas = {edit.path: edit.args["alpha"] for edit in task.step.edits if edit.layer == "DynamicTanh"}
    layers = {path: last(task.source.get_submodule(path)) for path in alphas}
    values: dict[str, Tensor] = {}
    if task.batches is not None:
        parts = watched_on_images(task.source, layers, task.batches, sampling)
        values = {path: x for path, part in parts.items() if (x := torch.cat(part, 1)).shape[1] >= ENOUGH}
    if len(values) < len(layers):
        made = watched_on_leaves(task.source, task.example, layers, sampling)
        # Their deviation says nothing: the network was not trained on dead leaves.
        values = {path: _standardized(torch.cat(part, 1)) for path, part in made.items()} | values
    for path, x in values.items():
        alpha, straight, bent = alphas[path], layers[path], last(task.result.get_submodule(path))
        factor = factors(x, alpha).double().to(straight.weight.device)
        for network in (task.source, task.result):
            move(before(network, path, holders), factor)
        straight.weight.copy_(straight.weight.double() / factor)
        bent.weight.copy_(bent.weight.double() * gains(alpha, factor) / gain(alpha))


def _standardized(x: Tensor) -> Tensor:
    """With deviation 1."""
    return x / x.std(1, keepdim=True).clamp_min(1e-30)


def factors(x: Tensor, alpha: float) -> Tensor:
    """The factors (C,) for values x (C, n) of channels, in quarters of an octave; 1 where they are not finite.

    Args:
        alpha: that of the tanh.
    """
    quantiles = torch.special.ndtri((torch.arange(NORMAL) + 0.5) / NORMAL)[None]
    most = lost(quantiles, torch.tensor([alpha]))
    low, high = torch.zeros(len(x)), torch.full((len(x),), float(STEPS * OCTAVES))  # steps down: the least, the most
    while bool((low < high).any()):
        middle = ((low + high) / 2).floor()
        fits = ~(lost(x, alpha * 2 ** (-middle / STEPS)) > most)
        low, high = torch.where(fits, low, middle + 1), torch.where(fits, middle, high)
    return 2 ** (-low / STEPS)


def lost(x: Tensor, alpha: Tensor) -> Tensor:
    """Of the variance of tanh(alpha x), x (C, n), the share that no line through x gives, and the other way round.

    Args:
        alpha: of each channel, (C,), or (1,).
    """
    x = x - x.mean(1, keepdim=True)
    bent = torch.tanh(alpha[:, None] * x)
    bent = bent - bent.mean(1, keepdim=True)
    slope = (x * bent).mean(1, keepdim=True) / x.square().mean(1, keepdim=True).clamp_min(1e-30)
    return (bent - slope * x).square().mean(1) / bent.square().mean(1).clamp_min(1e-30)
