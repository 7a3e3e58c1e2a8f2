"""`normswap advise`: which target to choose, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from normswap.cli import progress, render
from normswap.cli.app import app
from normswap.cli.options import ArchArgs, ArchName, InChans, Json, Model, NumClasses, Weights


@app.command("advise")
def _advise(
    model: Model,
    batch_size: Annotated[int, typer.Option(metavar="N", help="Images that a device or a client sees at a time.")] = 64,
    private: Annotated[bool, typer.Option("--private", help="For differentially private training.")] = False,
    deploy: Annotated[bool, typer.Option("--deploy", help="For inference.")] = False,
    weights: Weights = "pretrained",
    arch: ArchName = None,
    arch_arg: ArchArgs = None,
    num_classes: NumClasses = None,
    in_chans: InChans = None,
    json: Json = False,
) -> int:
    """Say which target to choose, why, and what it was measured to cost.

    The keys of --json: source, batch_size, private, deploy, choose and others (scheme, why, command, kept: percent of
    the accuracy without training, step and memory: against BatchNorm's), refused (scheme: why) and measured (where).
    """
    from normswap.cli import commands

    source = commands.Source(model, weights, arch, arch_arg or [], num_classes, in_chans)
    net = source.open()
    from normswap.analysis.advice import advise, body_of

    with progress.working("looking"):
        found, refused = advise(net, model, batch_size, private=private, deploy=deploy)
    body = body_of(found, refused, source=model, batch_size=batch_size, private=private, deploy=deploy)
    commands.show(body, json, _say)
    return 0


def _say(body: Mapping[str, Any]) -> None:
    out = render._out()
    chosen = body["choose"]
    out.print(render._facts([("choose", chosen["scheme"]), ("because", chosen["why"]), ("run", chosen["command"])]))
    chosen_and_others = [body["choose"], *body["others"]]
    rows = [(row["scheme"], _kept(row["kept"]), row["step"], row["memory"], row["why"]) for row in chosen_and_others]
    columns = ("target", "accuracy kept", "step time", "memory", "why")
    out.print(render._table("Measured", columns, rows, right="step time,memory"))
    render._say(out, "not possible", (f"{scheme}: {why}" for scheme, why in body["refused"].items()))
    render._say(out, "measured", (f"{what}: {where}" for what, where in body["measured"].items()))
    for row in body["others"]:
        if row["command"]:
            render._line(out, f"or: {row['command']}")


def _kept(span: list[float] | None) -> str:
    if span is None:
        return ""
    return f"{span[0]:g} %" if span[0] == span[1] else f"{span[0]:g} to {span[1]:g} %"
