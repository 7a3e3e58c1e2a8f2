"""The images that a diagnosis looks at: a few batches, kept, so that every check sees the same
ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from normswap.calibration.checked_batches import first_images
from normswap.errors import SourceError
from normswap.models.calling import Example, form

# So many images are held in memory.
MOST = 512
# The share of a channel's variance that rounding to bytes leaves, where the other channels explain
# the rest.
_COLOURLESS = 1e-4
# The batches are cut into so many parts: how far these differ is the sampling error.
PARTS = 4


@dataclass(frozen=True, eq=False)
class ImageBatches:
    """Batches of one size, as calls of the network."""

    calls: tuple[Example, ...]

    @classmethod
    def read(cls, model: nn.Module, batches: Iterable[object]) -> ImageBatches:
        """At most `MOST` images of what the network takes (`Example.read`); raises SourceError:
        unusable, too few.
        """
        mixed = cls(tuple(first_images(model, batches, MOST)))._mixed(model)
        if len(mixed.calls) < PARTS or mixed.calls[0].count < 2:
            why = f"a diagnosis needs {2 * PARTS} at least, that can be split into {PARTS} batches"
            raise SourceError(f"{mixed.count} images are too few", why)
        return mixed

    def _mixed(self, model: nn.Module) -> ImageBatches:
        """The same in batches of one size; images in another order, as those of a folder come class
        by class.
        """
        if self.images is None:
            cuts = [
                call.take(torch.arange(call.count) % PARTS == part)
                for call in self.calls
                for part in range(PARTS)
            ]
            calls = (
                self.calls
                if len(self.calls) >= PARTS or None in cuts
                else [cut for cut in cuts if cut is not None]
            )
            return ImageBatches(tuple(call for call in calls if call.count == calls[0].count))
        size = max(min(self.calls[0].count, len(self.images) // PARTS), 1)
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(0))
        images = self.images[order[: len(order) // size * size].to(self.images.device)]
        return ImageBatches(
            tuple(form(model).of(batch).like(model) for batch in images.split(size))
        )

    @property
    def count(self) -> int:
        """How many images there are."""
        return sum(call.count for call in self.calls)

    @cached_property
    def images(self) -> Tensor | None:
        """All of them, (N, C, H, W); None where the network takes something else."""
        if not self.calls or not all(
            call.only_images and call.images.ndim == 4 for call in self.calls
        ):
            return None
        return torch.cat([call.images for call in self.calls])

    @cached_property
    def colourless(self) -> bool:
        """Whether the three channels of all images hold the same picture, however each is scaled
        and shifted.
        """
        images = self.images
        if images is None or images.shape[1] != 3:
            return False
        channels = images.transpose(0, 1).flatten(1).double()
        alike = torch.corrcoef(channels).nan_to_num(1.0)
        return bool((1 - alike.square() < _COLOURLESS).all())

    @property
    def parts(self) -> list[tuple[Example, ...]]:
        """The batches in `PARTS` parts."""
        return [self.calls[start::PARTS] for start in range(PARTS)]
