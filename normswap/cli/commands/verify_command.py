"""`normswap verify`: a converted network against its source."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normswap.cli import progress
from normswap.cli.grouped_options import spread
from normswap.cli.options import Images, Json, Trust, open_model
from normswap.cli.printing import show
from normswap.cli.proof_table import proof
from normswap.cli.tables import facts, line
from normswap.plan import Body

ORDER = 30


def register(app: typer.Typer) -> None:
    app.command("verify")(spread(run))


def run(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Written by `normswap convert`.")],
    *,
    against: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Compare with this network [default: the recorded source].")
    ] = None,
    images: Images,
    trust_factory: Trust = False,
    json: Json = False,
) -> int:
    """Compare a converted network with its source.

    The exit code is 1 if they differ.

    The keys of --json: directory, against, passed, source_unchanged (null if not known), report, data (null, or top1
    of source and result in percent, agreement and count).
    """
    with progress.working(f"loading {directory}"):
        from normswap.analysis import summary
        from normswap.storage import checkpoint
        from normswap.surgery import reverification
        from normswap.surgery.network import Network
        from normswap.training.run_folder import demand_no_run

        demand_no_run(directory)
        result = checkpoint.load(directory, trust_factory=trust_factory)
    name = against or reverification.recorded(result, directory)
    source = open_model(name, **({} if against else reverification.how(result)))
    with progress.working("comparing"):
        report = reverification.again(Network(source), result)
    data = None
    if images.data is not None:
        loader = images.loader(result)
        with progress.bar("comparing on images") as advance:
            data = reverification.on_images(source, result, loader, advance)
    unchanged = None if against else reverification.unchanged(source, result)
    body = {"directory": directory, "against": name, "passed": report.passed, "source_unchanged": unchanged,
            "report": summary.of_report(report), "data": data}  # fmt: skip
    show(body, json, _say)
    return 0 if report.passed else 1


def _say(body: Body) -> None:
    facts(("network", body["directory"]), ("against", body["against"]))
    if body["source_unchanged"] is False:
        line("warning: the source is not what it was: its tensors have another hash than when this was made")
    proof(body["report"])
    if body["data"]:
        data = body["data"]
        facts(
            ("images", data["count"]),
            ("top-1", f"{data['source']:.2f} % -> {data['result']:.2f} %"),
            ("agreement", f"{100 * data['agreement']:.2f} %"),
        )
    line("passed" if body["passed"] else "FAILED: the networks differ")
