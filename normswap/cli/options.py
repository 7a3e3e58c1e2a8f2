"""Arguments and options that several commands share, alone or as records (see `grouped_options`)."""

from __future__ import annotations

import ast
import itertools
import shlex
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from normswap.cli import progress
from normswap.errors import OptionError, flag
from normswap.models import kinds

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Unpack

    from normswap.exporting.exported_file import ExportedFile
    from normswap.models.zoo import Asked

_MODEL = (
    "A timm name, hf-hub:ORG/NAME, local-dir:DIR, a directory (timm's hub layout, or written by normswap), "
    "torchvision:NAME[@WEIGHTS], hf:OWNER/NAME or hf:DIR (transformers), package.module:factory "
    "of your own, or a .safetensors/.pth file with --arch"
)
Model = Annotated[str, typer.Argument(metavar="MODEL", show_default=False, help=f"{_MODEL}.")]
ModelOrFile = Annotated[
    str, typer.Argument(metavar="MODEL", show_default=False, help=f"{_MODEL}; or a file that `export` wrote.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]


def output_option(metavar: str, help: str) -> Any:
    """The option that says where to write."""
    return typer.Option("-o", "--output", metavar=metavar, show_default=False, help=help)


def _check_device(name: str) -> str:
    if name not in ("auto", "cpu"):
        from normswap.models import devices

        devices.find(name)
    return name


Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda|mps", help="Where networks run.", callback=_check_device)]
Weights = Annotated[
    str, typer.Option(metavar="pretrained|random|FILE", help="Random: the bare architecture; FILE: these weights.")
]
Trust = Annotated[
    bool, typer.Option("--trust-factory", help="Import the factory that a directory names; that runs its code.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace an output that exists.")]
Value = bool | int | float | str | None


@dataclass(frozen=True)
class Opening:
    """How a MODEL is opened."""

    GROUP: ClassVar[str] = "How MODEL is opened"
    weights: Weights = "pretrained"
    arch: Annotated[str | None, typer.Option("--arch", metavar="NAME", help="MODEL that a weights file is of.")] = None
    arch_arg: Annotated[
        list[str] | None,
        typer.Option(
            "--arch-arg", metavar="KEY=VALUE", help="Argument of the architecture, e.g. channels=16,32,64,128."
        ),
    ] = None
    num_classes: Annotated[int | None, typer.Option(min=0, metavar="N", help="Another head than the source's.")] = None
    in_chans: Annotated[int | None, typer.Option(min=1, metavar="N", help="Another number of input channels.")] = None
    input_size: Annotated[
        str | None, typer.Option("--input-size", metavar="C,H,W", help="Size of its images, where it says another.")
    ] = None
    trust_factory: Trust = False

    def asked(self) -> list[tuple[str, str]]:
        """The options that ask for something of the network itself, as flags and values."""
        names = ("weights", "arch", "num_classes", "in_chans", "input_size")
        values = {flag(name): getattr(self, name) for name in names}
        pairs = [(name, str(value)) for name, value in values.items() if value not in (None, "pretrained")]
        return pairs + [("--arch-arg", text) for text in self.arch_arg or ()]

    def as_typed(self, name: str) -> str:
        """MODEL and what opens it so, as words of a command line."""
        trust = ["--trust-factory"] * self.trust_factory
        return shlex.join([name, *itertools.chain(*self.asked()), *trust])

    def open(self, name: str, *, device: str = "cpu", runs: bool = False) -> nn.Module:
        """The network of that name, on the device; `runs`: it may be an exported file, which runs itself."""
        args = dict(map(_pair, self.arch_arg or []))
        size = None if self.input_size is None else _sides(self.input_size)
        asked: Asked = {"weights": self.weights, "arch": self.arch, "arch_args": args}
        asked |= {"num_classes": self.num_classes, "in_chans": self.in_chans}
        return open_model(name, input_size=size, trust_factory=self.trust_factory, device=device, runs=runs, **asked)


def open_model(
    name: str,
    *,
    input_size: Sequence[int] | None = None,
    trust_factory: bool = False,
    device: str = "cpu",
    runs: bool = False,
    **asked: Unpack[Asked],
) -> nn.Module:
    """See `checkpoint.open_model` and `Opening.open`; a terminal shows that it is going on."""
    if not Path(name).is_dir() and Path(name).suffix.lower() not in kinds.EXPORTED:
        kinds.parts(name, asked.get("weights") or "pretrained", asked.get("arch"))
    # Downloads show a bar of their own.
    local = Path(name.removeprefix("local-dir:")).exists() or asked.get("weights") == "random"
    with progress.working(f"opening {name}") if local else nullcontext():
        from normswap.models import devices, zoo
        from normswap.storage import checkpoint
        from normswap.training.run_folder import check_no_run

        check_no_run(Path(name))
        file = exported_file(name) if runs else None
        if file is not None:
            zoo.check_unasked(name, {**asked, "input_size": input_size})
            return devices.place(file.network(), device)
        model = checkpoint.open_model(name, input_size=input_size, trust_factory=trust_factory, **asked)
        return devices.place(model, device)


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
        raise OptionError(f"--arch-arg {text!r} is not KEY=VALUE", remedy="For instance channels=16,32,64,128")
    return key, parse(value)


def _sides(text: str) -> tuple[int, ...]:
    sides = text.split(",")
    if not all(side.strip().isdecimal() and int(side) for side in sides):
        raise OptionError(f"--input-size {text}", "it is C,H,W of an image (3,224,224), or C,T of a series (4,6144)")
    return tuple(map(int, sides))


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
