"""`normswap curves`: what came of training runs, or of sweeps, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from normswap.cli.options import Drawn, Json
from normswap.cli.printing import show
from normswap.cli.tables import next_step, table, written
from normswap.errors import OptionError
from normswap.plan import Body
from normswap.storage import atomic_write

KEYS = (
    "runs (each with name, rows: one per epoch, as in metrics.csv, and best: epoch, top1), files; of sweeps: sweeps "
    "(each with name, lines: one per lr, and trials: one per run, as of `normswap sweep`), files"
)
EXAMPLES = (
    "curves runs/bn runs/skipinit",
    "curves sweep-a sweep-b -o rates.png --latex rates.tex",
)
_COLUMNS = ("run", "epochs", "loss", "top-1 before", "top-1 at the end", "best top-1", "in epoch")
_BEST = "Of each lr's runs in a sweep the best N count [default: all, or all but two of more than four]."


def run(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", show_default=False, help="Folders of `finetune`, or of `sweep`.")
    ],
    *,
    drawn: Drawn,
    latex: Annotated[
        Path | None, typer.Option("--latex", metavar="FILE", show_default=False, help="A table for LaTeX (booktabs).")
    ] = None,
    title: Annotated[str, typer.Option(metavar="TEXT", show_default=False, help="Over the picture.")] = "",
    best: Annotated[int | None, typer.Option(min=1, metavar="N", show_default=False, help=_BEST)] = None,
    json: Json = False,
) -> int:
    """Compare training runs: loss and top-1 by epoch. Compare sweeps: top-1 by learning rate, mean and spread."""
    drawn.check_writable()
    if latex is not None:
        atomic_write.check_writable(latex, force=drawn.force)
    from normswap.training import curves, sweep_table

    swept = [(place / sweep_table.RUNS).is_file() for place in runs]
    if any(swept) and not all(swept):
        raise OptionError("runs and sweeps are compared apart", f"{runs[swept.index(False)]} is no sweep")
    if all(swept):
        sweeps = [sweep_table.read(place, name, best) for place, name in zip(runs, curves.names(runs), strict=True)]
        files = drawn.write(partial(sweep_table.plot, sweeps, title=title), partial(sweep_table.write_csv, sweeps))
        columns, rows = sweep_table.by_rate(sweeps)
        body: Body = {"sweeps": [asdict(sweep) for sweep in sweeps]}
    else:
        measured = curves.read(runs)
        files = drawn.write(partial(curves.plot, measured, title=title), partial(curves.write_csv, measured))
        body = {"runs": [one.to_json() for one in measured]}
        columns, rows = list(_COLUMNS), [_row(one) for one in body["runs"]]
    files += [curves.write_latex(columns, rows, latex)] if latex is not None else []
    show({**body, "files": files}, json, partial(_print, runs, columns, rows))
    return 0


def _row(run: Body) -> list[str]:
    first, last = (run["rows"][0], run["rows"][-1]) if run["rows"] else ({}, {})
    before, best = first.get("top1") if first.get("epoch") == 0 else None, run["best"] or {}
    loss, epochs = last.get("train_loss"), (last.get("epoch"), best.get("epoch"))
    trained, at = ("" if epoch is None else f"{epoch:.4g}" for epoch in epochs)
    accuracies = (before, last.get("top1"), best.get("top1"))
    shown = ["" if value is None else f"{value:.2f}" for value in accuracies]
    return [run["name"], trained, "" if loss is None else f"{loss:.4f}", *shown, at]


def _print(places: Sequence[Path], columns: Sequence[str], rows: Sequence[Sequence[str]], body: Body) -> None:
    table("", columns, rows, right=columns[1:])
    written(body["files"])
    next_step("evaluate", _best_network(places, body.get("runs", ())) or "RUN/best", "--data", "IMAGES")


def _best_network(places: Sequence[Path], runs: Sequence[Body]) -> Path | None:
    """The network of the run that came out best, if it is there."""
    scored = [(run["best"]["top1"], place) for place, run in zip(places, runs, strict=False) if run["best"]]
    best = max(scored, key=lambda pair: pair[0], default=None)
    return best[1] / "best" if best and (best[1] / "best").is_dir() else None
