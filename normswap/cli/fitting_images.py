"""The images that values are fitted to, as options of `convert`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from normswap.cli.image_options import remark_on_images
from normswap.cli.options import Device
from normswap.errors import OptionError

if TYPE_CHECKING:
    from torch import nn

    from normswap.surgery.network import Batches, Network


@dataclass(frozen=True)
class Fitting:
    """The images that values are fitted to."""

    GROUP: ClassVar[str] = "Images to fit values to"
    calibrate: Annotated[
        str | None,
        typer.Option(
            metavar="DATA|synthetic",
            help="Fit values to these images (as --data elsewhere; no labels are needed), or to 128 made from the "
            "statistics of its BatchNorms.",
        ),
    ] = None
    samples: Annotated[int | None, typer.Option(min=2, metavar="N", help="Take this many of them [default: 1000].")] = (
        None
    )
    seed: Annotated[int, typer.Option(metavar="S", help="Which ones.")] = 0
    device: Device = "cpu"

    def on(self, model: nn.Module, advance: Callable[[int, int], None] | None) -> Network:
        """The record of a network whose values are fitted to that."""
        from normswap.surgery.network import Network

        return Network(model, seed=self.seed, calibrate=self._images(model), progress=advance)

    def _images(self, model: nn.Module) -> Batches | str | None:
        if self.calibrate in (None, "synthetic"):
            if self.calibrate and self.samples:
                raise OptionError("--samples cannot go with --calibrate synthetic", "128 images are made")
            return self.calibrate
        from normswap.images.datasets import make_loader

        count = 1000 if self.samples is None else self.samples
        loader = make_loader(model, self.calibrate, split="train", samples=count, seed=self.seed, labelled=False)
        remark_on_images(model, loader)
        return loader
