"""`normswap report`: a page about a directory that `normswap convert` wrote. `cli` imports this file to register it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from normswap.cli import progress
from normswap.cli.app import app
from normswap.cli.options import BatchSize, Data, Json, Samples, Split, Workers


@app.command("report")
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Written by `normswap convert`.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Page to write [default: ./DIR.html].")
    ] = None,
    data: Data = None,
    batch_size: BatchSize = 64,
    workers: Workers = 2,
    samples: Samples = None,
    split: Split = "validation",
    force: Annotated[bool, typer.Option("--force", help="Replace a page that exists.")] = False,
    json: Json = False,
) -> int:
    """Write what was done and measured as one HTML page.

    It loads nothing from anywhere. With --data both networks are evaluated, and the signal is measured on those images.

    The keys of --json: output, source, sha256, arch, steps, digest, versions, report, blocks, others (norms outside of
    blocks), gammas (histograms by role), alphas, sizes, against (what the result was measured with: source, unfolded
    or nothing), notes, signal (of before and after, a point per block), signal_inputs and accuracy.
    """
    from normswap.cli import commands

    images = None if data is None else commands.Images(data, batch_size, workers, samples, split)
    return _run(directory, output, images, force=force, as_json=json)


def _run(directory: Path, output: Path | None, images: Any, *, force: bool, as_json: bool) -> int:
    import dataclasses
    import json

    with progress.stages() as say:
        say("starting")
        from normswap.analysis import summary
        from normswap.reporting import report

        file = output or Path(f"{directory.resolve().name}.html")
        report.claim(file, force=force)
        facts = report.collect(directory, None if images is None else images.loader, say)
        report.write(facts, file)
    if as_json:
        body = summary.plain({"output": str(file), **dataclasses.asdict(facts)})
        print(json.dumps(body, indent=2, allow_nan=False))
    else:
        print(f"written to {file}")
    return 0
