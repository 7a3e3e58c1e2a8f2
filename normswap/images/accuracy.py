"""How well a network classifies: top-1, top-5, loss and speed over one pass of labelled images."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from normswap.errors import NormswapError, SourceError, first_line
from normswap.models import calling
from normswap.models.calling import Example
from normswap.models.modes import Progress, evaluating
from normswap.models.network_input import scores


@dataclass(frozen=True)
class Evaluation:
    """One pass.

    Args:
        top1: percentage of images whose best class is right.
        top5: percentage with the right class among the best five (among all, for fewer classes).
        loss: mean cross-entropy.
        count: number of images.
        images_per_s: images per second of wall time, loading included.
    """

    top1: float
    top5: float
    loss: float
    count: int
    images_per_s: float


def evaluate(
    model: nn.Module,
    loader: Iterable[object],
    *,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Classify every image of `loader` in eval mode; the modes and the device of `model` are restored.

    Args:
        model: gives logits (N, classes), perhaps among other things.
        loader: batches of images (N, C, H, W), or of whatever the network takes, and labels (N,): as pairs, after its
            arguments, or as "labels" in a dict of keywords.
        device: where to run; None where the model is.
        progress: called after each batch with the images done and their total (0 when unknown).

    Raises:
        SourceError: no images, none that it takes, no labels, or a label that is no class of the network.
        OptionError: it does not classify images.
    """
    tensors = (*model.parameters(), *model.buffers())
    home = next((tensor for tensor in tensors if tensor.is_floating_point()), torch.empty(0))
    where = home.device if device is None else torch.device(device)
    try:
        with evaluating(model.to(where)), torch.inference_mode():
            return _pass(model, loader, where, home.dtype, progress)
    finally:
        model.to(home.device)


def _pass(
    model: nn.Module,
    loader: Iterable[object],
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None,
) -> Evaluation:
    sums = torch.zeros(3, dtype=torch.float64)  # hits of the best, hits among the best five, loss
    known = getattr(loader, "count", None)  # a list has a method of that name
    count, total, start = 0, known if isinstance(known, int) else 0, time.perf_counter()
    form = calling.form(model)
    for batch in loader:
        example, labels = form.read(batch)
        logits = scores(_run(model, example.to(device, dtype))).cpu().double()
        if not isinstance(labels, Tensor) or labels.shape != logits.shape[:1]:
            raise SourceError("a batch without a label for each image", remedy="Give pairs (images, labels)")
        sums += _score(logits, labels.cpu())
        count += len(labels)
        if progress is not None:
            progress(count, total)
    if not count:
        raise SourceError("no images to evaluate on")
    top1, top5, loss = (sums / count).tolist()
    return Evaluation(100 * top1, 100 * top5, loss, count, count / (time.perf_counter() - start))


def _run(model: nn.Module, example: Example) -> object:
    try:
        return example.call(model)
    except NormswapError:
        raise
    except Exception as error:  # whatever the network raises
        raise SourceError(f"the network does not run on {example}", first_line(error)) from None


def _score(logits: Tensor, labels: Tensor) -> Tensor:
    classes = logits.shape[1]
    if labels.min() < 0 or labels.max() >= classes:
        wrong = labels[(labels < 0) | (labels >= classes)][0]
        raise SourceError(f"label {int(wrong)} is no class of this network", f"it has {classes}")
    best = logits.topk(min(5, classes)).indices == labels[:, None]
    return torch.stack([best[:, 0].sum(), best.sum(), cross_entropy(logits, labels, reduction="sum")])
