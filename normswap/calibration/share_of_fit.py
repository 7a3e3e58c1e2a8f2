"""How much of a fit is kept: the share that gives the best answers to held-out images.

A fit to few images may err more on others, and least squares shrinks every layer towards the mean. A share of 0 has the
weights without the fit, 1 those of the fit; between them tensors are interpolated.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normswap.models.calling import Example, named_tensors
from normswap.models.modes import evaluating, undisturbed

# The first of equally good shares is taken.
SHARES = (1.0, 0.5, 0.25, 0.0)

Values = dict[str, Tensor]


@runtime_checkable
class HeldOut(Protocol):
    """Batches of which some images are held out; `held` is complete once the others were read."""

    held: list[Example]


def values_of(model: nn.Module) -> Values:
    """A copy of all that a fit may change."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@torch.no_grad()
def keep_share(source: nn.Module, result: nn.Module, before: Values, held: Sequence[Example]) -> float:
    """Set `result`, in place, to the share of its fit whose answers to `held` are nearest to the source's.

    `before` has its values without the fit. Returns the share; 1 where no images are held out.
    """
    if not held:
        return 1.0
    fitted = values_of(result)
    losses: dict[float, float] = {}
    with undisturbed(source), evaluating(result):
        answers = [dict(named_tensors(example.like(source).call(source))) for example in held]
        for share in SHARES:
            _set(result, before, fitted, share)
            losses[share] = sum(_loss(answer, result, each) for answer, each in zip(answers, held, strict=True))
    best = min(SHARES, key=losses.__getitem__)
    _set(result, before, fitted, best)
    return best


def _set(model: nn.Module, before: Values, fitted: Values, share: float) -> None:
    for name, tensor in model.state_dict().items():
        value = fitted[name] if share else before[name]
        if 0 < share < 1 and tensor.is_floating_point():
            # Interpolating between equal infinities gives NaN.
            value = torch.where(before[name] == value, value, torch.lerp(before[name], value, share))
        tensor.copy_(value)


def _loss(expected: Values, result: nn.Module, example: Example) -> float:
    answers = dict(named_tensors(example.like(result).call(result)))
    if answers.keys() != expected.keys() or any(answers[name].shape != expected[name].shape for name in expected):
        return float("inf")
    floats = [name for name, value in expected.items() if value.is_floating_point()]
    total = sum(float(divergence(expected[name], answers[name])) for name in floats)
    return total if total < float("inf") else float("inf")


def divergence(expected: Tensor, answers: Tensor) -> Tensor:
    """The sum of KL(p || q) over rows of logits (N, K); of anything else |z - z'|^2; float64 ()."""
    expected, answers = expected.double(), answers.double()
    if expected.ndim == 2 and expected.shape[1] > 1:
        return F.kl_div(answers.log_softmax(1), expected.log_softmax(1), reduction="sum", log_target=True)
    return (expected - answers).square().sum()
