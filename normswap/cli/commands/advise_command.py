"""`normswap advise`: which target to choose, and what it costs."""

from __future__ import annotations

from typing import Annotated

import typer

from normswap.cli import progress
from normswap.cli.grouped_options import spread
from normswap.cli.options import Json, Model, Opening
from normswap.cli.printing import Body, show
from normswap.cli.tables import facts, line, listing, table

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
    """Say which target to choose, why, and what it was measured to cost.

    The keys of --json: source, batch_size, private, deploy, choose and others (scheme, why, command, kept: percent of
    the accuracy without training, step and memory: against BatchNorm's), refused (scheme: why) and measured (where).
    """
    net = opening.open(model)
    from normswap.analysis.advice import advise, body_of

    with progress.working("looking"):
        found, refused = advise(net, model, batch_size, private=private, deploy=deploy)
    body = body_of(found, refused, source=model, batch_size=batch_size, private=private, deploy=deploy)
    show(body, json, _say)
    return 0


def _say(body: Body) -> None:
    chosen = body["choose"]
    facts(("choose", chosen["scheme"]), ("because", chosen["why"]), ("run", chosen["command"]))
    rows = [(row["scheme"], _kept(row["kept"]), row["step"], row["memory"], row["why"])
            for row in (chosen, *body["others"])]  # fmt: skip
    columns = ("target", "accuracy kept", "step time", "memory", "why")
    table("Measured", columns, rows, right=columns[2:4])
    listing("not possible", (f"{scheme}: {why}" for scheme, why in body["refused"].items()))
    listing("measured", (f"{what}: {where}" for what, where in body["measured"].items()))
    for row in body["others"]:
        if row["command"]:
            line(f"or: {row['command']}")


def _kept(span: list[float] | None) -> str:
    if span is None:
        return ""
    return f"{span[0]:g} %" if span[0] == span[1] else f"{span[0]:g} to {span[1]:g} %"
