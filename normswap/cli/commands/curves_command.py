"""`normswap curves`: what came of training runs, side by side."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from normswap.cli.grouped_options import spread
from normswap.cli.options import Drawn, Json
from normswap.cli.printing import show
from normswap.cli.tables import table, written
from normswap.plan import Body

ORDER = 120
_COLUMNS = ("run", "epochs", "loss", "top-1 before", "top-1 at the end", "best top-1", "in epoch")


def register(app: typer.Typer) -> None:
    app.command("curves")(spread(run))


def run(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", show_default=False, help="Folders that `finetune` wrote.")
    ],
    *,
    drawn: Drawn,
    title: Annotated[str, typer.Option(metavar="TEXT", show_default=False, help="Over the picture.")] = "",
    json: Json = False,
) -> int:
    """Compare training runs: loss and top-1 by epoch.

    The keys of --json: runs, each with name, rows (one per epoch, as in metrics.csv) and best (epoch, top1), and files.
    """
    drawn.claim()
    from normswap.training import curves

    found = curves.read(runs)
    files = drawn.write(partial(curves.plot, found, title=title), partial(curves.write_csv, found))
    show({"runs": curves.to_json(found), "files": files}, json, _say)
    return 0


def _say(body: Body) -> None:
    rows = []
    for run in body["runs"]:
        first, last = (run["rows"][0], run["rows"][-1]) if run["rows"] else ({}, {})
        before, best = first.get("top1") if first.get("epoch") == 0 else None, run["best"] or {}
        accuracies = (_percent(value) for value in (before, last.get("top1"), best.get("top1")))
        loss = last.get("train_loss")
        shown = None if loss is None else f"{loss:.4f}"
        rows.append((run["name"], last.get("epoch"), shown, *accuracies, best.get("epoch")))
    table("Runs", _COLUMNS, rows, right=_COLUMNS[1:])
    written(body["files"])


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"
