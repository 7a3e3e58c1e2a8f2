"""Images that nobody took, made in place of the user's: `synthetic` ones from the network's statistics, or noise."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normswap.calibration import synthetic_images
from normswap.errors import OptionError
from normswap.models.calling import Example
from normswap.models.modes import Progress

BATCH = 32


@dataclass(frozen=True)
class MadeImages:
    """Images that nobody took, made when they are first asked for.

    Args:
        make: makes them.
        note: what the user should know, of their count.
        telling: whether what is kept of them tells something of what is kept of others.
    """

    make: Callable[[], Iterable[Tensor]]
    note: str
    telling: bool

    @functools.cached_property
    def batches(self) -> list[Tensor]:
        return list(self.make())


@dataclass(frozen=True)
class ImageMaker(ABC):
    """A maker of images in place of `count` of the user's."""

    count: int

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or self.count < 2:
            raise OptionError(f"{type(self).__name__}({self.count!r})", "so many images; at least 2 are needed")

    @abstractmethod
    def made(
        self, model: nn.Module, form: Example, size: Sequence[int], *, seed: int, progress: Progress | None = None
    ) -> MadeImages:
        """For a network as it is before the first step: its own statistics may be read.

        Args:
            size: (C, H, W) of one image.
        """


@dataclass(frozen=True)
class Noise(ImageMaker):
    """In place of images: N(0, 1)."""

    count: int = 512

    def made(
        self, model: nn.Module, form: Example, size: Sequence[int], *, seed: int, progress: Progress | None = None
    ) -> MadeImages:
        note = "fitted to noise: on images the result is worse than one fitted to images like those it will see"
        return MadeImages(lambda: noise(size, seed, self.count), note, telling=False)


@dataclass(frozen=True)
class Synthetic(ImageMaker):
    """In place of images: some that are made from the statistics that the network keeps (`synthetic_images`)."""

    count: int = synthetic_images.COUNT

    def made(
        self, model: nn.Module, form: Example, size: Sequence[int], *, seed: int, progress: Progress | None = None
    ) -> MadeImages:
        note = f"fitted to {self.count} images made from the network's own statistics: real ones may keep less, or more"
        make = functools.partial(
            synthetic_images.make, model, form, size, seed=seed, count=self.count, progress=progress
        )
        return MadeImages(make, note, telling=True)


WORDS: dict[str, ImageMaker] = {"synthetic": Synthetic(), "noise": Noise()}

Batches = Iterable[object] | Callable[[], Iterable[object]] | ImageMaker | MadeImages


def named(calibrate: Batches | str | None) -> Batches | None:
    """The images that a word stands for; anything else as it is.

    Raises:
        OptionError: another word.
    """
    if not isinstance(calibrate, str):
        return calibrate
    if calibrate not in WORDS:
        words = " nor ".join(map(repr, WORDS))
        raise OptionError(f"calibrate={calibrate!r} is neither batches of images nor {words}")
    return WORDS[calibrate]


def noise(size: Sequence[int], seed: int, count: int) -> Iterator[Tensor]:
    """Batches (N, C, H, W) of N(0, 1) images."""
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, count, BATCH):
        yield torch.randn(min(BATCH, count - start), *size, generator=generator, device="cpu")
