"""What values are fitted to, as `convert` is told of it: the user's images, or what is made in their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from torch import nn

    from normswap.surgery.made_images import Batches
    from normswap.surgery.network import Network


@dataclass(frozen=True)
class Fitting:
    """What values are fitted to."""

    calibrate: Annotated[
        str | None,
        typer.Option(
            metavar="DATA|synthetic|noise",
            help="Fit values to these images (as --data elsewhere), or to some made from the network's statistics.",
        ),
    ] = None
    samples: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Take this many of them [default: 1000; synthetic: 128].")
    ] = None
    seed: Annotated[int, typer.Option(metavar="S", help="Which ones.")] = 0

    def on(self, model: nn.Module, advance: Callable[[int, int], None] | None) -> Network:
        """The record of a network whose values are fitted to that."""
        from normswap.surgery.network import Network

        return Network(model, seed=self.seed, calibrate=self._images(model), progress=advance)

    def _images(self, model: nn.Module) -> Batches | None:
        if self.calibrate is None:
            return None
        from normswap.surgery.made_images import WORDS

        if self.calibrate in WORDS:
            made = WORDS[self.calibrate]
            return made if self.samples is None else replace(made, count=self.samples)
        from normswap.images.datasets import make_loader
        from normswap.models import zoo

        config = zoo.data_config(model)  # no word of classes: labels are not needed
        count = 1000 if self.samples is None else self.samples
        return make_loader(config, self.calibrate, split="train", samples=count, seed=self.seed)
