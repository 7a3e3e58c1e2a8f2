"""`normswap advise`: which target to choose, and why."""

import shlex
from dataclasses import asdict
from typing import Annotated

import typer

from normswap.cli import progress
from normswap.cli.options import Json, Model, Opening
from normswap.cli.tables import facts, listing, show, table
from normswap.plan import Body

KEYS = "source, batch_size, private, deploy, choose (scheme, why, command, exact), others, refused (scheme: why)"
EXAMPLES = ("advise demo --batch-size 2", "advise resnet50 --private")


def run(
    model: Model,
    *,
    batch_size: Annotated[int, typer.Option(metavar="N", help="Images that a device or a client sees at a time.")] = 64,
    private: Annotated[bool, typer.Option("--private", help="For differentially private training.")] = False,
    deploy: Annotated[bool, typer.Option("--deploy", help="For inference.")] = False,
    opening: Opening,
    json: Json = False,
) -> int:
    """Say which target to choose, and why."""
    net = opening.open(model)
    from normswap.analysis.advice import advise
    from normswap.surgery.network import Network

    with progress.working("looking"):
        name = shlex.join(opening.words(model))
        possible, refused = advise(Network(net), name, batch_size, private=private, deploy=deploy)
    first, *others = map(asdict, possible)
    asked = {"source": model, "batch_size": batch_size, "private": private, "deploy": deploy}
    show({**asked, "choose": first, "others": others, "refused": refused}, json, _print)
    return 0


def _print(body: Body) -> None:
    targets = [body["choose"], *body["others"]]
    facts(("choose", targets[0]["scheme"]), ("because", targets[0]["why"]))
    # What is kept as it is needs no command.
    label = "run" if targets[0]["command"] else "or"
    listing(label, (target["command"] for target in targets if target["command"]))
    rows = [(target["scheme"], "kept" if target["exact"] else "approximate", target["why"]) for target in targets]
    table("Targets that this network admits", ("target", "function", "why"), rows)
    if not all(target["exact"] for target in targets):
        print("how much an approximate target keeps differs from network to network: --calibrate measures what is kept")
    listing("not possible", (f"{scheme}: {why}" for scheme, why in body["refused"].items()))
