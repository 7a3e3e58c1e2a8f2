"""Two disjoint parts of the same images: some to set numbers by, others to measure on."""

from __future__ import annotations

import torch

from normswap.errors import OptionError, spelled
from normswap.images.datasets import Loader

_FIRST = 512  # images of the first part, unless a number is given


def part(loader: Loader, first: int | None, *, most: int | None = None, seed: int = 0) -> tuple[Loader, Loader]:
    """Draw `first` images by `seed` and `most` others, or all; without a number half of them, at most 512.

    Raises:
        OptionError: none are left for the second part, or the loader cannot tell how many it has.
    """
    if loader.count is None:
        raise OptionError(
            f"how many images {loader.origin} has is not known",
            remedy=f"Give {spelled('samples', metavar='N')}, or a folder",
        )
    if loader.count < 2 or (first is not None and first >= loader.count):
        wanted = "half of them" if first is None else str(first)
        why = f"{wanted} to calibrate on leave none to measure on"
        remedy = f"Give more of them, or lower {spelled('samples')}"
        raise OptionError(f"{loader.origin} has {loader.count} images", why, remedy)
    drawn = torch.randperm(loader.count, generator=torch.Generator().manual_seed(seed))
    count = min(loader.count // 2, _FIRST) if first is None else first
    one, other = drawn[:count], drawn[count:][:most]
    return loader.only(sorted(one.tolist())), loader.only(sorted(other.tolist()))
