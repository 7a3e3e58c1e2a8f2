"""`normswap export`: a network as one file for another runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normswap.cli import progress
from normswap.cli.grouped_options import spread
from normswap.cli.options import Images, Json, Model, Opening
from normswap.cli.printing import show
from normswap.cli.tables import size
from normswap.errors import OptionError
from normswap.exporting import formats
from normswap.exporting.settings import LEVELS, SAFE_BITS, FileSettings, Int8Settings
from normswap.plan import Body

if TYPE_CHECKING:
    from normswap.images.datasets import Loader

ORDER = 90
_FEW = 64
_MEASURED = 2000  # images that calibration leaves: what int8 costs is known to 0.3 points then


@dataclass(frozen=True)
class Checked(Images):
    """What the file is checked on."""

    batch_size: int = field(default=64, init=False)
    workers: Annotated[int, typer.Option(min=0, metavar="N", help="Processes that load images.")] = 0
    samples: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", show_default=False,
            help="Check on this many images of --data [64]; with --calibrate, calibrate on so many [512 or half].",
        ),
    ] = None  # fmt: skip

    def checks(self, config: Mapping[str, object]) -> Loader:
        """Images of --data: a few, as what is exact shows on any."""
        return replace(self, samples=self.samples or _FEW).loader(config)


@dataclass(frozen=True)
class Int8:
    """What int8 is made by."""

    calibrate: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", show_default=False,
            help="For int8: images to set it by, as --data names them. What it costs is measured on --data, or else "
            "on other images of PATH, at most 2,000.",
        ),
    ] = None  # fmt: skip
    per_tensor: Annotated[
        bool, typer.Option("--per-tensor", help="For int8: one step for all weights of a layer, not one per channel.")
    ] = False
    weight_bits: Annotated[
        int,
        typer.Option(
            min=min(LEVELS), max=max(LEVELS), metavar="|".join(map(str, LEVELS)),
            help="For int8: 7 compute the same on every CPU; 8 are finer, for CPUs with VNNI or dot products of bytes.",
        ),
    ] = SAFE_BITS  # fmt: skip
    sensitive: Annotated[
        int, typer.Option(min=0, metavar="N", help="For int8: keep the N layers in fp32 that it costs most.")
    ] = 0
    max_drop: Annotated[
        float | None,
        typer.Option(
            metavar="POINTS", show_default=False,
            help="For int8: write nothing if it loses more top-1 (without labels: agreement) than this.",
        ),
    ] = None  # fmt: skip

    @property
    def settings(self) -> Int8Settings | None:
        """None where all is as it is without."""
        settings = Int8Settings(not self.per_tensor, self.weight_bits, self.sensitive, self.max_drop)
        return None if self.calibrate is None and settings == Int8Settings() else settings

    def parts(self, images: Checked, config: Mapping[str, object]) -> tuple[Any, Any]:
        """What to calibrate on, and what to measure on."""
        from normswap.images.parting import part

        some = replace(images, data=self.calibrate, samples=None, split="train").loader(config)
        calibrate, others = part(some, images.samples, most=_MEASURED)
        return calibrate, others if images.data is None else replace(images, samples=None).loader(config)


def register(app: typer.Typer) -> None:
    app.command("export")(spread(run))


def run(
    model: Model,
    *,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", show_default=False, help="File to write.")],
    format: Annotated[
        str | None,
        typer.Option(metavar="|".join(formats.names()), help="[default: what FILE's ending says]"),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option("--precision", "--dtype", metavar="fp32|fp16|bf16|int8", help="bf16: of weights, see above."),
    ] = "fp32",
    dynamic_batch: Annotated[
        bool, typer.Option("--dynamic-batch", help="Take any number of images at a time, not one.")
    ] = False,
    normalize: Annotated[
        bool, typer.Option("--normalize", help="Take pixels in 0..1: mean and std go into the file.")
    ] = False,
    softmax: Annotated[bool, typer.Option("--softmax", help="Answer with probabilities.")] = False,
    count_plain: Annotated[
        bool, typer.Option("--count-plain", help="Also count the nodes of an export without folding.")
    ] = False,
    images: Checked,
    int8: Int8,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    opening: Opening,
    json: Json = False,
) -> int:
    """Fold a network into one file for another runtime.

    Whatever the scheme, what is exported has no norm (but those with statistics per sample), no scalar and no weight
    standardization. The file is run in its own runtime against the source, on images of --data or else on smooth noise,
    before it gets its name. FILE.preprocess.json, beside it, says what is to be done with an image first. Images and
    answers are float32 whatever --precision is. fp16 weights compute in fp16. bf16 weights compute in fp32, and stem,
    projections and classifier keep fp32: bf16 arithmetic changes more than 1 answer in 1000.

    int8 is the runtime's own quantizer's, on the folded network: factors that pass from layer to layer are chosen so
    that channels are alike in size, biases corrected, ranges read off --calibrate's images. How is chosen by trial on
    those; what it costs is measured on others, printed and written into FILE.preprocess.json.

    The keys of --json: source, file, parts (further files), sidecar, format, dtype, input_size, dynamic_batch, figures
    (relative_l2, largest, agreement, count, tolerance, inputs, answers, unit, source_top1, top1, output), nodes (counts
    by kind), plain_nodes (null without --count-plain), bytes, notes, seconds and quantized (null but for int8:
    calibrated_on, gauge, ranges, per_channel, weight_bits, fp32, trials).
    """
    settings = FileSettings(
        format, dtype, dynamic_batch, normalize=normalize, softmax=softmax, force=force, count_plain=count_plain
    )  # fmt: skip
    with progress.working("starting"):
        from normswap.exporting import exporter, sidecar

        exporter.claim(output, settings)
        if (dtype == "int8") != (int8.calibrate is not None):
            what = (
                "--precision int8 needs --calibrate DATA" if dtype == "int8" else "--calibrate is for --precision int8"
            )
            raise OptionError(what)
    net = opening.open(model)
    with progress.stages(plain=dtype == "int8") as log:
        config = sidecar.preprocessing(net)
        calibrate, loader = None, None if images.data is None else images.checks(config)
        if int8.calibrate is not None:
            calibrate, loader = int8.parts(images, config)
        done = exporter.export(
            net, output, images=loader, calibrate=calibrate, int8=int8.settings, log=log, **vars(settings)
        )  # fmt: skip
    show({"source": model, **asdict(done)}, json, _say)
    return 0


def _say(body: Body) -> None:
    figures = body["figures"]
    lines = [
        ("file", f"{body['file']} ({body['bytes'] / 1e6:.1f} MB), {_beside(body)} beside it"),
        ("format", f"{body['format']}, {body['dtype']}"),
        ("takes", f"{'images' if body['dynamic_batch'] else 'one image'} of {size(body['input_size'])}"),
        ("nodes", _counts(body["nodes"])),
        ("plain export", _counts(body["plain_nodes"])),
        ("relative L2", f"{figures['relative_l2']:.1e} of the answers" + _allowed(body)),
        ("same answer", _same(figures)),
        ("top-1", _top1(figures)),
        *_quantized(body["quantized"] or {}),
        *(("note", note) for note in body["notes"]),
    ]
    for name, text in lines:
        if text:
            print(f"{name:13}{text}")


def _beside(body: Body) -> str:
    return " and ".join(each.name for each in (*body["parts"], body["sidecar"]))


def _allowed(body: Body) -> str:
    return "" if body["quantized"] else f", allowed {body['figures']['tolerance']:.1e}"


def _same(figures: Body) -> str:
    if figures["agreement"] is None:
        return ""
    answers, unit = figures["answers"], figures["unit"]
    of = "" if unit == "images" else f" {unit} of {figures['count']} images"
    return f"{round(figures['agreement'] * answers)} of {answers}{of} ({figures['inputs']})"


def _top1(figures: Body) -> str:
    if figures["top1"] is None:
        return ""
    return f"{figures['top1']:.2f} after {figures['source_top1']:.2f} of the source, on {figures['count']} images"


def _quantized(how: Body) -> list[tuple[str, str]]:
    """How an int8 file was made."""
    if not how:
        return []
    steps = "a step per output channel" if how["per_channel"] else "one step per tensor"
    return [
        ("gauge", f"{how['gauge']}; the best of {len(how['trials'])} trials on {how['calibrated_on']} images"),
        ("weights", f"{how['weight_bits']} bits, {steps}; ranges: {how['ranges']}"),
        ("in fp32", ", ".join(f"{path} (alone {cost:.1e})" for path, cost in how["fp32"].items())),
    ]


def _counts(nodes: dict[str, int] | None) -> str:
    listed = ", ".join(f"{count} {kind}" for kind, count in (nodes or {}).items())
    return f"{sum(nodes.values())}: {listed}" if nodes else ""
