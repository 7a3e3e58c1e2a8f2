"""Images made from a network's own statistics, in place of the user's (`calibration/synthetic_images`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from normswap.calibration import synthetic_images
from normswap.errors import OptionError

WORD = "synthetic"
NOTHING_TOLD = "it was fitted to images made from the network's own statistics, and those do not tell what others keep"


@dataclass(frozen=True)
class Synthetic:
    """In place of calibration images: `count` images made from the statistics that the network's BatchNorms keep."""

    count: int = synthetic_images.COUNT

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or self.count < 2:
            raise OptionError(f"Synthetic({self.count!r})", "so many images; at least 2 are needed")


class MadeImages(list[Tensor]):
    """Batches (N, C, H, W) of such images."""


Batches = Iterable[object] | Callable[[], Iterable[object]] | Synthetic


def named(calibrate: Batches | str | None) -> Batches | None:
    """The images that the word stands for; anything else as it is.

    Raises:
        OptionError: another word.
    """
    if not isinstance(calibrate, str):
        return calibrate
    if calibrate != WORD:
        raise OptionError(f"calibrate={calibrate!r} is neither batches of images nor {WORD!r}")
    return Synthetic()
