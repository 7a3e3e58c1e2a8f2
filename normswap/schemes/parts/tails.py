"""Factors that bring channels with long tails down before a tanh, so that it bends none more than it bends N(0, 1).

What is bent is lost: of a channel x, the share of its variance that no line through tanh(alpha x) gives back. It grows
with the tails, and with alpha. A factor before the tanh is free, as gamma makes up for it; each channel gets the
largest, at most 1, with which it loses no more than N(0, 1) does without one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normswap.graph.tracing import Traced
from normswap.layers.dynamic_tanh import gains
from normswap.layers.per_sample import STEPS, before, last, move, numbers_of
from normswap.models.modes import hooked
from normswap.plan import Step
from normswap.schemes.parts.channels_seen import watched_on_images, watched_on_leaves

PLACES = 16  # of each image, at most
ENOUGH = 256  # values
OCTAVES = 5  # that a channel is brought down by, at most
NORMAL = 2**14  # quantiles that stand for N(0, 1)


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


def factors_on_leaves(traced: Traced, norms: Mapping[str, nn.Module], alpha: float) -> dict[str, Tensor]:
    """By path, the factors (C,) of the channels that reach each norm; none where the network takes no images."""
    seen = watched_on_leaves(traced, norms, sampling)
    return {path: factors(_standardized(torch.cat(parts, 1)), alpha) for path, parts in seen.items()}


@torch.no_grad()
def choose_factors(target: nn.Module, result: nn.Module, step: Step, batches: Iterable[object]) -> None:
    """Give target and result, in place, the factors that images ask for; the target computes the same.

    Args:
        target: the source without tanhs, with the factors of `step` (`dyt.fitting_target`).
        result: with the tanhs in place.
        batches: what they take (`Example.read`); channels of which they give fewer than `ENOUGH` values keep theirs.
    """
    holders = {edit.reads[0]: edit.path for edit in step.edits if edit.layer == "Whitened"}
    tanhs = {edit.path: edit.args for edit in step.edits if edit.layer == "DynamicTanh"}
    seen = watched_on_images(target, {path: last(target.get_submodule(path)) for path in tanhs}, batches, sampling)
    for path, parts in seen.items():
        x, alpha = torch.cat(parts, 1), tanhs[path]["alpha"]
        if x.shape[1] < ENOUGH:
            continue
        straight, bent = last(target.get_submodule(path)), last(result.get_submodule(path))
        old = torch.tensor(numbers_of(tanhs[path].get("factors", "")) or [1.0] * len(x), dtype=torch.float64)
        new = factors(x / old[:, None].float(), alpha).double()
        ratio = (new / old).to(straight.weight.device)
        for network in (target, result):
            move(before(network, path, holders), ratio)
        straight.weight.copy_(straight.weight.double() / ratio)
        bent.weight.copy_(bent.weight.double() * (gains(alpha, new) / gains(alpha, old)).to(ratio))


def _standardized(x: Tensor) -> Tensor:
    """With deviation 1: leaves are not what the network was trained on, and how loud they are says nothing."""
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
