"""How many of a classifier's right answers a result keeps, told by a few images without labels.

The source's probabilities p = softmax(z) are taken for the truth: an answer k to an image is right with probability
p_k, so that an answer that changes costs what the source itself thinks of the other. How answers change is not counted
on the few images but on their pairs. Over the images, the result's logits are z' = a z + b + r: a number, a vector, and
what is left, least squares; each image is given the r of many others. Errors are told from margins that way, and 25
images tell as much as some hundreds that are counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PAIRS = 64  # errors that each image is given
PLACES = 64  # of a map, per image
ROWS = 4096


def kept(answers: Sequence[tuple[Tensor, Tensor]]) -> float | None:
    """The result's expected accuracy as a share of the source's.

    Args:
        answers: what source and result said, batch by batch: logits (N, K) or, per place, (N, K, ...).

    Returns:
        None of what are no answers: no second dimension, one class, or fewer than two images.
    """
    pairs = [(_rows(a), _rows(b)) for a, b in answers if a.shape == b.shape and a.ndim >= 2 and a.shape[1] >= 2]
    if not pairs or len(pairs) < len(answers):
        return None
    source, result = (torch.cat(parts)[:ROWS] for parts in zip(*pairs, strict=True))
    if len(source) < 2 or not bool(torch.isfinite(result).all() and torch.isfinite(source).all()):
        return None
    centred, mean = source - source.mean(0), result.mean(0)
    slope = float((centred * (result - mean)).sum() / centred.square().sum().clamp_min(1e-30))
    straight = slope * centred + mean
    rest, truth = result - straight, source.softmax(1)
    right = torch.stack(
        [
            truth.gather(1, (straight + rest.roll(away, 0)).argmax(1, keepdim=True)).sum()
            for away in range(min(PAIRS, len(rest)))
        ]
    )
    return float(right.mean() / truth.amax(1).sum())


def _rows(answers: Tensor) -> Tensor:
    """(N, K) in float64; of maps some places of each image."""
    if answers.ndim == 2:
        return answers.double()
    maps = answers.flatten(2)
    maps = maps[:, :, :: max(maps.shape[2] // PLACES, 1)]
    return maps.transpose(0, 1).flatten(1).T.double()
