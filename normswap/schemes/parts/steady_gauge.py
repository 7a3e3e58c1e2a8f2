"""The gauge before the norms with statistics per sample, chosen on images: what `steady_signs` guesses from noise.

Let x_c be a sample's mean in channel c about the running mean, under the channel's sign, and e the sample's mean square
over the group's C channels, v on average. Constants o that sum to zero make the variance that the sample is divided by

    e + |o|^2 / C + 2 x.o / C - (mean x)^2,        |o|^2 / C = v steady / (1 - steady)

Of all constants of that size, those are taken for which e + 2 x.o / C varies least from image to image: least squares
on a sphere, (A + mu) o = b with A = 4 cov(x) / C^2, b = -2 cov(x, e) / C and the mu that gives the size. Noise shows
how channels go together, but not how the energy of images differs, which is most of the error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normswap.calibration.checked_batches import checked, misfit
from normswap.layers import affine
from normswap.layers.per_sample import group_moments, per_filter
from normswap.layers.placeholders import Chain
from normswap.models.modes import evaluating
from normswap.plan import Step
from normswap.schemes.parts.steady_signs import quietest

ENOUGH, MOST = 16, 512  # images
Seen = tuple[Tensor, Tensor]


@torch.no_grad()
def regauge(pattern: nn.Module, result: nn.Module, step: Step, batches: Iterable[object]) -> None:
    """Give pattern and result, in place, another gauge before each norm that has one; the pattern computes the same.

    Args:
        pattern: the source with its BatchNorms, in the gauge of `step` (`per_sample_norms.recentred`).
        result: with the per-sample norms in their seats.
        batches: what they take (`Example.read`); at most `MOST` images are looked at, fewer than `ENOUGH` do nothing.
    """
    holders = {edit.reads[0]: edit.path for edit in step.edits if edit.layer == "Steadied"}
    steady = {e.path: e.args for e in step.edits if e.layer == "GroupNorm" and (e.path in holders or "lead" in e.args)}
    shares = {edit.reads[0]: edit.args["steady"] for edit in step.edits if edit.layer == "Steadied"}
    norms = {path: _inner(pattern.get_submodule(path)) for path in steady}
    seen = _observe(pattern, norms, batches)
    for path, args in steady.items():
        means, squares = seen.get(path, (torch.empty(0), torch.empty(0)))
        if len(means) < ENOUGH:
            continue
        norm = norms[path]
        share = shares[path] if path in shares else args.get("steady", 0.0)
        sign, offset = gauge(means, squares, args["groups"], share)
        shift = offset - sign * norm.running_mean.double()
        for network in (pattern, result):
            before = network.get_submodule(path)
            before = before.inner if isinstance(before, Chain) else network.get_submodule(holders[path])
            _move(before, sign, shift)
        norm.running_mean.copy_(offset)
        norm.weight.mul_(sign)
        _match(_inner(result.get_submodule(path)), norm, args["groups"])


def gauge(means: Tensor, squares: Tensor, groups: int, steady: float) -> tuple[Tensor, Tensor]:
    """Signs and constants (C,) for channels whose running mean was taken off.

    Args:
        means, squares: each image's, per channel, (N, C).
        steady: see `per_sample.Gauge`.
    """
    means = means - means.mean(0)
    signs, offsets = [], []
    for x, energy in zip(means.chunk(groups, 1), squares.chunk(groups, 1), strict=True):
        sign = torch.from_numpy(quietest((x.T @ x / len(x)).numpy(), np.zeros(x.shape[1])))
        size = x.shape[1] * float(energy.mean()) * steady / (1 - steady)
        offsets.append(_constants(x * sign, energy.mean(1) - energy.mean(), size))
        signs.append(sign)
    return torch.cat(signs), torch.cat(offsets)


def _constants(x: Tensor, energy: Tensor, size: float) -> Tensor:
    """The o with |o|^2 = size and sum 0 that makes energy + 2 x.o / C vary least.

    Args:
        x: (N, C), of mean 0; energy: (N,), of mean 0.
    """
    channels = x.shape[1]
    x = x - x.mean(1, keepdim=True)  # what constants of sum 0 see
    spread = 4 * x.T @ x / (len(x) * channels**2)
    away = (2 * spread.trace() + 1e-30) / channels
    values, vectors = torch.linalg.eigh(spread + away)
    values, vectors = values[:-1].clamp_min(0), vectors[:, :-1]  # the last is the constant vector
    along = vectors.T @ (-2 * (x.T @ energy) / (len(x) * channels))
    scale = float(values[-1]) + 1e-30
    low, high = -float(values[0]) + 1e-9 * scale, float(along.norm()) / max(size, 1e-30) ** 0.5 + scale
    for _ in range(100):
        middle = (low + high) / 2
        longer = float((along / (values + middle)).square().sum()) > size
        low, high = (middle, high) if longer else (low, middle)
    found = along / (values + high)
    rest = size - float(found.square().sum())
    if rest > 0:  # what is left goes where the images differ least
        found[0] += rest**0.5
    return vectors @ (found * (size / float(found.square().sum().clamp_min(1e-30))) ** 0.5)


def _inner(seat: nn.Module) -> Any:
    return seat.then if isinstance(seat, Chain) else seat


def _observe(model: nn.Module, norms: dict[str, nn.Module], batches: Iterable[object]) -> dict[str, Seen]:
    """Per norm, what reaches it about its running mean: each image's means and mean squares, (N, C)."""
    found: dict[str, list[Seen]] = {}

    def spy(path: str, norm: Any) -> RemovableHandle:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0].double().flatten(2) if args[0].ndim > 2 else args[0].double()[:, :, None]
            x = x - norm.running_mean.double()[:, None]
            found.setdefault(path, []).append((x.mean(2), x.square().mean(2)))

        return norm.register_forward_pre_hook(hook)

    handles = [spy(path, norm) for path, norm in norms.items()]
    count = 0
    try:
        with evaluating(model):
            for example in checked(model, batches):
                example.call(model)
                count += example.count
                if count >= MOST:
                    break
    except Exception as error:  # whatever the network raises
        raise misfit(error) from None
    finally:
        for handle in handles:
            handle.remove()
    return {path: (torch.cat([m for m, _ in parts]), torch.cat([e for _, e in parts])) for path, parts in found.items()}


def _move(layer: Any, sign: Tensor, shift: Tensor) -> None:
    """Let a convolution, or a scale and shift, give sign * y + shift."""
    weight = sign if layer.weight.ndim == 1 else per_filter(layer, sign)
    layer.weight.mul_(weight.to(layer.weight))
    layer.bias.copy_(sign * layer.bias.double() + shift)


def _match(norm: Any, like: Any, groups: int) -> None:
    """Gamma and beta of a per-sample norm that on an average sample computes what the BatchNorm does."""
    scale, offset = affine.read(like)
    mean, var = group_moments(like.running_mean.double(), like.running_var.double(), groups)
    mean, var = (value.repeat_interleave(scale.numel() // groups) for value in (mean, var))
    norm.weight.copy_(scale * (var + norm.eps).sqrt())
    norm.bias.copy_(offset + scale * mean)
