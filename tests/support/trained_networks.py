"""The trained networks beside the repository and in the package, and their test images."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import normswap
from support.cifar_tars import unpacked

SHARED = Path(__file__).resolve().parents[3] / "shared"
IMAGES = unpacked(SHARED / "data" / "cifar10" / "test.tar.xz")
NETWORKS = {
    "resnet18_narrow": SHARED / "checkpoints" / "resnet18_narrow",
    "resnetv2_18_narrow": SHARED / "checkpoints" / "resnetv2_18_narrow",
    "demo": Path(normswap.__file__).parent / "demo_data",
}


@torch.inference_mode()
def logits(
    models: list[nn.Module], loader: Iterator[tuple[Tensor, Tensor]]
) -> tuple[list[Tensor], Tensor]:
    """The logits of each model on the same images, and the labels."""
    found: list[list[Tensor]] = [[] for _ in models]
    labels = []
    for images, targets in loader:
        labels.append(targets)
        for model, outputs in zip(models, found, strict=True):
            outputs.append(model(images))
    return [torch.cat(outputs) for outputs in found], torch.cat(labels)
