"""How well a network classifies labelled images (top-1, top-5, loss, speed), and how often two
agree.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from normswap.errors import NormswapError, SourceError, first_line
from normswap.models import calling
from normswap.models.modes import Progress, undisturbed
from normswap.models.network_input import scores


@dataclass(frozen=True)
class Evaluation:
    """One pass over `count` images: top-1 and top-5 in percent, mean cross-entropy, images a second
    with loading.
    """

    top1: float
    top5: float
    loss: float
    count: int
    images_per_s: float


def evaluate(
    model: nn.Module, loader: Iterable[object], *, progress: Progress | None = None
) -> Evaluation:
    """Return top-1, top-5 and loss on the batches of `loader`; arguments and errors are those of
    `classify`.
    """
    return classify(model, loader, progress=progress)[0]


def classify(
    model: nn.Module, loader: Iterable[object], *, progress: Progress | None = None
) -> tuple[Evaluation, Tensor]:
    """Classify every image of `loader` in eval mode; also gives the answers (N,) in its order.

    Args:
        loader: batches of images (N, C, H, W), or of whatever the network takes, and labels (N,):
            as pairs, after its arguments, or as "labels" in a dict of keywords.
        progress: called after each batch with the images done and their total (0 when unknown).

    Raises SourceError: no images, none that it takes, or no labels of its classes; OptionError: it
    does not classify.
    """
    total = getattr(loader, "count", 0)
    start = time.perf_counter()
    if not isinstance(total, int):
        total = 0
    sums = torch.zeros(3, dtype=torch.float64)
    answers: list[Tensor] = []
    count = 0
    form = calling.form(model)
    with undisturbed(model), torch.inference_mode():
        for batch in loader:
            example, labels = form.read(batch)
            try:
                output = example.like(model).call(model)
            except NormswapError:
                raise
            except Exception as error:
                raise SourceError(
                    f"the network does not run on {example}", first_line(error)
                ) from None
            logits = scores(output).cpu().double()
            if not isinstance(labels, Tensor) or labels.shape != logits.shape[:1]:
                raise SourceError(
                    "a batch without a label for each image", remedy="Give pairs (images, labels)"
                )
            sums += _score(logits, labels.cpu())
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
    """Compute the fraction of images with the same answer."""
    return float((answers == others).double().mean())


def unit(scores: Tensor) -> str:
    """Give the word for what each answer in (N, classes, ...) is about: an image, or a place in its
    map.
    """
    return {2: "images", 4: "pixels", 5: "voxels"}.get(scores.ndim, "places")


def _score(logits: Tensor, labels: Tensor) -> Tensor:
    classes = logits.shape[1]
    if labels.min() < 0 or labels.max() >= classes:
        wrong = labels[(labels < 0) | (labels >= classes)][0]
        raise SourceError(f"label {int(wrong)} is no class of this network", f"it has {classes}")
    best = logits.topk(min(5, classes)).indices == labels[:, None]
    return torch.stack(
        [best[:, 0].sum(), best.sum(), cross_entropy(logits, labels, reduction="sum")]
    )
