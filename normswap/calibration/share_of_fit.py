"""How much of a fit is kept: as much as makes the answers to images that it has not seen better.

A layer's fit is least squares on a few images: it errs less on them, and may err more on others. Worse, what is least
in squares is drawn towards the mean, wherever a sample's own statistics make inputs uncertain, and a network whose
every layer is drawn so answers with less than it knows. Both show in the answers to held-out images alone. On the line
from the weights that there were without the fit (a share of 0) to those that it gave (1), the place is taken where
these answers are nearest to the source's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normswap.models.calling import Example, named_tensors
from normswap.models.modes import evaluating

SHARES = (1.0, 0.5, 0.25, 0.0)  # of several that are as good, the first


@runtime_checkable
class HeldOut(Protocol):
    """Batches that keep some images to themselves; they are there once the others were read."""

    held: list[Example]


Values = dict[str, Tensor]


def values_of(model: nn.Module) -> Values:
    """A copy of all that a fit may change."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@torch.no_grad()
def keep_share(source: nn.Module, result: nn.Module, before: Values, held: Sequence[Example]) -> float:
    """Set `result`, in place, to the share of its fit with which its answers to `held` are nearest to the source's.

    Args:
        before: its values without the fit.

    Returns:
        The share; 1 where there are no images to choose on.
    """
    if not held:
        return 1.0
    fitted = values_of(result)
    with evaluating(source, result):
        wanted = [dict(named_tensors(example.like(source).call(source))) for example in held]
        losses = []
        for share in SHARES:
            _set(result, before, fitted, share)
            losses.append(sum(_loss(one, result, example) for one, example in zip(wanted, held, strict=True)))
    best = min(range(len(SHARES)), key=losses.__getitem__)
    _set(result, before, fitted, SHARES[best])
    return SHARES[best]


def _set(model: nn.Module, before: Values, fitted: Values, share: float) -> None:
    for name, tensor in model.state_dict().items():
        old, new = before[name], fitted[name]
        if 0 < share < 1 and tensor.is_floating_point():
            new = torch.where(old == new, new, torch.lerp(old, new, share))  # of two infinities nothing is between
        tensor.copy_(new if share else old)


def _loss(wanted: Values, result: nn.Module, example: Example) -> float:
    """Over the images, summed; not a number, where they cannot be compared, is more than any."""
    answers = dict(named_tensors(example.like(result).call(result)))
    if answers.keys() != wanted.keys() or any(answers[name].shape != value.shape for name, value in wanted.items()):
        return float("inf")
    parts = [divergence(value, answers[name]) for name, value in wanted.items() if value.is_floating_point()]
    total = float(torch.stack(parts).sum()) if parts else 0.0
    return total * example.count if total < float("inf") else float("inf")


def divergence(wanted: Tensor, answers: Tensor) -> Tensor:
    """The mean of KL(p || q) over rows of logits (N, K); of anything else |z - z'|^2 / |z|^2; float64 ()."""
    wanted, answers = wanted.double(), answers.double()
    if wanted.ndim == 2 and wanted.shape[1] > 1:
        return F.kl_div(answers.log_softmax(1), wanted.log_softmax(1), reduction="batchmean", log_target=True)
    return (wanted - answers).square().sum() / wanted.square().sum().clamp_min(1e-30)
