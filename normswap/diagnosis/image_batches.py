"""The images of a diagnosis: a few batches in memory, so that all checks see the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from normswap.calibration.checked_batches import first_images, without_copies
from normswap.errors import SourceError
from normswap.models.calling import Example, form

# At most so many images are held in memory.
MOST = 512
# In images without colours the other channels explain a channel's variance except for at most this
# share. Rounding to bytes leaves less unexplained.
_COLOURLESS = 1e-4
# The images are measured in so many parts. The differences between parts show the sampling error.
PARTS = 4


@dataclass(frozen=True, eq=False)
class ImageBatches:
    """Batches of images of one size.

    Args:
        calls: The batches. Each holds the arguments with which the network is called.
    """

    calls: tuple[Example, ...]

    @classmethod
    def read(cls, model: nn.Module, batches: Iterable[object]) -> ImageBatches:
        """Return the first `MOST` images of some batches, in batches of one size.

        Copies are left out, as they tell nothing new. Among copies of one image there would be no
        sampling error, and whatever that image shows would seem to be certain.

        Args:
            model: The network.
            batches: Batches of the network's inputs (`Example.read`).

        Raises:
            SourceError: The images are unusable or too few.
        """
        as_read = cls(tuple(first_images(model, batches, MOST)))
        # Images are joined, shuffled and split anew. Other inputs cannot be joined, so their
        # batches are only cut.
        equal = as_read._shuffled(model) if as_read.images is not None else as_read._cut()
        # Every part of the images needs a batch, and a variance needs two images.
        if len(equal.calls) < PARTS or equal.calls[0].count < 2:
            why = (
                f"a diagnosis needs {2 * PARTS} different ones at least, that can be split into"
                f" {PARTS} batches"
            )
            raise SourceError(f"{equal.count} images are too few", why)
        return equal

    @classmethod
    def of(cls, model: nn.Module, images: Tensor, size: int) -> ImageBatches:
        """Return images in batches, in their order. The last batch may be smaller.

        Args:
            model: The network.
            images: The images (N, C, H, W).
            size: The number of images of a batch.
        """
        # `of` puts a batch of images into the arguments of the network's forward. `like` moves them
        # to the network's device and dtype.
        call_with = form(model).of
        return cls(tuple(call_with(batch).like(model) for batch in images.split(size)))

    def _shuffled(self, model: nn.Module) -> ImageBatches:
        """Return the images in random order, in batches of one size, at least `PARTS` if possible.

        The order is random because a folder gives its images class by class. The network must take
        nothing but images (`images`).
        """
        seen: set[bytes] = set()
        different = [without_copies(call, seen) for call in self.calls]
        images = torch.cat([call.images for call in different if call is not None])

        # Batches are as large as the first one, or smaller if that would make too few.
        size = max(min(self.calls[0].count, len(images) // PARTS), 1)
        # The last images, if they do not fill a batch, are left out.
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        whole_batches = order[: len(order) // size * size]
        return ImageBatches.of(model, images[whole_batches.to(images.device)], size)

    def _cut(self) -> ImageBatches:
        """Return the batches that have the size of the first. Others, and copies, are left out.

        A diagnosis needs `PARTS` batches. If there are fewer, each is first cut into `PARTS`
        batches. This is for inputs other than images, whose batches cannot be joined and split
        anew.
        """
        calls = list(self.calls)
        if len(calls) < PARTS:
            cuts: list[Example | None] = []
            for call in self.calls:
                # The samples of a batch go to its parts in turn. The last ones, if they would make
                # some parts larger than others, go to none.
                part_of = torch.arange(call.count) % PARTS
                part_of[call.count // PARTS * PARTS :] = PARTS
                cuts += [call.take(part_of == part) for part in range(PARTS)]
            # A call that cannot be cut gives None. Then all calls stay whole, so that sizes agree.
            whole_cuts = [cut for cut in cuts if cut is not None]
            if len(whole_cuts) == len(cuts):
                calls = whole_cuts

        seen: set[bytes] = set()
        different = [without_copies(call, seen, whole=True) for call in calls]
        return ImageBatches(
            tuple(call for call in different if call is not None and call.count == calls[0].count)
        )

    @property
    def count(self) -> int:
        """The number of images."""
        return sum(call.count for call in self.calls)

    @cached_property
    def images(self) -> Tensor | None:
        """All images, (N, C, H, W), or None if the network takes something else."""
        if not self.calls:
            return None
        if not all(call.only_images and call.images.ndim == 4 for call in self.calls):
            return None
        return torch.cat([call.images for call in self.calls])

    @cached_property
    def colourless(self) -> bool:
        """Whether the three channels of all images hold the same picture, as in grey images.

        Each channel may be scaled and shifted, as by another mean and standard deviation.
        """
        images = self.images
        if images is None or images.shape[1] != 3:
            return False

        channels = images.transpose(0, 1).flatten(1).double()
        # A channel with one value throughout has no correlation (NaN), and passes.
        correlations = torch.corrcoef(channels).nan_to_num(1.0)
        # The share of a channel's variance that another channel does not explain is 1 - r^2.
        return bool((1 - correlations.square() < _COLOURLESS).all())

    @property
    def parts(self) -> list[tuple[Example, ...]]:
        """The batches in four lists (`PARTS`), to which they are dealt in turn.

        The statistics of each list are measured by themselves. Their differences show the sampling
        error.
        """
        return [self.calls[start::PARTS] for start in range(PARTS)]
