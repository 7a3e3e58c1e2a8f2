"""`normswap export`: a network as one file for another runtime."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from typer import Option

from normswap.cli import tables
from normswap.cli.options import ImageOpening, Images, Json, Model
from normswap.cli.progress import working
from normswap.cli.tables import facts, show, size
from normswap.errors import OptionError
from normswap.exporting import formats
from normswap.exporting.settings import SAFE_BITS, WHOLE_BITS, FileSettings
from normswap.plan import Body

if TYPE_CHECKING:
    from torch import nn

    from normswap.exporting.exporter import Exported
    from normswap.images.datasets import Loader

KEYS = (
    "source, file, parts (further files), sidecar, format, dtype, input_size, dynamic_batch,"
    " figures (null where the file was not run), nodes (counts by kind), bytes, notes, seconds,"
    " noise_only (it was checked on no images), quantized (null but for int8: calibrated_on,"
    " weight_bits), inputs (of what takes no images)"
)
EXAMPLES = (
    "export demo -o demo.onnx",
    "export demo -o demo-int8.onnx --precision int8 --calibrate IMAGES",
)
_NOT_RUN = (
    f"{formats.NOT_RUN}: this system has no such runtime; the folded network passed in PyTorch"
)
# A file is checked on this many images, unless --samples says another number.
_FEW = 64
# The cost of int8 is measured on this many images that calibration leaves; 2000 give it to 0.3
# points.
_MEASURED = 2000
_CALIBRATE = (
    "For int8: images to set it by, as --data names them. Its cost is measured on --data, if that"
    " is another place, or else on other images of PATH, at most 2,000."
)
_WEIGHT_BITS = (
    "For int8: 7 compute the same on every CPU; 8 are finer, for CPUs with VNNI or dot products of"
    " bytes."
)


@dataclass(frozen=True)
class Written:
    """The options that say which file is written, and how."""

    output: Annotated[
        Path, Option("-o", "--output", metavar="FILE", show_default=False, help="File to write.")
    ]
    format: Annotated[
        str | None,
        Option(metavar="|".join(formats.names()), help="[default: what FILE's ending says]"),
    ] = None
    dtype: Annotated[
        str, Option("--precision", metavar="fp32|fp16|bf16|int8", help="bf16: of weights alone.")
    ] = "fp32"
    dynamic_batch: Annotated[
        bool, Option("--dynamic-batch", help="Take any number of images at a time, not one.")
    ] = False
    normalize: Annotated[
        bool, Option("--normalize", help="Take pixels in 0..1: mean and std go into the file.")
    ] = False
    softmax: Annotated[bool, Option("--softmax", help="Answer with probabilities.")] = False


@dataclass(frozen=True)
class Checked(Images):
    """The options on the images on which the exported file is compared with its source."""

    batch_size: int = field(default=64, init=False)
    workers: Annotated[int, Option(min=0, metavar="N", help="Processes that load images.")] = 0
    samples: Annotated[
        int | None,
        Option(
            min=1, metavar="N", show_default=False, help="Check on this many images of --data [64]."
        ),
    ] = None


@dataclass(frozen=True)
class Int8:
    """The options of an export to int8: calibration images, and the bits of a weight."""

    GROUP: ClassVar[str] = "int8"
    calibrate: Annotated[
        str | None, Option(metavar="PATH", show_default=False, help=_CALIBRATE)
    ] = None
    calibrate_samples: Annotated[
        int | None,
        Option(
            min=1,
            metavar="N",
            show_default=False,
            help="For int8: set it by this many [512; half of PATH without --data].",
        ),
    ] = None
    weight_bits: Annotated[
        int | None,
        Option(min=SAFE_BITS, max=WHOLE_BITS, metavar="7|8", show_default=False, help=_WEIGHT_BITS),
    ] = None

    def parts(self, images: Checked, model: nn.Module) -> tuple[Loader, Loader]:
        """Return the images to calibrate int8 on, and the images to measure its cost on.

        Args:
            images: The options of --data.
            model: The network that the images are prepared for.
        """
        from normswap.images.datasets import calibration_images, located, split_for_calibration

        place = replace(images, data=self.calibrate, samples=None, split="train")
        whole = place.loader(model, labelled=None)
        # Without images of another place, those of --calibrate are divided between both uses.
        are_the_same = images.data in (None, self.calibrate)
        if not are_the_same and place.data is not None and images.data is not None:
            # Another spelling, a link or a part of the other place may name the same images.
            first = located(place.data, place.split)
            second = located(images.data, images.split)
            are_the_same = bool(first and second and first.resolve() == second.resolve())
        if are_the_same:
            most = images.samples or _MEASURED
            return split_for_calibration(whole, self.calibrate_samples, most=most)

        # Images of another place measure the cost, so none of --calibrate is held back.
        calibrate = calibration_images(whole, self.calibrate_samples)
        return calibrate, images.loader(model, labelled=None)


def run(
    model: Model,
    *,
    written: Written,
    images: Checked,
    int8: Int8,
    force: Annotated[bool, Option("--force", help="Replace a file that exists.")] = False,
    opening: ImageOpening,
    json: Json = False,
) -> int:
    """Fold a network into one file for another runtime.

    Norms, scalars and weight standardization are folded away, whatever the scheme; norms with
    statistics per sample stay. The file is run in its own runtime against the source, on images of
    --data or else on smooth noise, before it gets its name. FILE.preprocess.json, beside it, says
    how an image is prepared. Images and answers are float32 whatever --precision is. fp16 weights
    compute in fp16. bf16 weights compute in fp32, as bf16 arithmetic changes more than 1 answer in
    1000.

    The runtime's own quantizer writes int8, from the folded network and the ranges of --calibrate's
    images. What int8 costs is measured on other images, printed, and written into
    FILE.preprocess.json.
    """
    options = {name: value for name, value in vars(written).items() if name != "output"}
    settings = FileSettings(**options, weight_bits=int8.weight_bits, force=force)
    formats.check(written.output, settings)
    quantized = written.dtype == "int8"
    if quantized and int8.calibrate is None:
        raise OptionError("--precision int8 needs --calibrate DATA")
    if not quantized and int8.calibrate is not None:
        raise OptionError("--calibrate is for --precision int8")

    net = opening.open(model, device=images.device)
    with working("exporting") as progress:
        from normswap.exporting import exporter

        calibrate = None
        loader = None
        if quantized:
            calibrate, loader = int8.parts(images, net)
        elif images.data is not None:
            # A few images are enough for the check, unless --samples says more.
            chosen = replace(images, samples=images.samples or _FEW)
            loader = chosen.loader(net, labelled=None)
        exported = exporter.export(
            net, written.output, images=loader, calibrate=calibrate, log=progress, **vars(settings)
        )

    next_command = _next_command(exported, opening.words(model))
    show({"source": model, **asdict(exported)}, json, _print, *next_command)
    return 0


def _next_command(exported: Exported, words: list[str]) -> list[object]:
    """Return the words of a command that measures the exported file on images.

    It is `evaluate` for a classifier of images. For any other file it is `verify`, which compares
    the file with its source. The list is empty if the file was not run, as its runtime is missing.

    Args:
        exported: The file that was written.
        words: The words that open its source.
    """
    figures = exported.figures
    if not figures:
        return []
    # `evaluate` takes a file that gives one answer for each image.
    if figures.answers == figures.count and not exported.inputs:
        return ["evaluate", exported.file, "--data", "IMAGES"]
    return ["verify", exported.file, "--against", *words, "--data", "IMAGES"]


def _print(body: Body) -> None:
    """Print what was exported, and how far its answers are from those of the source."""
    # The files that lie beside the exported one.
    beside = " and ".join(each.name for each in (*body["parts"], body["sidecar"]))
    count = "images" if body["dynamic_batch"] else "one image"
    rows = [
        ("file", f"{body['file']} ({body['bytes'] / 1e6:.1f} MB), {beside} beside it"),
        ("format", f"{body['format']}, {body['dtype']}"),
        ("takes", "; ".join(body["inputs"]) or f"{count} of {size(body['input_size'])}"),
        ("nodes", tables.operators(body["nodes"])),
    ]

    quantized = body["quantized"]
    # The figures come from running the file. Without its runtime here there are none.
    if body["figures"]:
        rows += _figure_rows(body)
    else:
        rows.append(("checked", _NOT_RUN + (", on noise" if body["noise_only"] else "")))
    if quantized:
        bits = f"{quantized['weight_bits']} bits"
        rows.append(("weights", f"{bits}, calibrated on {quantized['calibrated_on']} images"))
    facts(*rows, *(("note", note) for note in body["notes"]))


def _figure_rows(body: Body) -> list[tuple[str, str]]:
    """Return the printed rows, as (name, value), that say how far the file is from its source.

    Args:
        body: What `--json` prints of the export.
    """
    figures = body["figures"]
    distance = f"{figures['relative_l2']:.1e} of the answers"
    if not body["quantized"]:
        distance += f", allowed {figures['tolerance']:.1e}"
    checked = ""
    if body["noise_only"]:
        checked = "on noise only; give --data IMAGES to check it on photographs"

    return [
        ("relative L2", distance),
        ("same answer", tables.same_answers(figures)),
        ("top-1", tables.top1_change(figures)),
        ("checked", checked),
    ]
