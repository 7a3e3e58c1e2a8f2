"""Pictures to segment and to detect in: two CIFAR-10 objects on a canvas of coloured clouds, and
where they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from schemes_table import NETWORKS, archive, read
from torch import Tensor

from normswap.storage.checkpoint import open_model

NETWORK = "resnet18_narrow"
SIDE = 64
OBJECTS = 2
CLASSES = ("ground", "vehicle", "animal")
_KINDS = torch.tensor([1, 1, 2, 2, 2, 2, 2, 2, 1, 1])  # of CIFAR-10's classes, in their order
_SMALLEST = 28
_LARGEST = 44  # sides of an object, in pixels


@dataclass(frozen=True)
class Canvases:
    """Pictures (N, 3, 64, 64), normalized; masks (N, 64, 64) of `CLASSES`; boxes (N, 2, 4) in
    pixels and their classes (N, 2).
    """

    pictures: Tensor
    masks: Tensor
    boxes: Tensor
    classes: Tensor

    def part(self, chosen: slice | Tensor) -> Canvases:
        return Canvases(
            self.pictures[chosen], self.masks[chosen], self.boxes[chosen], self.classes[chosen]
        )

    def __len__(self) -> int:
        return len(self.masks)


def canvases(split: str, count: int, seed: int) -> Canvases:
    """`count` of them from twice as many images of `split` (train, test), each used once; by `seed`
    alone.

    An object is an image within an ellipse, 28 to 44 pixels wide; the second may cover a part of
    the first.
    """
    images, labels = read(open_model(str(NETWORKS[NETWORK])), archive(split), OBJECTS * count)
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(OBJECTS * count, generator=random)
    images = images[order]
    labels = labels[order]
    clouds = F.interpolate(torch.randn(count, 3, 5, 5, generator=random), SIDE, mode="bicubic")
    found = Canvases(
        clouds,
        torch.zeros(count, SIDE, SIDE, dtype=torch.long),
        torch.zeros(count, OBJECTS, 4),
        _KINDS[labels].view(count, OBJECTS),
    )
    sides = torch.randint(_SMALLEST, _LARGEST + 1, (count, OBJECTS), generator=random)

    places = torch.rand(count, OBJECTS, 2, generator=random)
    for index in range(count):
        for each in range(OBJECTS):
            side = int(sides[index, each])
            top, left = (places[index, each] * (SIDE - side)).long().tolist()
            _paste(found, index, each, images[OBJECTS * index + each], side, top, left)

    return found


def _paste(
    found: Canvases, index: int, each: int, image: Tensor, side: int, top: int, left: int
) -> None:
    small = F.interpolate(image[None], side, mode="bilinear", antialias=True)[0]
    line = torch.linspace(-1, 1, side)
    inside = line[:, None].square() + line.square() <= 1
    at = (slice(top, top + side), slice(left, left + side))
    seen = found.pictures[(index, slice(None), *at)]
    found.pictures[(index, slice(None), *at)] = torch.where(inside, small, seen)
    found.masks[(index, *at)][inside] = found.classes[index, each]
    found.boxes[index, each] = torch.tensor([left, top, left + side, top + side])
