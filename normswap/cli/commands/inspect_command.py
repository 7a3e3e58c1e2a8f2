"""`normswap inspect`: the residual blocks and norms of a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import typer

from normswap.cli import progress
from normswap.cli.grouped_options import spread
from normswap.cli.network_table import network
from normswap.cli.options import Json, Model, Opening
from normswap.cli.printing import show
from normswap.cli.tables import span, table
from normswap.plan import Body

ORDER = 10
_BLOCKS = ("blocks", "x", "skip", "order", "norms", "last", "gate", "drop path", "alpha")
_SITES = ("path", "class", "channels", "role", "mean", "std", "folding")


def register(app: typer.Typer) -> None:
    app.command("inspect")(spread(run))


def run(model: Model, *, opening: Opening, json: Json = False) -> int:
    """Show the residual blocks and norms of a network.

    For every norm, what folding would do with it, or why it cannot be folded.

    The keys of --json: source, class, architecture, parameters, input_size, plan, classifier, dropout, norms (counts
    by class), roles (counts), blocks (path, stage, skip, order, tail, norms, last, gate, drop_path, alpha), sites (one
    per norm: path, class, channels, role, block, mean, std: the smallest and largest of any channel, folding, refused)
    and refusals (path, reason).
    """
    net = opening.open(model)
    from normswap.analysis import summary
    from normswap.surgery.network import Network

    with progress.working("inspecting"):
        body = summary.of_network(Network(net), model)
    show(body, json, _say)
    return 0


def _say(body: Body) -> None:
    network(body)
    if body["blocks"]:
        table("Residual blocks", _BLOCKS, _block_rows(body["blocks"]), right=("x", "norms"))
    if body["sites"]:
        kinds = {site["class"] for site in body["sites"]}
        gone = any(site["role"] is None for site in body["sites"])
        title = "Sites of norms" if gone else "Norms" if len(kinds) > 1 else f"Norms, all {min(kinds)}"
        table(title, _SITES, _site_rows(body["sites"], len(kinds) > 1), right=("channels",))
    if body["refusals"]:
        rows = [(refusal["path"], refusal["reason"]) for refusal in body["refusals"]]
        table("Not looked into", ("path", "reason"), rows)


def _block_rows(blocks: Sequence[Body]) -> Iterator[Sequence[object]]:
    """Consecutive blocks of a stage that look alike make one row."""

    def look(block: Body) -> tuple[object, ...]:
        within = [_inside(block["path"], block[name]) for name in ("last", "gate", "drop_path")]
        return block["stage"], block["skip"], block["order"], len(block["norms"]), *within

    for (_, skip, order, norms, *inside), group in groupby(blocks, look):
        alike: list[Body] = list(group)
        first, last = alike[0]["path"], alike[-1]["path"]
        names = first if len(alike) == 1 else f"{first} .. {last}"
        alphas = [block["alpha"] for block in alike if block["alpha"] is not None]
        yield names, len(alike), skip, order, norms, *inside, span((min(alphas), max(alphas))) if alphas else None


def _inside(block: str, path: str | None) -> str | None:
    """A path as seen from its block."""
    return None if path is None else path.removeprefix(f"{block.partition('+')[0]}.")


def _site_rows(sites: Sequence[Body], with_class: bool) -> Iterator[Sequence[object]]:
    for site in sites:
        fate = f"refused: {site['refused']}" if site["refused"] else site["folding"]
        parent = site["path"].rpartition(".")[0]
        if fate and parent:  # neighbours by the name they have there
            fate = fate.replace(f"{parent}.", "")
        kind = site["class"] if with_class else None
        yield site["path"], kind, site["channels"], site["role"], span(site["mean"]), span(site["std"]), fate
