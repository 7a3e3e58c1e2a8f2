"""How many of a classifier's right answers a result keeps, told by a few images without labels.

The source's probabilities p = softmax(z) are taken for the truth: an answer k to an image is right with probability
p_k, so that an answer that changes costs what the source itself thinks of the other. Over images that nothing was
fitted to, the result's logits are z' = a z + b + r: a number, a vector, and what is left, least squares.

Handed on, every image is given the r of each of these, rank by rank: what the first choice lost goes to the first
choice. Of that only the source's logits are asked, so that images that the result was fitted to receive as well. It is
hardly uncertain, and wrong where errors go with images. Counted, each image has its own r: right on average, and of few
images uncertain. What is counted weighs the more, the more images there are.

The least is what both allow with two standard errors, without `LOST` of the answers that change, `MORE` images among
them: many a source is surer than its probabilities say, and few images do not say that none changes. A share that is
far above its least is not told.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PLACES = 16  # of a map, per image
FEWEST = 12  # images that an accuracy is told by: six may all be of those that hardly change
MANY = 100  # of so many, what is counted weighs as much as what is handed on
LOST, MORE = 0.1, 2  # what is lost of answers that change; images that change with those that do
HIGH = 0.9  # a share that may be above this is told where it is known to `NEAR`, others where it is to `NEAR_BELOW`
NEAR, NEAR_BELOW = 0.02, 0.05


@dataclass(frozen=True)
class Expected:
    """The result's accuracy as a share of the source's.

    Args:
        share: what is expected.
        error: its standard error.
        least: with 97.5 % confidence.
    """

    share: float
    error: float
    least: float

    @property
    def told(self) -> float | None:
        """The share, where the images tell it."""
        near = NEAR if self.share + 2 * self.error >= HIGH else NEAR_BELOW
        return self.share if self.share - self.least <= near else None


def expected(answers: Sequence[tuple[Tensor, Tensor]], others: Sequence[Tensor] = ()) -> Expected | None:
    """Estimate what the result keeps of the source's accuracy.

    Args:
        answers: what source and result said of images that the result was not fitted to, batch by batch (`places`).
        others: what the source said of images that it was fitted to.

    Returns:
        None of less than `FEWEST` images, of one class, of more in one batch than in another, and of no finite numbers.
    """
    if len({value.shape[1:] for value in (*itertools.chain(*answers), *others)}) != 1:
        return None
    source, result = (torch.cat(part).double() for part in zip(*answers, strict=True))
    asked = torch.cat([source, *(other.double() for other in others)])
    finite = bool(torch.isfinite(result).all() & torch.isfinite(asked).all())
    if len(source) < FEWEST or source.shape[1] < 2 or not finite:
        return None
    centre, mean = (logits.mean((0, 2), keepdim=True) for logits in (source, result))
    slope = ((source - centre) * (result - mean)).sum() / (source - centre).square().sum().clamp_min(1e-30)
    straight = slope * (asked - centre) + mean
    right, same = _handed_on(asked, straight, result - straight[: len(source)])
    chances = asked.softmax(1)
    counted = chances[: len(source)].gather(1, result.argmax(1, keepdim=True)).mean((1, 2))
    share, error, least = _combined(right, counted, chances.amax(1).mean(1))
    changed = ((1 - same) * len(source) + MORE) / (len(source) + MORE)
    return Expected(share, error, max(least - LOST * changed, 0.0))


def _handed_on(asked: Tensor, straight: Tensor, rest: Tensor) -> tuple[Tensor, float]:
    """The chance that each image's answer is right with each one's errors (N, G), and how often it is the source's."""
    order = asked.argsort(1, descending=True)
    chances, logits = asked.softmax(1).gather(1, order), straight.gather(1, order)
    right, same = [], []
    for errors in rest.gather(1, order[: len(rest)]):
        rank = (logits + errors).argmax(1, keepdim=True)
        right.append(chances.gather(1, rank).mean((1, 2)))
        same.append((rank == 0).double().mean())
    return torch.stack(right, 1), float(torch.stack(same).mean())


def _combined(right: Tensor, counted: Tensor, best: Tensor) -> tuple[float, float, float]:
    """The share between what is handed on and what is counted, its standard error, and the least that both allow.

    Args:
        right: chances of right answers, handed on (N, G): the first G images give their errors to all N.
        counted: with each one's own (G,).
        best: of the source's answers (N,).
    """
    givers, best_of_givers = len(counted), best[: len(counted)]
    weight = givers / (givers + MANY)
    handed_on, alone = right.mean() / best.mean(), counted.mean() / best_of_givers.mean()
    # how much each image moves the two: as one that receives, as one that gives; as one that is counted
    handing, counting = (right.mean(1) - handed_on * best) / (best.mean() * len(best)), torch.zeros_like(best)
    handing[:givers] += (right.mean(0) - right.mean()) / (best.mean() * givers)
    counting[:givers] = (counted - alone * best_of_givers) / (best_of_givers.mean() * givers)
    share, moves = handed_on + weight * (alone - handed_on), (1 - weight) * handing + weight * counting
    error, error_alone = ((part.square().sum() * givers / (givers - 1)).sqrt() for part in (moves, counting))
    return float(share.clamp_max(1)), float(error), float(torch.minimum(share - 2 * error, alone - 2 * error_alone))


def places(answers: Tensor) -> Tensor:
    """The answers (N, K, P) that count: of maps (N, K, H, W), or with depth, some places of each image, else one.

    Boxes and tokens, which have three dimensions, are no answers: of them there is none (N, 0, P).
    """
    if answers.ndim == 3:
        return answers[:, :0]
    if answers.ndim == 2:
        return answers[:, :, None]
    maps = answers.flatten(2)
    return maps[:, :, torch.linspace(0, maps.shape[2] - 1, PLACES).round().long()]
