"""How many of a classifier's right answers a result keeps, told by a few images without labels.

The source's probabilities p = softmax(z) are taken for the truth: an answer k to an image is right with probability
p_k, so that an answer that changes costs what the source itself thinks of the other. How answers change is not counted
on the few images but on their pairs. Over the images, the result's logits are z' = a z + b + r: a number, a vector, and
what is left, least squares; each image is given the r of many others. Margins and errors are told apart that way, and
few images tell what takes several times as many to count.
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
        answers: what source and result said, batch by batch: logits (N, K) or, per place, (N, K, H, W) or with depth.

    Returns:
        None of what are no answers (boxes and tokens have three dimensions), of one class, of more in one batch than in
        another, and of fewer than two images.
    """
    classes = {value.shape[1] if value.ndim in (2, 4, 5) else 0 for pair in answers for value in pair}
    if len(classes) != 1 or min(classes) < 2 or any(a.shape != b.shape for a, b in answers):
        return None
    pairs = [(places(a).double(), places(b).double()) for a, b in answers]
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


def places(answers: Tensor) -> Tensor:
    """The answers (N, K) that count: of maps (N, K, H, W) some places of each image."""
    if answers.ndim < 4:
        return answers
    maps = answers.flatten(2)
    maps = maps[:, :, :: max(maps.shape[2] // PLACES, 1)]
    return maps.transpose(0, 1).flatten(1).T
