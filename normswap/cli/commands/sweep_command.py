"""`normswap sweep`: learning rates, each with several seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normswap.cli import progress
from normswap.cli.options import Device, Json, Opening, Weights
from normswap.cli.printing import show
from normswap.cli.tables import line, table, written
from normswap.errors import OptionError
from normswap.plan import Body

if TYPE_CHECKING:  # torch and pydantic take a second to import, and --help needs neither
    from normswap.training.progress_records import Moment
    from normswap.training.recipe import Recipe
    from normswap.training.sweep import Objective

ORDER = 130
_LR = "Numbers and powers: 2^-4..2^1 (every power), or 0.05,0.1."
_BEST = "Of each lr's runs the best N count [default: all, or all but two of more than four]."
_STORAGE = "Database that several machines share, by Optuna's URL [default: an SQLite file in the output]."


def register(app: typer.Typer) -> None:
    app.command("sweep")(run)


def run(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", show_default=False, help="As in `finetune`: NAME or FILE.")
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL] [KEY=VALUE]...", show_default=False, help="As in `finetune`."),
    ] = None,
    lr: Annotated[str, typer.Option("--lr", metavar="GRID", show_default=False, help=_LR)] = "",
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Runs of every lr, with seeds 0 .. N - 1.")] = 1,
    best: Annotated[int | None, typer.Option(min=1, metavar="N", show_default=False, help=_BEST)] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Its folder [default: ./sweep-RECIPE].")
    ] = None,
    storage: Annotated[str | None, typer.Option(metavar="URL", show_default=False, help=_STORAGE)] = None,
    retake: Annotated[
        bool, typer.Option("--retake", help="Begin again at once what has been begun and not ended.")
    ] = False,
    device: Device = "auto",
    weights: Weights = "pretrained",
    json: Json = False,
) -> int:
    """Say which learning rate is best, by several seeds of each.

    Start the same command as often as you like, here or on machines that share the output (or the storage): each takes
    the next run that no one has begun. What a killed one has begun is continued a minute later. A run that diverges is
    a row of the table. Writes runs.csv and sweep.png beside the runs.

    The keys of --json: recipe, output, seeds, counted (how many runs of each lr), lines (one per lr: runs, mean, std,
    counted, lost, full, best), trials (one per run: lr, seed, state, top1, note, folder, seconds), notes, done, files.
    """
    from normswap.training import number_grid, recipe_files, sweep_table

    if not lr:
        raise OptionError("no --lr", "which learning rates?", _LR)
    model, overrides = recipe_files.split(words or [])
    plan, lrs, kept = recipe_files.load_recipe(recipe, overrides), number_grid.parse(lr), sweep_table.keep(seeds, best)
    if any(word.startswith(("optim.lr=", "train.seed=")) for word in overrides):
        raise OptionError("optim.lr and train.seed are what a sweep varies", remedy="Use --lr and --seeds")
    place = output or Path(f"sweep-{Path(recipe).stem}")
    from normswap.training.sweep import Grid, Sweep

    name = model or (plan.model.name if plan.model else None)
    if name is None:
        raise OptionError("nothing to train", "neither a MODEL is given nor does the recipe name one")
    found = Sweep(plan, {"model": name, "weights": weights}, Grid(lrs, range(seeds)), place, storage)
    with progress.training() as (show_moment, say):
        done = found.work(trainer(model, Opening(weights), device, show_moment), retake=retake, say=say)
    trials = found.trials()
    lines = sweep_table.lines(trials, seeds, kept)
    files = [sweep_table.write_csv(trials, place / "runs.csv")]
    files += [sweep_table.plot(trials, lines, place / "sweep.png", title=Path(recipe).stem)] if trials else []
    body = {
        "recipe": recipe, "output": place, "seeds": seeds, "counted": kept,
        "lines": [asdict(one) for one in lines], "trials": [asdict(trial) for trial in trials],
        "notes": sweep_table.notes(trials, lines, done), "done": done, "files": files,
    }  # fmt: skip
    show(body, json, _say)
    return 0


def trainer(model: str | None, opening: Opening, device: str, show_moment: Callable[[Moment], None]) -> Objective:
    """How one run of a sweep is trained: top-1 after the last epoch, or None if it was asked to stop."""

    def train(recipe: Recipe, folder: Path) -> float | None:
        from normswap.training.engine import finetune

        source = opening.open(model) if model else None
        result = finetune(source, recipe, folder, resume="auto", device=device, track="none", progress=show_moment)
        return result.rows[-1]["top1"] if result.finished else None

    return train


def _say(body: Body) -> None:
    rows = []
    for one in body["lines"]:
        spread = "" if one["std"] is None else f" ± {one['std']:.2f}"
        mean = "" if one["mean"] is None else f"{one['mean']:.2f}{spread}"
        rows.append((f"{one['lr']:g}", mean, one["counted"], one["runs"], one["lost"] or None,
                     "best" if one["best"] else None))  # fmt: skip
    line(f"Top-1 after the last epoch: mean and std of the best {body['counted']} of {body['seeds']} runs")
    columns = ("lr", "top-1", "counted", "runs", "lost", "")
    table("", columns, rows, right=columns[:5])
    for note in body["notes"]:
        line(note)
    written(body["files"])
