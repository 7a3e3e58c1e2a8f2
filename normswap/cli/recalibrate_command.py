"""`normswap recalibrate`: BatchNorm statistics of a new domain."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from normswap.cli import progress, render
from normswap.cli.app import app
from normswap.cli.options import (
    ArchArgs,
    ArchName,
    BatchSize,
    InChans,
    Json,
    Model,
    NumClasses,
    Samples,
    Split,
    Weights,
    Workers,
)


@app.command("recalibrate")
def _recalibrate(
    model: Model,
    data: Annotated[str, typer.Option(metavar="PATH", help="Images of the new domain, as --data elsewhere.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Directory to write [default: ./NAME-recalibrated]."),
    ] = None,
    samples: Samples = None,
    batch_size: BatchSize = 64,
    seed: Annotated[int, typer.Option(metavar="S", help="Which images.")] = 0,
    workers: Workers = 2,
    split: Split = "train",
    force: Annotated[bool, typer.Option("--force", help="Replace an output that exists.")] = False,
    weights: Weights = "pretrained",
    arch: ArchName = None,
    arch_arg: ArchArgs = None,
    num_classes: NumClasses = None,
    in_chans: InChans = None,
    json: Json = False,
) -> int:
    """Estimate BatchNorm's population statistics anew, on other images.

    Ioffe & Szegedy, algorithm 2: batch statistics averaged over batches, with the unbiased variance. Labels are not
    needed; weights, gamma and beta stay.

    The keys of --json: source, data, output, notes (how much was read) and report (how much
    the outputs change, on noise).
    """
    from normswap.cli import commands

    source = commands.Source(model, weights, arch, arch_arg or [], num_classes, in_chans)
    place = output or Path(f"{commands.last_part(model)}-recalibrated")
    from normswap.analysis import summary
    from normswap.images.datasets import make_loader
    from normswap.models import zoo
    from normswap.storage import checkpoint
    from normswap.surgery.recalibration import recalibrate

    checkpoint.claim(place, force=force)
    net = source.open()
    loader = make_loader(
        zoo.data_config(net), data, batch_size=batch_size, workers=workers, samples=samples, seed=seed, split=split
    )
    with progress.bar("estimating statistics") as advance:
        done = recalibrate(net, loader, seed=seed, progress=advance, data=data, samples=samples, batch_size=batch_size)
    checkpoint.save(done, place, force=force)
    body = {
        "source": model,
        "data": data,
        "output": str(place),
        "notes": list(done.notes),
        "report": summary.of_report(done.report),
    }
    commands.show(body, json, _say)
    return 0


def _say(body: Mapping[str, Any]) -> None:
    out = render._out()
    out.print(render._facts([("recalibrated", body["source"]), ("on", body["data"]), ("read", body["notes"][0])]))
    render.report(out, body["report"])
    render._line(out, f"written to {body['output']}")
