"""`normswap export`: a network as one file for another runtime. `cli` imports this file to register it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from normswap.cli import progress
from normswap.cli.app import app
from normswap.cli.options import ArchArgs, ArchName, Data, InChans, Json, Model, NumClasses, Split, Weights, Workers
from normswap.errors import OptionError


@app.command("export")
def export(
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", show_default=False, help="File to write.")],
    format: Annotated[
        str | None,
        typer.Option(metavar="onnx|pt2|torchscript|safetensors", help="[default: what FILE's ending says]"),
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
    data: Data = None,
    samples: Annotated[int, typer.Option(min=1, metavar="N", help="Check on this many images of --data.")] = 64,
    workers: Workers = 0,
    split: Split = "validation",
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    weights: Weights = "pretrained",
    arch: ArchName = None,
    arch_arg: ArchArgs = None,
    num_classes: NumClasses = None,
    in_chans: InChans = None,
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
    from normswap.cli import commands

    source = commands.Source(model, weights, arch, arch_arg or [], num_classes, in_chans)
    options = {"format": format, "dtype": dtype, "dynamic_batch": dynamic_batch, "input_size": _size(input_size)}
    options |= {"normalize": normalize, "softmax": softmax, "force": force, "count_plain": count_plain}
    images = None if data is None else {"data": data, "samples": samples, "workers": workers, "split": split}
    return _run(source, output, options, images, as_json=json)


def _size(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() and int(part) for part in parts):
        raise OptionError(f"--input-size {text}", "it is C,H,W, for instance 3,224,224")
    return tuple(int(part) for part in parts)


def _run(source: Any, file: Path, options: dict[str, Any], images: dict[str, Any] | None, *, as_json: bool) -> int:
    import dataclasses
    import json

    with progress.working("starting"):
        from normswap.exporting import exporter

        exporter.claim(file, options["format"], force=options["force"])
    model = source.open()
    with progress.stages() as say:
        loader = None if images is None else exporter.loader(model, options["input_size"], **images)
        done = exporter.export(model, file, images=loader, say=say, **options)
    if as_json:
        from normswap.analysis import summary

        body = summary.plain({"source": source.name, **dataclasses.asdict(done)})
        print(json.dumps({**body, "file": str(done.file), "sidecar": str(done.sidecar)}, indent=2, allow_nan=False))
    else:
        _show(done)
    return 0


def _show(done: Any) -> None:
    figures = done.figures
    same = round(figures.agreement * figures.count)
    lines = [
        ("file", f"{done.file} ({done.bytes / 1e6:.1f} MB), {done.sidecar.name} beside it"),
        ("format", f"{done.format}, {done.dtype}"),
        ("takes", f"{'images' if done.dynamic_batch else 'one image'} of {'x'.join(map(str, done.input_size))}"),
        ("nodes", _counts(done.nodes)),
        ("plain export", _counts(done.plain_nodes)),
        ("relative L2", f"{figures.relative_l2:.1e} of the answers, allowed {figures.tolerance:.1e}"),
        ("same answer", f"{same} of {figures.count} ({figures.inputs})"),
        *(("note", note) for note in done.notes),
    ]
    for name, text in lines:
        if text:
            print(f"{name:13}{text}")


def _counts(nodes: dict[str, int] | None) -> str:
    listed = ", ".join(f"{count} {kind}" for kind, count in (nodes or {}).items())
    return f"{sum(nodes.values())}: {listed}" if nodes else ""
