"""`normswap export`: a network as one file for another runtime."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from normswap.cli import progress
from normswap.cli.grouped_options import spread
from normswap.cli.options import Images, Json, Model, Opening
from normswap.cli.printing import Body, show
from normswap.cli.tables import size
from normswap.errors import OptionError
from normswap.exporting import formats

ORDER = 90


@dataclass(frozen=True)
class Checked(Images):
    """What the file is checked on."""

    batch_size: int = field(default=64, init=False)
    workers: Annotated[int, typer.Option(min=0, metavar="N", help="Processes that load images.")] = 0
    samples: Annotated[int, typer.Option(min=1, metavar="N", help="Check on this many images of --data.")] = 64


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
    dtype: Annotated[str, typer.Option(metavar="fp32|fp16|bf16", help="bf16: of weights, see above.")] = "fp32",
    dynamic_batch: Annotated[
        bool, typer.Option("--dynamic-batch", help="Take any number of images at a time, not one.")
    ] = False,
    input_size: Annotated[
        str | None, typer.Option(metavar="C,H,W", help="[default: the size the network was made for]")
    ] = None,
    normalize: Annotated[
        bool, typer.Option("--normalize", help="Take pixels in 0..1: mean and std go into the file.")
    ] = False,
    softmax: Annotated[bool, typer.Option("--softmax", help="Answer with probabilities.")] = False,
    count_plain: Annotated[
        bool, typer.Option("--count-plain", help="Also count the nodes of an export without folding.")
    ] = False,
    images: Checked,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    opening: Opening,
    json: Json = False,
) -> int:
    """Fold a network into one file for another runtime.

    Whatever the scheme, what is exported has no norm (but those with statistics per sample), no scalar and no weight
    standardization. The file is run in its own runtime against the source, on images of --data or else on smooth noise,
    before it gets its name. FILE.preprocess.json, beside it, says what is to be done with an image first. Images and
    answers are float32 whatever --dtype is. fp16 weights compute in fp16. bf16 weights compute in fp32, and stem,
    projections and classifier keep fp32: bf16 arithmetic changes more than 1 answer in 1000.

    The keys of --json: source, file, sidecar, format, dtype, input_size, dynamic_batch, figures (relative_l2, largest,
    agreement, count, tolerance, inputs), nodes (counts by kind), plain_nodes (null without --count-plain), bytes, notes
    and seconds.
    """
    wanted = _sides(input_size)
    with progress.working("starting"):
        from normswap.exporting import exporter

        exporter.claim(output, format, force=force)
    net = opening.open(model)
    with progress.stages() as say:
        loader = None if images.data is None else images.loader(exporter.preprocessing(net, wanted))
        done = exporter.export(
            net, output, format=format, dtype=dtype, dynamic_batch=dynamic_batch, input_size=wanted,
            normalize=normalize, softmax=softmax, images=loader, force=force, count_plain=count_plain, say=say,
        )  # fmt: skip
    show({"source": model, **asdict(done)}, json, _say)
    return 0


def _sides(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() and int(part) for part in parts):
        raise OptionError(f"--input-size {text}", "it is C,H,W, for instance 3,224,224")
    return tuple(int(part) for part in parts)


def _say(body: Body) -> None:
    figures = body["figures"]
    lines = [
        ("file", f"{body['file']} ({body['bytes'] / 1e6:.1f} MB), {body['sidecar'].name} beside it"),
        ("format", f"{body['format']}, {body['dtype']}"),
        ("takes", f"{'images' if body['dynamic_batch'] else 'one image'} of {size(body['input_size'])}"),
        ("nodes", _counts(body["nodes"])),
        ("plain export", _counts(body["plain_nodes"])),
        ("relative L2", f"{figures['relative_l2']:.1e} of the answers, allowed {figures['tolerance']:.1e}"),
        (
            "same answer",
            f"{round(figures['agreement'] * figures['count'])} of {figures['count']} ({figures['inputs']})",
        ),
        *(("note", note) for note in body["notes"]),
    ]
    for name, text in lines:
        if text:
            print(f"{name:13}{text}")


def _counts(nodes: dict[str, int] | None) -> str:
    listed = ", ".join(f"{count} {kind}" for kind, count in (nodes or {}).items())
    return f"{sum(nodes.values())}: {listed}" if nodes else ""
