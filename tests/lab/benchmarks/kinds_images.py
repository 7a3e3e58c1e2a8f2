"""The CIFAR-10 images as the networks of the zoo take them, in memory: `zoo_networks.FRONTS`,
pasted pictures.
"""

import torch
from schemes_table import cached, shuffled
from support.zoo_networks import FRONTS, PREPROCESSING
from torch import Tensor

TEST = 10_000
CALIBRATION = 3000  # images that are kept of each set
Pair = tuple[Tensor, Tensor]


def images(split: str) -> Pair:
    """Normalized images (N, 3, 32, 32) and labels: `test`, or `train`, drawn once and kept."""
    count = TEST if split == "test" else CALIBRATION
    pair: Pair = cached(f"zoo-{split}-{count}", lambda: shuffled(PREPROCESSING, split, count))
    return pair


def of_kind(kind: str, split: str) -> Pair:
    """What a network of the zoo takes, and the labels (N,), or (N, H, W) per pixel."""
    seen, labels = images(split)
    if kind == "unet":
        return pasted(seen, torch.Generator().manual_seed(int(split == "test")))
    front = FRONTS.get(kind)
    return (front()(seen) if front else seen), labels


def pasted(pictures: Tensor, generator: torch.Generator) -> Pair:
    """Into each picture an ellipse of a second and a rectangle of a third; the labels are 0, 1 and
    2, (N, H, W).
    """
    count, _, height, width = pictures.shape
    order = [torch.randperm(count, generator=generator) for _ in range(2)]
    made = pictures.clone()
    labels = torch.zeros(count, height, width, dtype=torch.long)

    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    for label, other in enumerate(order, 1):
        middle = torch.rand(2, count, 1, 1, generator=generator) * 16 + 8
        radius = torch.rand(2, count, 1, 1, generator=generator) * 5 + 5
        down = ((rows - middle[0]) / radius[0]).abs()
        across = ((columns - middle[1]) / radius[1]).abs()
        inside = (
            down.square() + across.square() < 1 if label == 1 else torch.maximum(down, across) < 0.8
        )
        made = torch.where(inside[:, None], pictures[other].flip(-1), made)
        labels[inside] = label

    return made, labels


def score(outputs: Tensor, labels: Tensor) -> float:
    """Top-1 in percent; for maps of classes, the mean intersection over union in percent."""
    found = outputs.argmax(1)
    if labels.ndim == 1:
        return 100 * float((found == labels).double().mean())
    classes = range(outputs.shape[1])
    shares = [
        float(((found == c) & (labels == c)).sum() / ((found == c) | (labels == c)).sum())
        for c in classes
    ]
    return 100 * sum(shares) / len(shares)
