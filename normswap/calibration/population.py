"""Population statistics of BatchNorm, estimated anew (Ioffe & Szegedy 2015, arXiv:1502.03167, algorithm 2, lines 8-10).

The network runs as in training, each norm on the statistics of its batch, over batches of one size. Per norm and
channel, with m values in a batch:

    E[x] = mean over batches of mu_B,      Var[x] = m / (m - 1) * mean over batches of sigma_B^2

Weights stay; dropout and the like are off. Memory holds two numbers per channel.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import norm_act
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normswap.calibration.checked_batches import checked, misfit
from normswap.errors import RefusedError, SourceError, VerificationError
from normswap.layers.site_norm import SiteNorm
from normswap.models.calling import Example
from normswap.models.modes import Progress, evaluating, hooked

_FORWARDS = {_BatchNorm.forward, SiteNorm.forward, norm_act.BatchNormAct2d.forward}
_REMEDY = "Only norms that take statistics of the batch in training have some to estimate"


@dataclass(frozen=True)
class Pass:
    """The counts of a pass: norms, images and batches, and the images of a last, smaller batch that was left out."""

    norms: int
    images: int
    batches: int
    left_out: int


@dataclass
class _StatisticsSums:
    """Sums over batches of one norm's batch means and unbiased variances, float64 (C,)."""

    count: int
    mean: Tensor
    variance: Tensor


def norms_of(model: nn.Module) -> dict[str, _BatchNorm]:
    """The norms that have statistics to estimate, by path.

    Raises:
        RefusedError: there is none, or one computes something unknown in training.
    """
    norms: dict[str, _BatchNorm] = {}
    for path, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            continue
        if type(module).forward not in _FORWARDS or "forward" in vars(module):
            raise RefusedError(f"cannot estimate {path}", f"what a {type(module).__name__} does in training is unknown")
        if module.running_mean is not None and module.running_var is not None:
            norms[path] = module
    if not norms:
        raise RefusedError("the network has no BatchNorm with running statistics", remedy=_REMEDY)
    return norms


@torch.no_grad()
def estimate_population(model: nn.Module, batches: Iterable[object], progress: Progress | None = None) -> Pass:
    """Set running mean and variance of every BatchNorm of `model`, in place, from batches of images.

    Args:
        batches: what it takes (`Example.read`), such as images (N, C, H, W) or (images, labels); read once. A last
            batch that is smaller is left out.
        progress: called after each batch with the batches done and their total (0 when unknown).

    Raises:
        RefusedError: see `norms_of`.
        SourceError: unusable images, or batches of less than two.
        VerificationError: the network gives values that are not finite.
    """
    norms = norms_of(model)
    total = operator.length_hint(batches)
    images = count = left_out = first = 0
    with _as_in_training(model, norms) as sums:
        for i, example in enumerate(checked(model, batches)):
            size = example.count
            first = first or size
            if size < 2 and not count:
                raise SourceError(f"a batch of {size} image", "the statistics of a batch need at least two")
            if left_out:
                reason = f"the first had {first}, and only the last may have fewer"
                raise SourceError(f"calibration batch {i - 1} has {left_out} images", reason)
            if size > first:
                raise SourceError(f"calibration batch {i} has {size} images", f"the first had {first}")
            if size < first:
                left_out = size
                continue
            _run(model, example)
            images, count = images + size, count + 1
            if progress is not None:
                progress(count, total)
    if not count:
        raise SourceError("0 calibration images", "at least 2 are needed")
    for path, norm in norms.items():
        _set(path, norm, sums.get(path))
    return Pass(len(norms), images, count, left_out)


def _run(model: nn.Module, example: Example) -> None:
    try:
        example.call(model)
    except Exception as error:  # whatever the network raises
        raise misfit(error, "the network does not run on these images as in training") from None


@contextmanager
def _as_in_training(model: nn.Module, norms: dict[str, _BatchNorm]) -> Iterator[dict[str, _StatisticsSums]]:
    """The norms, and nothing else, in training mode; what reaches each is summed up. All is put back afterwards."""
    sums: dict[str, _StatisticsSums] = {}
    tracked = {path: {name: buffer.clone() for name, buffer in norm.named_buffers(recurse=False)}
               for path, norm in norms.items()}  # fmt: skip
    handles = (norm.register_forward_pre_hook(_adding(sums, path)) for path, norm in norms.items())
    try:
        with evaluating(model), hooked(handles):
            for norm in norms.values():
                norm.training = True
            yield sums
    finally:
        for path, norm in norms.items():
            for name, buffer in tracked[path].items():
                getattr(norm, name).copy_(buffer)


def _adding(sums: dict[str, _StatisticsSums], path: str) -> Callable[..., None]:
    def hook(norm: nn.Module, args: tuple[Tensor, ...]) -> None:
        sizes = norm.ghost_sizes(len(args[0])) if isinstance(norm, SiteNorm) else len(args[0])
        for part in args[0].split(sizes):
            values = part.detach().double().transpose(0, 1).flatten(1)
            if values.shape[1] < 2:
                raise SourceError(f"{path} sees one value per channel in a batch", "its variance is not defined")
            mean, variance = values.mean(1), values.var(1, correction=1)
            if path not in sums:
                sums[path] = _StatisticsSums(0, torch.zeros_like(mean), torch.zeros_like(mean))
            held = sums[path]
            held.count += 1
            held.mean += mean
            held.variance += variance

    return hook


def _set(path: str, norm: Any, sums: _StatisticsSums | None) -> None:
    if sums is None:  # never called
        return
    mean, variance = sums.mean / sums.count, sums.variance / sums.count
    if not bool(torch.isfinite(mean).all() and torch.isfinite(variance).all()):
        raise VerificationError(f"the statistics of {path} are not finite on these images")
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(variance)
