"""How well a network classifies labelled images, and how often two networks agree."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from normswap.errors import NormswapError, SourceError, first_line
from normswap.models import calling
from normswap.models.calling import Example
from normswap.models.modes import Progress, undisturbed
from normswap.models.network_input import scores


@dataclass(frozen=True)
class Evaluation:
    """One pass over labelled images.

    Args:
        top1: The share of images whose label has the highest score, in percent.
        top5: The share of images whose label is among the five highest scores, in percent.
        loss: The mean cross-entropy.
        count: The number of images.
        images_per_s: Images a second, with the time for loading them.
    """

    top1: float
    top5: float
    loss: float
    count: int
    images_per_s: float


def evaluate(
    model: nn.Module, loader: Iterable[object], *, progress: Progress | None = None
) -> Evaluation:
    """Return top-1, top-5 and loss on the batches of `loader`.

    Args:
        model: The network. It runs in eval mode and is not changed.
        loader: Batches of images (N, C, H, W), or of whatever the network takes, and labels (N,).
            The labels are the second of a pair, the last after the network's arguments, or
            "labels" in a dict of keywords.
        progress: Called after each batch with the images done and their total (0 when unknown).

    Raises:
        SourceError: There are no images, the network does not take them, or a label is no class of
            the network.
        OptionError: The network does not classify.
    """
    return classify(model, loader, progress=progress)[0]


def classify(
    model: nn.Module, loader: Iterable[object], *, progress: Progress | None = None
) -> tuple[Evaluation, Tensor]:
    """Classify every image of `loader`.

    Args:
        model: The network. It runs in eval mode and is not changed.
        loader: Batches of images and labels, as in `evaluate`.
        progress: Called after each batch with the images done and their total (0 when unknown).

    Returns:
        The measurements, as `evaluate` returns them, and the answers (N,): the class with the
        highest score of each image, in the order of the loader.

    Raises:
        SourceError: There are no images, the network does not take them, or a label is no class of
            the network.
        OptionError: The network does not classify.
    """
    total = getattr(loader, "count", 0)
    start = time.perf_counter()
    # A loader may not know its number of images, and the `count` of a list is a method.
    if not isinstance(total, int):
        total = 0

    sums = torch.zeros(3, dtype=torch.float64)
    answers: list[Tensor] = []
    count = 0
    form = calling.form(model)
    with undisturbed(model), torch.inference_mode():
        for batch in loader:
            example, labels = form.read(batch)
            logits = _logits(model, example)
            if not isinstance(labels, Tensor) or labels.shape != logits.shape[:1]:
                raise SourceError(
                    "a batch without a label for each image", remedy="Give pairs (images, labels)"
                )

            sums += _scores_of_batch(logits, labels.cpu())
            answers.append(logits.argmax(1))
            count += len(labels)
            if progress is not None:
                progress(count, total)

    if not count:
        raise SourceError("no images to evaluate on")
    top1, top5, loss = (sums / count).tolist()
    speed = count / (time.perf_counter() - start)
    return Evaluation(100 * top1, 100 * top5, loss, count, speed), torch.cat(answers)


def agreement(answers: Tensor, others: Tensor) -> float:
    """Return the share of images to which two networks give the same answer.

    Args:
        answers: The classes (N,) that one network gives.
        others: The classes (N,) that the other network gives.
    """
    return float((answers == others).double().mean())


def _logits(model: nn.Module, example: Example) -> Tensor:
    """Return the scores of classes (N, classes) in float64, on the CPU."""
    try:
        output = example.like(model).call_on_copies(model)
    except NormswapError:
        raise
    # The forward is the user's code, which may raise anything.
    except Exception as error:
        raise SourceError(f"the network does not run on {example}", first_line(error)) from None
    return scores(output).cpu().double()


def _scores_of_batch(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the counts of images right by top-1 and top-5, and the summed cross-entropy, (3,).

    Args:
        logits: The scores (N, classes).
        labels: The numbers (N,) of the right classes.

    Raises:
        SourceError: A label is no class of the network.
    """
    classes = logits.shape[1]
    if labels.min() < 0 or labels.max() >= classes:
        wrong = labels[(labels < 0) | (labels >= classes)][0]
        raise SourceError(f"label {int(wrong)} is no class of this network", f"it has {classes}")

    # The first column is the class with the highest score. At most one column is right.
    hits = logits.topk(min(5, classes)).indices == labels[:, None]
    loss = cross_entropy(logits, labels, reduction="sum")
    return torch.stack([hits[:, 0].sum(), hits.sum(), loss])
