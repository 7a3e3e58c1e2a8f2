"""Arguments and options that several commands share, alone or as records (see `app.spread`).

The records say how a MODEL is opened, and how images are named, prepared and loaded.
"""

from __future__ import annotations

import ast
import itertools
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from typer import Argument, Option

from normswap.cli.progress import working
from normswap.cli.terminal import remark
from normswap.errors import OptionError, WeightsNote, flag
from normswap.models import kinds
from normswap.models.stated_images import Preprocessing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn
    from typing_extensions import Unpack

    from normswap.exporting.exported_file import ExportedFile
    from normswap.images.datasets import Loader
    from normswap.models import zoo

    class Asked(zoo.Asked, total=False):
        """The keywords of `checkpoint.open_model`, which opens a MODEL. All may be left out."""

        input_size: Sequence[int] | None
        inputs: Mapping[str, Sequence[object]] | None
        trust_factory: bool
        named: bool


# What MODEL may be stands once, in `inspect --help`.
_MODEL = "A timm name, a directory or another network (all kinds: `normswap inspect --help`)"
_ALL_KINDS = (
    "A timm name, hf-hub:ORG/NAME, local-dir:DIR, a directory (timm's hub layout, or written by"
    " normswap), torchvision:NAME[@WEIGHTS], hf:OWNER/NAME or hf:DIR (transformers),"
    " ultralytics:FILE.pt, package.module:factory of your own, a .safetensors/.pth file with"
    " --arch, or a file that `export` wrote (for inspect, evaluate, verify and bench)."
)


def _model(help: str) -> Any:
    """Return typer's declaration of the argument MODEL.

    Args:
        help: What --help says of the argument.
    """
    return Argument(metavar="MODEL", show_default=False, help=help)


Model = Annotated[str, _model(f"{_MODEL}.")]
ModelOrFile = Annotated[str, _model(f"{_MODEL}, or a file that `export` wrote.")]
ModelOfAnyKind = Annotated[str, _model(_ALL_KINDS)]
Json = Annotated[bool, Option("--json", help="Print JSON, and nothing else, on stdout.")]


def output_option(metavar: str, help: str) -> Any:
    """Return typer's declaration of the option `-o`, which names the output to write.

    Args:
        metavar: The placeholder in --help, FILE or DIR.
        help: What --help says of the option.
    """
    return Option("-o", "--output", metavar=metavar, show_default=False, help=help)


def _check_device(name: str) -> str:
    """Return the device's name, after a check that this machine has the device."""
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
# Types of an input that is no image. An input without a type has the first.
_TYPES = ("float32", "int64", "int32", "bool")
Value = bool | int | float | str | None
_DATA = (
    "Class folders, a .tar of them, a CSV (file,label), timm's PREFIX/NAME[:ROOT], or a folder of"
    " .npy or .safetensors files."
)


@dataclass(frozen=True)
class Opening:
    """The options that say how a MODEL is opened."""

    GROUP: ClassVar[str] = "How MODEL is opened"
    weights: Annotated[
        str,
        Option(
            metavar="pretrained|random|FILE",
            help="random: the bare architecture; FILE: the weights in this file.",
        ),
    ] = "pretrained"
    arch: Annotated[
        str | None,
        Option(
            "--arch",
            metavar="NAME",
            help="The architecture of a weights file, named as a MODEL is.",
        ),
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
        int | None, Option(min=0, metavar="N", help="Give the network a new head of N classes.")
    ] = None
    in_chans: Annotated[
        int | None, Option(min=1, metavar="N", help="Change the number of input channels to N.")
    ] = None
    input_size: Annotated[
        str | None,
        Option(
            "--input-size",
            metavar="C,H,W",
            help="Size of the images, if the network states none or another.",
        ),
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
        """Return the options that shape the network, as pairs of flag and value.

        Options that have their default value are left out.
        """
        pairs: list[tuple[str, str]] = []
        for name in ("weights", "arch", "num_classes", "in_chans", "input_size"):
            value = getattr(self, name)
            if value not in (None, "pretrained"):
                pairs.append((flag(name), str(value)))

        pairs += [("--arch-arg", text) for text in self.arch_arg or ()]
        pairs += [("--input", text) for text in self.inputs or ()]
        return pairs

    def arch_args(self) -> dict[str, Value | list[Value]]:
        """Return the arguments of the architecture, read from --arch-arg."""
        return dict(map(_arch_arg, self.arch_arg or []))

    def words(self, name: str) -> list[str]:
        """Return the words of a command line that open MODEL `name` as these options do.

        They are the name, then the options that were given.
        """
        return [name, *itertools.chain(*self.asked()), *trust_flag(self.trust_factory)]

    def require_model(self, name: str | None) -> None:
        """Raise OptionError if an option says how MODEL is opened, and no MODEL is given.

        Args:
            name: The argument MODEL of a command, if there is one.
        """
        given = self.words("MODEL")[1:]
        if name is None and given:
            raise OptionError(
                f"{given[0]} says how a MODEL is opened, and none is given",
                remedy="Name the MODEL, also if a recipe names it",
            )

    def open(self, name: str, *, device: str = "cpu", runs: bool = False) -> nn.Module:
        """Return the network `name`, opened by these options.

        Args:
            name: The argument MODEL of a command: a name, a hub id, a path or a factory.
            device: The device to place the network on.
            runs: Whether `name` may be an exported file. Such a file runs in its own runtime.

        Raises:
            NormswapError: The options are wrong, or the network cannot be opened.
        """
        size = None
        if self.input_size is not None:
            size = _sides("--input-size", self.input_size)
        inputs = dict(map(_named_input, self.inputs or []))
        if inputs and size:
            raise OptionError(
                "--input and --input-size both say what it takes", remedy="Give one of them"
            )

        return open_model(
            name,
            device=device,
            runs=runs,
            weights=self.weights,
            arch=self.arch,
            arch_args=self.arch_args(),
            num_classes=self.num_classes,
            in_chans=self.in_chans,
            input_size=size,
            inputs=inputs,
            trust_factory=self.trust_factory,
        )


@dataclass(frozen=True)
class ImageOpening(Opening):
    """The options that say how a MODEL that reads images is opened.

    They also say how its images are prepared, if the network does not say so itself.
    """

    GROUP: ClassVar[str] = "How its images are prepared, where it does not say so"
    image_mean: Annotated[
        str | None, Option(metavar="R,G,B", help="Mean of the images' pixels, in 0..1.")
    ] = None
    image_std: Annotated[
        str | None, Option(metavar="R,G,B", help="Standard deviation of the images' pixels.")
    ] = None
    crop_pct: Annotated[
        float | None, Option(metavar="SHARE", help="Share of a resized image that is kept.")
    ] = None
    interpolation: Annotated[
        str | None, Option(metavar="NAME", help="How images are resized: bilinear, bicubic ...")
    ] = None

    def words(self, name: str) -> list[str]:
        """Return the words of a command line that open MODEL `name` as these options do.

        They are the name, then the options that were given, with those on the images.
        """
        words = Opening.words(self, name)
        for key in ("image_mean", "image_std", "crop_pct", "interpolation"):
            value = getattr(self, key)
            if value is not None:
                words += [flag(key), str(value)]
        return words

    def stated(self) -> Preprocessing:
        """Return how images are prepared, as far as the command line's options say it.

        The result has mean, standard deviation, crop and interpolation. An option that is not given
        is None in it.

        Raises:
            OptionError: No image can be prepared with these values.
        """
        mean = _numbers("--image-mean", self.image_mean)
        std = _numbers("--image-std", self.image_std)
        values = Preprocessing(mean, std, self.crop_pct, self.interpolation)
        values.check()
        return values

    def state(self, model: nn.Module) -> nn.Module:
        """Note on a network how its images are prepared, as far as the options say it.

        Args:
            model: The network, whose record of its images is changed.

        Returns:
            The same network.
        """
        from normswap.models.preprocessing import state

        return state(model, self.stated())

    def open(self, name: str, *, device: str = "cpu", runs: bool = False) -> nn.Module:
        """Return a network that is opened by these options, and note how its images are prepared.

        Args:
            name: The argument MODEL of a command: a name, a hub id, a path or a factory.
            device: The device to place the network on.
            runs: Whether `name` may be an exported file. Such a file runs in its own runtime.
        """
        # A preprocessing that no image can have is refused before the network is opened.
        self.stated()
        return self.state(Opening.open(self, name, device=device, runs=runs))

    def open_damaged(self, name: str, *, device: str) -> nn.Module:
        """Return the network `name`, even if statistics of its BatchNorms are NaN or negative."""
        from normswap.models.weight_files import with_broken_statistics

        with with_broken_statistics():
            return self.open(name, device=device)


@dataclass(frozen=True)
class Compared:
    """The options that name a network to compare MODEL with, and how often both must agree."""

    against: Annotated[
        str | None, Option(metavar="MODEL", show_default=False, help="Compare with this network.")
    ] = None
    min_kept: Annotated[
        float | None,
        Option(
            min=0.0,
            max=1.0,
            metavar="SHARE",
            help="Exit with 1 if they agree on less than this share.",
        ),
    ] = None

    def enough(self, agreement: float | None) -> bool:
        """Return whether the networks agree on at least the share --min-kept.

        Args:
            agreement: The share of images with the same answer. None if it was not measured.

        Raises:
            OptionError: --min-kept is given, and no agreement was measured.
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
    """The options that name labelled images, if there are any, and say how they are loaded."""

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
        """Return batches as the network takes them. Remarks on the images go to stderr.

        Args:
            model: The network that the images are prepared for.
            seed: The seed by which `samples` images are drawn.
            labelled: Whether images must have labels. None takes labels if there are any.
        """
        from normswap.images import array_files
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

        # Arrays are not prepared, so nothing has to be assumed of their mean and size.
        holds_arrays = array_files.find(Path(str(self.data)))
        if not holds_arrays and (missing := assumption(model)):
            remark(
                [f"{missing} (--image-mean, --image-std, --crop-pct and --interpolation say it)"]
            )
        return loader


def open_model(
    name: str, *, device: str = "cpu", runs: bool = False, **asked: Unpack[Asked]
) -> nn.Module:
    """Return the network `name`, while a terminal shows that it is being opened.

    Args:
        name: The argument MODEL of a command: a name, a hub id, a path or a factory.
        device: The device to place the network on.
        runs: Whether `name` may be an exported file. Such a file runs in its own runtime.
        asked: The keywords of `checkpoint.open_model`.
    """
    # `kinds.parts` refuses options that do not go together, before torch is imported. It is not
    # asked about a directory, or a file that normswap may have written: these may state their
    # architecture themselves, and are opened first.
    written_endings = (".safetensors", *kinds.EXPORTED)
    if not Path(name).is_dir() and Path(name).suffix.lower() not in written_endings:
        kinds.parts(name, asked.get("weights") or "pretrained", asked.get("arch"))

    # Downloads show a bar of their own.
    is_local = Path(name.removeprefix("local-dir:")).exists() or asked.get("weights") == "random"
    spinner = working(f"opening {name}") if is_local else nullcontext()
    with spinner, warnings.catch_warnings(record=True) as caught:
        # Only these warnings are meant for the user. `errors.quiet` drops those of libraries.
        warnings.simplefilter("always", WeightsNote)
        from normswap.models import devices, zoo
        from normswap.storage import checkpoint, network_folder

        # The folder of a training run is no network, but holds some.
        network_folder.check_no_run(Path(name))
        file = exported_file(name) if runs else None
        # An exported file takes no option that shapes a network.
        if file is not None:
            zoo.check_unasked(name, asked)
            return devices.place(file.network(), device)
        model = devices.place(checkpoint.open_model(name, **asked), device)

    remark(str(warning.message) for warning in caught if issubclass(warning.category, WeightsNote))
    return model


def trust_flag(is_trusted: bool) -> list[str]:
    """Return the option --trust-factory as a list of words, or an empty list.

    With the option, a command imports the user's own function that builds a directory's network.

    Args:
        is_trusted: Whether the option is wanted.
    """
    return ["--trust-factory"] if is_trusted else []


def trust_words(model: nn.Module) -> list[str]:
    """Return the words that a command line needs to open a network's directory.

    They are `--trust-factory` if a function of the user's own builds the network, and none
    otherwise.
    """
    from normswap import provenance

    arch = provenance.of(model).arch
    return trust_flag(arch is not None and kinds.by_builder(arch.builder).foreign)


def exported_file(name: str) -> ExportedFile | None:
    """Return the exported file that a MODEL names.

    The result is None if the name does not end like an exported file, such as `.onnx`.
    """
    if Path(name).suffix.lower() not in kinds.EXPORTED:
        return None
    from normswap.exporting.exported_file import ExportedFile

    return ExportedFile.find(name)


def _arch_arg(text: str) -> tuple[str, Value | list[Value]]:
    """Return the name and the value of an --arch-arg such as `channels=16,32,64,128`."""
    key, sign, value = text.partition("=")
    if not sign or not key.isidentifier():
        raise OptionError(
            f"--arch-arg {text!r} is not KEY=VALUE", remedy="For instance channels=16,32,64,128"
        )
    return key, parse(value)


def _sides(option: str, text: str) -> tuple[int, ...]:
    """Return a shape without the batch, read from whole numbers such as `3,224,224`.

    Args:
        option: The option, for the error.
        text: The numbers, from 1 up, with commas between.
    """
    sides = text.split(",")
    if not all(side.strip().isdecimal() and int(side) for side in sides):
        why = (
            "it is C,H,W of an image (3,224,224), C,T of a series (4,6144), or any other shape"
            " without the batch"
        )
        raise OptionError(f"{option} {text}", why)
    return tuple(map(int, sides))


def _numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    """Return numbers, read from a text such as `0.5` or `0.485,0.456,0.406`.

    Args:
        option: The option, for the error.
        text: One number, or one per channel with commas between. None if the option is not given.
            The result is None then, too.
    """
    if text is None:
        return None
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise OptionError(
            f"{option} {text}", "it is a number, or one per channel: 0.485,0.456,0.406"
        ) from None


def _named_input(text: str) -> tuple[str, tuple[tuple[int, ...], str]]:
    """Return name, shape and type of an argument, read from an --input such as `ids=16:int64`.

    The shape is without the batch. An input without a type is float32.
    """
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
    """Return an option's value: a number, true, false, none, the text, or a comma list of these."""
    if "," in text:
        return [_scalar(item.strip()) for item in text.split(",") if item.strip()]
    return _scalar(text)


def _scalar(text: str) -> Value:
    """Return the value that a text writes, such as 3, 0.5, true or none, or else the text."""
    # `capitalize` makes Python's True, False and None of true, false and none.
    try:
        value: Value = ast.literal_eval(text.capitalize())
    # Python's reader raises these for what it cannot read, or finds nested too deeply.
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text
    return value


def last_part(name: str) -> str:
    """Return the last part of a MODEL's name, which begins the default name of an output.

    It is `resnet50` for `runs/resnet50`, `resnet50.pth` and `torchvision:resnet50@IMAGENET1K_V2`.
    """
    # The name may have a prefix, such as torchvision: or hf-hub:.
    prefix, _, after = name.partition(":")
    has_prefix = prefix in kinds.prefixes()

    path = Path(after if has_prefix else name)
    if path.is_dir():
        return path.resolve().name
    if path.is_file():
        return path.stem

    # The weights may stand behind an @. A colon is left in package.module:factory.
    bare = after.partition("@")[0] if has_prefix else name
    return Path(bare).name.replace(":", "-")
