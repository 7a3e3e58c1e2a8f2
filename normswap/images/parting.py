"""Two disjoint parts of the same images: some to set numbers by, others to measure on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from normswap.errors import OptionError
from normswap.images.datasets import Loader

_MOST = 512  # images of the first part, unless a number is given


class Part:
    """The images of a loader that were drawn for this part; each pass reads them again."""

    def __init__(self, loader: Loader, mine: Tensor) -> None:
        self.loader, self.mine, self.count = loader, mine, int(mine.sum())

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        done = 0
        for images, labels in self.loader:
            rows = self.mine[done : done + len(images)]
            done += len(images)
            if rows.any():
                yield images[rows], labels[rows]


def part(loader: Loader, first: int | None, *, seed: int = 0) -> tuple[Part, Part]:
    """`first` images, drawn by `seed`, and the others; without a number half of them, at most 512.

    Raises:
        OptionError: none are left for the second part, or the loader cannot tell how many it has.
    """
    if loader.count is None:
        raise OptionError(f"how many images {loader.origin} has is not known", remedy="Give --samples, or a folder")
    if loader.count < 2 or (first is not None and first >= loader.count):
        wanted = "half of them" if first is None else str(first)
        why = f"{wanted} to calibrate on leave none to measure on"
        raise OptionError(f"{loader.origin} has {loader.count} images", why, "Give more of them, or lower --samples")
    drawn = torch.randperm(loader.count, generator=torch.Generator().manual_seed(seed))
    mine = torch.zeros(loader.count, dtype=torch.bool)
    mine[drawn[: min(loader.count // 2, _MOST) if first is None else first]] = True
    return Part(loader, mine), Part(loader, ~mine)
