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
    """The result of one pass of a network over labelled images.

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
            A batch is a pair (images, labels), a tuple of the network's arguments followed by the
            labels, or a dict of keyword arguments in which the labels are called `labels`.
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
    """Classify every image of `loader`, and measure how many of the classes are right.

    Args:
        model: The network. It runs in eval mode and is not changed.
        loader: Batches of images and labels, as in `evaluate`.
        progress: Called after each batch with the images done and their total (0 when unknown).

    Returns:
        A pair: the measurements, as `evaluate` returns them, and the class with the highest score
        of each image, (N,), in the order of the loader.

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

    # The sums over all images: right by top-1, right by top-5, and the loss.
    sums = torch.zeros(3, dtype=torch.float64)
    answers: list[Tensor] = []
    count = 0
    # This shows how the network takes images: as one tensor, in a list, or in a dict.
    form = calling.form(model)
    with undisturbed(model), torch.inference_mode():
        for batch in loader:
            # Divide the batch into the input of the network and the labels.
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
    """Return the share of images for which two networks predict the same class.

    Args:
        answers: The classes (N,) that one network predicts.
        others: The classes (N,) that the other network predicts.
    """
    return float((answers == others).double().mean())


def _logits(model: nn.Module, example: Example) -> Tensor:
    """Run the network on a batch, and return the class scores (N, classes) in float64 on the CPU.

    Args:
        model: The network.
        example: The input of the network: the batch.

    Raises:
        SourceError: The network does not run on the batch.
        OptionError: The network gives no class scores.
    """
    # `like` moves the tensors to the network's device and dtype. The network gets copies of them,
    # because a forward may write into its input.
    try:
        output = example.like(model).call_on_copies(model)
    # Our own errors are sentences for the user already.
    except NormswapError:
        raise
    # The forward is the user's code, which may raise anything.
    except Exception as error:
        raise SourceError(f"the network does not run on {example}", first_line(error)) from None
    return scores(output).cpu().double()


def _scores_of_batch(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the figures of a batch as a tensor (3,).

    These are the number of images that are right by top-1, the number that are right by top-5, and
    the sum of the cross-entropy.

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

    # `hits` (N, 5) has the classes with the highest scores, the highest in the first column. At
    # most one entry of a row is the label.
    hits = logits.topk(min(5, classes)).indices == labels[:, None]
    loss = cross_entropy(logits, labels, reduction="sum")
    return torch.stack([hits[:, 0].sum(), hits.sum(), loss])
