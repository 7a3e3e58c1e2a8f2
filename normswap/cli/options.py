"""Arguments and options that several commands share, alone or as records (see `app.spread`).

How a MODEL is opened; how images are named, prepared and loaded.
"""

from __future__ import annotations

import ast
import itertools
import sys
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from typer import Argument, Option

from normswap.cli.progress import working
from normswap.errors import OptionError, WeightsNote, flag
from normswap.models import kinds
from normswap.models.stated_images import Preprocessing

if TYPE_CHECKING:
    from torch import nn

    from normswap.exporting.exported_file import ExportedFile
    from normswap.images.datasets import Loader

_MODEL = (
    "A timm name, hf-hub:ORG/NAME, local-dir:DIR, a directory (timm's hub layout, or written by"
    " normswap), torchvision:NAME[@WEIGHTS], hf:OWNER/NAME or hf:DIR (transformers),"
    " ultralytics:FILE.pt, package.module:factory of your own, or a .safetensors/.pth file with"
    " --arch"
)
Model = Annotated[str, Argument(metavar="MODEL", show_default=False, help=f"{_MODEL}.")]
ModelOrFile = Annotated[
    str,
    Argument(metavar="MODEL", show_default=False, help=f"{_MODEL}; or a file that `export` wrote."),
]
Json = Annotated[bool, Option("--json", help="Print JSON, and nothing else, on stdout.")]


def output_option(metavar: str, help: str) -> Any:
    """The option that says where to write."""
    return Option("-o", "--output", metavar=metavar, show_default=False, help=help)


def _check_device(name: str) -> str:
    if name not in ("auto", "cpu"):
        from normswap.models import devices

        devices.find(name)
    return name


Device = Annotated[
    str, Option(metavar="auto|cpu|cuda|mps", help="Where networks run.", callback=_check_device)
]
Trust = Annotated[
    bool,
    Option(
        "--trust-factory", help="Import the factory that a directory names; that runs its code."
    ),
]
Force = Annotated[bool, Option("--force", help="Replace an output that exists.")]
# What an input that is no image may be made of; the first is meant where nothing is said.
_TYPES = ("float32", "int64", "int32", "bool")
Value = bool | int | float | str | None
_DATA = (
    "Class folders, a .tar of them, a CSV (file,label), timm's PREFIX/NAME[:ROOT], or a folder of"
    " .npy or .safetensors files."
)


@dataclass(frozen=True)
class Opening:
    """How a MODEL is opened."""

    GROUP: ClassVar[str] = "How MODEL is opened"
    weights: Annotated[
        str,
        Option(
            metavar="pretrained|random|FILE",
            help="Random: the bare architecture; FILE: these weights.",
        ),
    ] = "pretrained"
    arch: Annotated[
        str | None, Option("--arch", metavar="NAME", help="MODEL that a weights file is of.")
    ] = None
    arch_arg: Annotated[
        list[str] | None,
        Option(
            "--arch-arg",
            metavar="KEY=VALUE",
            help="Argument of the architecture, e.g. channels=16,32,64,128.",
        ),
    ] = None
    num_classes: Annotated[
        int | None, Option(min=0, metavar="N", help="Another head than the source's.")
    ] = None
    in_chans: Annotated[
        int | None, Option(min=1, metavar="N", help="Another number of input channels.")
    ] = None
    input_size: Annotated[
        str | None,
        Option("--input-size", metavar="C,H,W", help="Size of its images, where it says another."),
    ] = None
    inputs: Annotated[
        list[str] | None,
        Option(
            "--input",
            metavar="NAME=SHAPE[:TYPE]",
            help="An argument that is no image: x=2,1600, or ids=16:int64.",
        ),
    ] = None
    trust_factory: Trust = False

    def asked(self) -> list[tuple[str, str]]:
        """The options that ask for something of the network itself, as flags and values."""
        names = ("weights", "arch", "num_classes", "in_chans", "input_size")
        values = {flag(name): getattr(self, name) for name in names}
        pairs = [
            (name, str(value))
            for name, value in values.items()
            if value not in (None, "pretrained")
        ]
        pairs += [("--arch-arg", text) for text in self.arch_arg or ()]
        return pairs + [("--input", text) for text in self.inputs or ()]

    def arch_args(self) -> dict[str, Value | list[Value]]:
        """The arguments of the architecture."""
        return dict(map(_pair, self.arch_arg or []))

    def words(self, name: str) -> list[str]:
        """MODEL and all that opens it as it was opened, as words of a command line."""
        return [name, *itertools.chain(*self.asked()), *["--trust-factory"] * self.trust_factory]

    def open(self, name: str, *, device: str = "cpu", runs: bool = False) -> nn.Module:
        """The network of that name, on the device; `runs`: it may be an exported file, which runs
        itself.
        """
        size = None if self.input_size is None else _sides("--input-size", self.input_size)
        inputs = dict(map(_named_input, self.inputs or []))
        if inputs and size:
            raise OptionError(
                "--input and --input-size both say what it takes", remedy="Give one of them"
            )
        asked: Any = {
            "weights": self.weights,
            "arch": self.arch,
            "arch_args": self.arch_args(),
            "inputs": inputs,
        }
        asked |= {"num_classes": self.num_classes, "in_chans": self.in_chans, "input_size": size}
        return open_model(name, device=device, runs=runs, trust_factory=self.trust_factory, **asked)


@dataclass(frozen=True)
class ImageOpening(Opening):
    """How a MODEL that reads images is opened, and how it wants them where it does not say so
    itself.
    """

    GROUP: ClassVar[str] = "How its images are prepared, where it does not say so"
    image_mean: Annotated[
        str | None, Option(metavar="R,G,B", help="Mean of its images' pixels, in 0..1.")
    ] = None
    image_std: Annotated[str | None, Option(metavar="R,G,B", help="Their standard deviation.")] = (
        None
    )
    crop_pct: Annotated[
        float | None, Option(metavar="SHARE", help="Share of a resized image that is kept.")
    ] = None
    interpolation: Annotated[
        str | None, Option(metavar="NAME", help="How it resizes: bilinear, bicubic ...")
    ] = None

    def words(self, name: str) -> list[str]:
        """See `Opening.words`."""
        images = {
            flag(key): getattr(self, key)
            for key in ("image_mean", "image_std", "crop_pct", "interpolation")
        }
        options = [(option, str(value)) for option, value in images.items() if value is not None]
        return [*Opening.words(self, name), *itertools.chain(*options)]

    def stated(self) -> Preprocessing:
        """What the options say of its images; an error where none can be prepared so."""
        mean = _numbers("--image-mean", self.image_mean)
        std = _numbers("--image-std", self.image_std)
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

    against: Annotated[
        str | None, Option(metavar="MODEL", show_default=False, help="Compare with this network.")
    ] = None
    min_kept: Annotated[
        float | None,
        Option(min=0.0, max=1.0, metavar="SHARE", help="Exit with 1 where they agree on less."),
    ] = None

    def enough(self, agreement: float | None) -> bool:
        """Whether they agree often enough; raises OptionError where that is asked and was not
        measured.
        """
        if self.min_kept is None:
            return True
        if agreement is None:
            remedy = (
                "It needs --data IMAGES, --against MODEL, and networks that give scores of classes"
            )
            raise OptionError(f"--min-kept {self.min_kept:g}", "no agreement was measured", remedy)
        return agreement >= self.min_kept


@dataclass(frozen=True)
class Images:
    """Labelled images, perhaps, and how to load them."""

    GROUP: ClassVar[str] = "Images"
    data: Annotated[str | None, Option(metavar="PATH", show_default=False, help=_DATA)] = None
    batch_size: Annotated[int, Option(min=1, metavar="N")] = 64
    workers: Annotated[int, Option(min=0, metavar="N", help="Processes that load images.")] = 2
    samples: Annotated[
        int | None, Option(min=1, metavar="N", help="Take this many images, drawn by a fixed seed.")
    ] = None
    split: Annotated[str, Option(metavar="NAME", help="Part of a dataset that has parts.")] = (
        "validation"
    )
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
            remark(
                [f"{missing} (--image-mean, --image-std, --crop-pct and --interpolation say it)"]
            )
        return loader


def open_model(name: str, *, device: str = "cpu", runs: bool = False, **asked: Any) -> nn.Module:
    """See `checkpoint.open_model` and `Opening.open`; a terminal shows that it is going on."""
    # What normswap wrote opens by the record in its header.
    if not Path(name).is_dir() and Path(name).suffix.lower() not in (
        ".safetensors",
        *kinds.EXPORTED,
    ):
        kinds.parts(name, asked.get("weights") or "pretrained", asked.get("arch"))
    # Downloads show a bar of their own.
    local = Path(name.removeprefix("local-dir:")).exists() or asked.get("weights") == "random"
    with (
        working(f"opening {name}") if local else nullcontext(),
        warnings.catch_warnings(record=True) as caught,
    ):
        # Of all warnings, these alone are the user's: libraries' are in their own terms
        # (`errors.quiet`).
        warnings.simplefilter("always", WeightsNote)
        from normswap.models import devices, zoo
        from normswap.storage import checkpoint
        from normswap.storage.network_folder import check_no_run

        check_no_run(Path(name))
        file = exported_file(name) if runs else None
        if file is not None:
            zoo.check_unasked(name, asked)
            return devices.place(file.network(), device)
        model = devices.place(checkpoint.open_model(name, **asked), device)
    remark(str(warning.message) for warning in caught if warning.category is WeightsNote)
    return model


def trust(model: nn.Module) -> list[str]:
    """The option that opens the directory of a network again, where a factory of the user's own
    builds it.
    """
    from normswap import provenance

    arch = provenance.of(model).arch
    return ["--trust-factory"] * (arch is not None and kinds.by_builder(arch.builder).foreign)


def exported_file(name: str) -> ExportedFile | None:
    """The exported file that MODEL names, if it names one."""
    if Path(name).suffix.lower() not in kinds.EXPORTED:
        return None
    from normswap.exporting.exported_file import ExportedFile

    return ExportedFile.find(name)


def remark(notes: Iterable[str]) -> None:
    """Say on stderr, which --json leaves free, how something was understood."""
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def _pair(text: str) -> tuple[str, Value | list[Value]]:
    key, sign, value = text.partition("=")
    if not sign or not key.isidentifier():
        raise OptionError(
            f"--arch-arg {text!r} is not KEY=VALUE", remedy="For instance channels=16,32,64,128"
        )
    return key, parse(value)


def _sides(option: str, text: str) -> tuple[int, ...]:
    sides = text.split(",")
    if not all(side.strip().isdecimal() and int(side) for side in sides):
        why = (
            "it is C,H,W of an image (3,224,224), C,T of a series (4,6144), or any other shape"
            " without the batch"
        )
        raise OptionError(f"{option} {text}", why)
    return tuple(map(int, sides))


def _numbers(name: str, text: str | None) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(map(float, text.split(",")))
    except ValueError:
        raise OptionError(
            f"{name} {text}", "it is a number, or one per channel: 0.485,0.456,0.406"
        ) from None


def _named_input(text: str) -> tuple[str, tuple[tuple[int, ...], str]]:
    name, sign, shape = text.partition("=")
    sides, _, dtype = shape.partition(":")
    if not sign or not name.isidentifier() or dtype not in ("", *_TYPES):
        why = (
            "it is NAME=SHAPE or NAME=SHAPE:TYPE, where NAME is an argument and TYPE one of"
            f" {', '.join(_TYPES)}"
        )
        raise OptionError(f"--input {text}", why, "For instance ids=16:int64")
    return name, (_sides(f"--input {name}", sides), dtype or _TYPES[0])


def parse(text: str) -> Value | list[Value]:
    """An option's value: int, float, true, false, none, a comma list of those, or the text itself."""
    if "," in text:
        return [_scalar(item.strip()) for item in text.split(",") if item.strip()]
    return _scalar(text)


def _scalar(text: str) -> Value:
    try:
        value: Value = ast.literal_eval(text.capitalize())
    except (ValueError, SyntaxError):
        return text
    return value


def last_part(name: str) -> str:
    """The name of a network: the last part of its source."""
    prefix, _, after = name.partition(":")
    has_prefix = prefix in kinds.prefixes()
    path = Path(after if has_prefix else name)
    if path.is_dir():
        return path.resolve().name
    if path.is_file():
        return path.stem
    return Path(after.partition("@")[0] if has_prefix else name).name.replace(":", "-")
