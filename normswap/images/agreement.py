"""Networks on labelled images, one by one, with what each of them answered: how often do two agree?"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from normswap.images.accuracy import Evaluation, Progress, evaluate
from normswap.models.network_input import scores


def classify(
    model: nn.Module, loader: Iterable[object], *, progress: Progress | None = None
) -> tuple[Evaluation, Tensor]:
    """The evaluation of `model`, and its answers (N,) in the order of the loader.

    Args:
        loader, progress: as in `evaluate`.

    Raises:
        SourceError: no images, or a label that is no class of the network.
    """
    answers: list[Tensor] = []

    def keep(_module: nn.Module, _args: object, output: object) -> None:
        answers.append(scores(output).argmax(1).cpu())

    handle = model.register_forward_hook(keep)
    try:
        result = evaluate(model, loader, progress=progress)
    finally:
        handle.remove()
    return result, torch.cat(answers)


def agreement(one: Tensor, two: Tensor) -> float:
    """The fraction of images with the same answer."""
    return float((one == two).double().mean())


def unit(scores: Tensor) -> str:
    """The word for what each answer in (N, classes, ...) is about: an image, or a place in its map."""
    return {2: "images", 4: "pixels", 5: "voxels"}.get(scores.ndim, "places")
