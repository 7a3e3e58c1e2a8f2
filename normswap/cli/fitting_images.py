"""The images that values are fitted to, as options of `convert`: the user's images, or what is made in their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from normswap.cli.image_options import remark_on_images
from normswap.cli.options import Device, remark

if TYPE_CHECKING:
    from torch import nn

    from normswap.images.datasets import Loader
    from normswap.surgery.made_images import Batches
    from normswap.surgery.network import Network


@dataclass(frozen=True)
class Fitting:
    """The images that values are fitted to."""

    GROUP: ClassVar[str] = "Images to fit values to"
    calibrate: Annotated[
        str | None,
        typer.Option(
            metavar="DATA|synthetic",
            help="Fit values to these images (as --data elsewhere), or to some made from the network's statistics.",
        ),
    ] = None
    samples: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Take this many of them [default: 1000; synthetic: 128].")
    ] = None
    seed: Annotated[int, typer.Option(metavar="S", help="Which ones.")] = 0
    device: Device = "cpu"

    def on(self, model: nn.Module, advance: Callable[[int, int], None] | None, *, fits: bool) -> Network:
        """The record of a network whose values are fitted to that.

        Args:
            fits: whether something is; else images are refused later, and no time is told.
        """
        from normswap.surgery.network import Network

        return Network(model, seed=self.seed, calibrate=self._images(model, timed=fits), progress=advance)

    def _images(self, model: nn.Module, *, timed: bool) -> Batches | None:
        if self.calibrate is None:
            return None
        from normswap.surgery.made_images import WORD, Synthetic

        if self.calibrate == WORD:
            return Synthetic() if self.samples is None else Synthetic(self.samples)
        from normswap.images.datasets import make_loader

        count = 1000 if self.samples is None else self.samples
        loader = make_loader(model, self.calibrate, split="train", samples=count, seed=self.seed, labelled=False)
        remark_on_images(model, loader)
        if timed:
            _remark_on_time(model, loader)
        return loader


def _remark_on_time(model: nn.Module, loader: Loader) -> None:
    """Say before a long fit how long it will take; nothing on a device, where it is short."""
    from normswap.calibration import duration
    from normswap.models import calling

    if not loader.count or calling.anchor(model).device.type != "cpu":
        return
    images, _ = next(iter(loader.only(range(min(duration.FEW, loader.count)))))
    few = calling.form(model)
    if not few.only_images:
        return
    seconds = duration.expected_seconds(model, few.of(images).like(model), loader.count)
    if seconds > duration.LONG:
        took = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
        remark([f"fitting to {loader.count} images will take about {took}"])
