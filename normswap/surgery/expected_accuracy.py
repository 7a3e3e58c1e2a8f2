"""How many of a classifier's right answers a result keeps, told by a few images without labels.

The source's probabilities p = softmax(z) are taken for the truth: an answer k to an image is right with probability
p_k, so that an answer that changes costs what the source itself thinks of the other. Over the images, the result's
logits are z' = a z + b + r: a number, a vector, and what is left, least squares.

Counted, each image has its own r: that is right on average, and of few images uncertain. Handed on, each image is given
the r of many others, class by class and rank by rank (what the first choice lost goes to the first choice), and the
mean is taken: that is hardly uncertain, and wrong where errors go with images, as they do at a thousand classes. From
what is handed on the way is gone towards what is counted as far as they differ by more than chance does (the
positive-part estimate of James & Stein 1961; chance by the jackknife over the images).

Images that the result was fitted to count as well: their r are as much larger as those of the held-out ones are.

What is uncertain by more than `UNSURE`, by the jackknife over the images, is not told.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

PAIRS = 64  # errors that each image is given
PLACES = 64  # of a map, per image
ROWS = 4096
FEWEST = 4  # images, to tell what chance does
UNSURE = 0.03  # the largest standard error of a share that is told

Answers = Sequence[tuple[Tensor, Tensor]]


def kept(answers: Answers, others: Answers = ()) -> float | None:
    """The share of the source's accuracy that is expected; None where it is not known (`estimated`), or unsure."""
    share = estimated(answers, others)
    return share[0] if share is not None and share[1] <= UNSURE else None


def estimated(answers: Answers, fitted_answers: Answers = ()) -> tuple[float, float] | None:
    """The result's expected accuracy as a share of the source's, and its standard error.

    Args:
        answers: what source and result said, batch by batch: logits (N, K) or, per place, (N, K, H, W) or with depth.
        fitted_answers: what they said of images that the result was fitted to.

    Returns:
        None of what are no answers (boxes and tokens have three dimensions), of one class, of more in one batch than in
        another, and of fewer than two images.
    """
    pairs = [*answers, *fitted_answers]
    classes = {value.shape[1] if value.ndim in (2, 4, 5) else 0 for value in itertools.chain(*pairs)}
    if not answers or len(classes) != 1 or min(classes) < 2 or any(a.shape != b.shape for a, b in pairs):
        return None
    source, result = _joined(answers)
    if len(source) < 2:
        return None
    centre, mean = source.mean(0), result.mean(0)
    slope = float(((source - centre) * (result - mean)).sum() / (source - centre).square().sum().clamp_min(1e-30))
    straight = slope * (source - centre) + mean
    rest = result - straight
    if fitted_answers:
        source_there, result_there = _joined(fitted_answers)
        straight_there = slope * (source_there - centre) + mean
        fitted = result_there - straight_there
        variance = rest.square().sum(0).mean() / (len(rest) - 1)  # their mean is taken off
        larger = (variance / fitted.square().mean().clamp_min(1e-30)).sqrt().clamp_min(1)
        source, straight, rest = (
            torch.cat(parts)[:ROWS]
            for parts in ((source, source_there), (straight, straight_there), (rest, larger * fitted))
        )
    if not bool(torch.isfinite(rest).all()):
        return None
    return _share(source, straight, rest)


def _joined(answers: Answers) -> tuple[Tensor, Tensor]:
    source, result = (torch.cat([places(part).double() for part in one])[:ROWS] for one in zip(*answers, strict=True))
    return source, result


def _share(source: Tensor, straight: Tensor, rest: Tensor) -> tuple[float, float]:
    """The share that is kept, from logits of the source, of the result without errors, and the errors; (N, K).

    And its standard error; infinite of images that are too few.
    """
    truth, order, count = source.softmax(1), source.argsort(1, descending=True), len(source)
    by_class = (straight, truth, rest)
    by_rank = (straight.gather(1, order), truth.gather(1, order), rest.gather(1, order))
    top, at = truth.amax(1), torch.arange(count)
    each = truth.gather(1, (straight + rest).argmax(1, keepdim=True))[:, 0]
    distances = range(1, min(PAIRS, count))
    receiving, giving = torch.zeros(count).to(each), torch.zeros(count).to(each)
    for away in distances:
        giver = (at + away) % count
        for line, chances, errors in (by_class, by_rank):
            right = chances.gather(1, (line + errors[giver]).argmax(1, keepdim=True))[:, 0] / (2 * len(distances))
            receiving += right
            giving[giver] += right
    counted, handed_on = each.sum() / top.sum(), receiving.sum() / top.sum()
    if count < FEWEST:
        return float(handed_on), float("inf")
    # both again without each image, which gives its error to as many others as give theirs to it
    without = top.sum() - top
    handed_without = (receiving.sum() - receiving - giving) * (count - 1) / (count - 2)
    again = (each.sum() - each - handed_without) / without
    chance = _jackknifed(again)

    def between(start: Tensor, apart: Tensor) -> Tensor:
        return start + (1 - chance / apart.square().clamp_min(1e-30)).clamp_min(0) * apart

    share = between(handed_on, counted - handed_on)
    return float(share), float(_jackknifed(between(handed_without / without, again)).sqrt())


def _jackknifed(without: Tensor) -> Tensor:
    """The variance of what these numbers (N,) were without each image."""
    return (without - without.mean()).square().sum() * (len(without) - 1) / len(without)


def places(answers: Tensor) -> Tensor:
    """The answers (N, K) that count: of maps (N, K, H, W) some places of each image."""
    if answers.ndim < 4:
        return answers
    maps = answers.flatten(2)
    maps = maps[:, :, :: max(maps.shape[2] // PLACES, 1)]
    return maps.transpose(0, 1).flatten(1).T
