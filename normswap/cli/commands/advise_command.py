"""`normswap advise`: which target to choose, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from normswap.cli import progress
from normswap.cli.grouped_options import spread
from normswap.cli.options import Json, Model, Opening
from normswap.cli.printing import show
from normswap.cli.tables import facts, line, listing, table
from normswap.plan import Body

ORDER = 70


def register(app: typer.Typer) -> None:
    app.command("advise")(spread(run))


def run(
    model: Model,
    *,
    batch_size: Annotated[int, typer.Option(metavar="N", help="Images that a device or a client sees at a time.")] = 64,
    private: Annotated[bool, typer.Option("--private", help="For differentially private training.")] = False,
    deploy: Annotated[bool, typer.Option("--deploy", help="For inference.")] = False,
    opening: Opening,
    json: Json = False,
) -> int:
    """Say which target to choose, why, and what it costs.

    The keys of --json: source, batch_size, private, deploy, kind (of network), choose and others (scheme, why, command,
    kept: percent of the accuracy without training, step, step_range and memory: against BatchNorm's; null where not
    measured), refused (scheme: why) and measured (by figure: on which networks, and where that is written).
    """
    net = opening.open(model)
    from normswap.analysis.advice import advise, body_of

    with progress.working("looking"):
        found, refused = advise(net, opening.said(model), batch_size, private=private, deploy=deploy)
    body = body_of(found, refused, source=model, batch_size=batch_size, private=private, deploy=deploy)
    show(body, json, _say)
    return 0


def _say(body: Body) -> None:
    chosen, where = body["choose"], body["measured"]
    facts(("network", body["kind"]), ("choose", chosen["scheme"]), ("because", chosen["why"]))
    line(f"run: {chosen['command']}")
    rows = [
        (row["scheme"], _kept(row["kept"]), _step(row["step"], row["step_range"]), row["memory"], row["why"])
        for row in (chosen, *body["others"])
    ]
    titles = {"kept": "accuracy kept", "step": "step time", "memory": "memory"}
    table("Measured, training against BatchNorm", ("target", *titles.values(), "why"), rows)
    listing("measured", (f"{titles[what]} on {one['on']}: {one['where']}" for what, one in where.items()))
    listing("not possible", (f"{scheme}: {why}" for scheme, why in body["refused"].items()))
    for row in body["others"]:
        if row["command"]:
            line(f"or: {row['command']}")


def _kept(span: Sequence[float] | None) -> str:
    if span is None:
        return ""
    return f"{span[0]:g} %" if span[0] == span[1] else f"{span[0]:g} to {span[1]:g} %"


def _step(middle: float | None, ends: Sequence[float] | None) -> str:
    if middle is None or ends is None:
        return ""
    return f"{middle:g}" if ends[0] == ends[1] else f"{middle:g} ({ends[0]:g} .. {ends[1]:g})"
