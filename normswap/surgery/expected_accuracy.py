"""How many of a classifier's right answers a result keeps, told by a few images without labels.

The source's probabilities p = softmax(z) are taken for the truth: an answer k to an image is right with probability
p_k, so that an answer that changes costs what the source itself thinks of the other. How answers change is not counted
on the few images but on their pairs. Over the images, the result's logits are z' = a z + b + r: a number, a vector, and
what is left, least squares; each image is given the r of many others. Margins and errors are told apart that way, and
few images tell what takes several times as many to count. An error is handed on twice, class by class and rank by rank
(what the first choice lost goes to the first choice), and the mean is taken: errors go with classes that are alike, and
with how the source ranks them, and either alone tells too much or too little (tests/lab/benchmarks/kinds.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

PAIRS = 64  # errors that each image is given
PLACES = 64  # of a map, per image
ROWS = 4096


def kept(answers: Sequence[tuple[Tensor, Tensor]], others: Sequence[Tensor] = ()) -> float | None:
    """The result's expected accuracy as a share of the source's.

    Args:
        answers: what source and result said, batch by batch: logits (N, K) or, per place, (N, K, H, W) or with depth.
        others: what the source said of images that tell nothing of the result's errors: the result was fitted to them.

    Returns:
        None of what are no answers (boxes and tokens have three dimensions), of one class, of more in one batch than in
        another, and of fewer than two images.
    """
    classes = {value.shape[1] if value.ndim in (2, 4, 5) else 0 for value in (*itertools.chain(*answers), *others)}
    if not answers or len(classes) != 1 or min(classes) < 2 or any(a.shape != b.shape for a, b in answers):
        return None
    source = torch.cat([places(one).double() for one, _ in answers])[:ROWS]
    result = torch.cat([places(one).double() for _, one in answers])[:ROWS]
    asked = torch.cat([source, *(places(one).double() for one in others)])[:ROWS]
    if len(source) < 2 or not bool(torch.isfinite(result).all() and torch.isfinite(asked).all()):
        return None
    centred, mean = source - source.mean(0), result.mean(0)
    slope = float((centred * (result - mean)).sum() / centred.square().sum().clamp_min(1e-30))
    rest = result - (slope * centred + mean)
    straight, truth = slope * (asked - source.mean(0)) + mean, asked.softmax(1)
    order, held_order = (values.argsort(1, descending=True) for values in (asked, source))
    by_class = (straight, truth, rest)
    by_rank = (straight.gather(1, order), truth.gather(1, order), rest.gather(1, held_order))
    right = [
        chances.gather(1, (line + errors[index]).argmax(1, keepdim=True)).mean()
        for away in range(min(PAIRS, len(rest)))
        for index in [(torch.arange(len(asked)) + away) % len(rest)]
        for line, chances, errors in (by_class, by_rank)
    ]
    return float(torch.stack(right).mean() / truth.amax(1).mean())


def places(answers: Tensor) -> Tensor:
    """The answers (N, K) that count: of maps (N, K, H, W) some places of each image."""
    if answers.ndim < 4:
        return answers
    maps = answers.flatten(2)
    maps = maps[:, :, :: max(maps.shape[2] // PLACES, 1)]
    return maps.transpose(0, 1).flatten(1).T
