"""How images are named, prepared and loaded, as options that several commands share."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from typer import Option

from normswap.cli.options import Device, Opening, remark
from normswap.errors import OptionError
from normswap.models.stated_images import Preprocessing

if TYPE_CHECKING:
    from torch import nn

    from normswap.images.datasets import Loader


_PREPARED = ("image_mean", "image_std", "crop_pct", "interpolation")
_DATA = (
    "Class folders, a .tar of them, a CSV (file,label), timm's PREFIX/NAME[:ROOT], or a folder of .npy or .safetensors "
    "files."
)


def _numbers(name: str, text: str | None) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(map(float, text.split(",")))
    except ValueError:
        raise OptionError(f"{name} {text}", "it is a number, or one per channel: 0.485,0.456,0.406") from None


@dataclass(frozen=True)
class ImageOpening(Opening):
    """How a MODEL that reads images is opened, and how it wants them where it does not say so itself."""

    GROUP: ClassVar[str] = "How its images are prepared, where it does not say so"
    image_mean: Annotated[str | None, Option(metavar="R,G,B", help="Mean of its images' pixels, in 0..1.")] = None
    image_std: Annotated[str | None, Option(metavar="R,G,B", help="Their standard deviation.")] = None
    crop_pct: Annotated[float | None, Option(metavar="SHARE", help="Share of a resized image that is kept.")] = None
    interpolation: Annotated[str | None, Option(metavar="NAME", help="How it resizes: bilinear, bicubic ...")] = None

    def words(self, name: str) -> list[str]:
        """See `Opening.words`."""
        images = {f"--{key.replace('_', '-')}": getattr(self, key) for key in _PREPARED}
        options = [(option, str(value)) for option, value in images.items() if value is not None]
        return [*Opening.words(self, name), *itertools.chain(*options)]

    def stated(self) -> Preprocessing:
        """What the options say of its images; an error where none can be prepared so."""
        mean, std = _numbers("--image-mean", self.image_mean), _numbers("--image-std", self.image_std)
        values = Preprocessing(mean, std, self.crop_pct, self.interpolation)
        values.check()
        return values

    def state(self, model: nn.Module) -> nn.Module:
        """The network itself, whose record says so from now on."""
        from normswap.models.preprocessing import state

        return state(model, self.stated())

    def open(self, name: str, *, device: str = "cpu", runs: bool = False) -> nn.Module:
        """See `Opening.open`."""
        self.stated()
        return self.state(Opening.open(self, name, device=device, runs=runs))

    def open_damaged(self, name: str, *, device: str) -> nn.Module:
        """The same, though its BatchNorms' statistics may be NaN or negative."""
        from normswap.models.weight_files import with_broken_statistics

        with with_broken_statistics():
            return self.open(name, device=device)


@dataclass(frozen=True)
class Compared:
    """The network that MODEL is compared with, and how often both must give the same answer."""

    against: Annotated[str | None, Option(metavar="MODEL", show_default=False, help="Compare with this network.")] = (
        None
    )
    min_kept: Annotated[
        float | None, Option(min=0.0, max=1.0, metavar="SHARE", help="Exit with 1 where they agree on less.")
    ] = None

    def enough(self, agreement: float | None) -> bool:
        """Whether they agree often enough; raises OptionError where that is asked and was not measured."""
        if self.min_kept is None:
            return True
        if agreement is None:
            remedy = "It needs --data IMAGES, --against MODEL, and networks that give scores of classes"
            raise OptionError(f"--min-kept {self.min_kept:g}", "no agreement was measured", remedy)
        return agreement >= self.min_kept


@dataclass(frozen=True)
class Images:
    """Labelled images, perhaps, and how to load them."""

    GROUP: ClassVar[str] = "Images"
    data: Annotated[str | None, Option(metavar="PATH", show_default=False, help=_DATA)] = None
    batch_size: Annotated[int, Option(min=1, metavar="N")] = 64
    workers: Annotated[int, Option(min=0, metavar="N", help="Processes that load images.")] = 2
    samples: Annotated[int | None, Option(min=1, metavar="N", help="Take this many images, drawn by a fixed seed.")] = (
        None
    )
    split: Annotated[str, Option(metavar="NAME", help="Part of a dataset that has parts.")] = "validation"
    device: Device = "cpu"

    def loader(self, model: nn.Module, *, seed: int = 0, labelled: bool | None = True) -> Loader:
        """Batches as the network wants them; how they were understood goes to stderr."""
        from normswap.images.array_files import find
        from normswap.images.datasets import make_loader
        from normswap.models.preprocessing import assumption

        loader = make_loader(
            model,
            str(self.data),
            batch_size=self.batch_size,
            workers=self.workers,
            samples=self.samples,
            split=self.split,
            seed=seed,
            labelled=labelled,
        )
        remark(loader.notes)
        if not find(Path(str(self.data))) and (missing := assumption(model)):
            remark([f"{missing} (--image-mean, --image-std, --crop-pct and --interpolation say it)"])
        return loader
