"""`normswap recipes`, `curves` and `sweep`: what to train by, and what came of it. `cli` imports this file for them."""

from __future__ import annotations

import json as as_json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from normswap.cli import progress, render
from normswap.cli.app import app
from normswap.cli.options import Json, Weights
from normswap.errors import OptionError
from normswap.storage import atomic_write

Body = dict[str, Any]
Force = Annotated[bool, typer.Option("--force", help="Replace a file that exists.")]
Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="As `normswap recipes` lists it.")]

recipes = typer.Typer(name="recipes", invoke_without_command=True, rich_markup_mode=None)
app.add_typer(recipes)


@recipes.callback()
def _recipes(context: typer.Context, json: Json = False) -> int | None:
    """List the recipes that `normswap finetune` knows; show or copy one.

    The keys of --json: one object per recipe with name, summary, source, model and convert (null where the recipe
    leaves them open).
    """
    if context.invoked_subcommand is not None:
        return None
    rows = [_row(name) for name in _load().names()]
    if json:
        print(as_json.dumps(rows, indent=2))
        return 0
    out = render._out()
    columns = ("name", "summary", "source")
    out.print(render._table("Recipes", columns, [[row[column] for column in columns] for row in rows]))
    render._line(out, "normswap recipes show NAME prints one; normswap recipes copy NAME FILE makes it yours")
    return 0


@recipes.command("show")
def _show(name: Name, json: Json = False) -> int:
    """Print a recipe as it is written.

    The keys of --json: name, text (the file) and recipe (every key with its value, defaults too).
    """
    load = _load()
    text = load.text(name)
    if json:
        print(as_json.dumps({"name": name, "text": text, "recipe": load.read(name).model_dump(mode="json")}, indent=2))
    else:
        print(text, end="")
    return 0


@recipes.command("copy")
def _copy(
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False, help="A .yaml file to write.")],
    force: Force = False,
    json: Json = False,
) -> int:
    """Write a recipe to a file of your own: `normswap finetune --recipe FILE` takes it.

    The keys of --json: name and file.
    """
    text = _load().text(name)
    atomic_write.claim(file, force=force)
    atomic_write.text(file, text)
    if json:
        print(as_json.dumps({"name": name, "file": str(file)}))
    else:
        render._line(render._out(), f"written to {file}")
    return 0


def _load() -> Any:
    from normswap.training import recipe_files  # pydantic takes a moment, and --help needs none

    return recipe_files


def _row(name: str) -> Body:
    recipe = _load().read(name)
    return {
        "name": name,
        "summary": recipe.summary,
        "source": recipe.source,
        "model": recipe.model and recipe.model.name,
        "convert": recipe.convert and recipe.convert.to,
    }


@app.command("curves")
def _curves(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", show_default=False, help="Folders that `finetune` wrote.")
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", show_default=False, help="Picture: .png, .svg ...")
    ] = None,
    table: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", show_default=False, help="Table, a row per run and epoch.")
    ] = None,
    title: Annotated[str, typer.Option(metavar="TEXT", show_default=False, help="Over the picture.")] = "",
    force: Force = False,
    json: Json = False,
) -> int:
    """Compare the learning curves of several runs: training loss and top-1 by epoch.

    The keys of --json: runs, each with name, rows (one per epoch, as in metrics.csv) and best (epoch, top1), and files.
    """
    if output is not None:
        from normswap.analysis.plots import check_format

        check_format(output)
    for file in (output, table):
        if file is not None:
            atomic_write.claim(file, force=force)
    from normswap.training import curves

    found = curves.read(runs)
    files = [curves.plot(found, output, title=title)] if output else []
    files += [curves.write_csv(found, table)] if table else []
    body: Body = {"runs": curves.to_json(found), "files": [str(file) for file in files]}
    if json:
        print(as_json.dumps(body, indent=2, allow_nan=False))
    else:
        _curves_table(body)
    return 0


def _curves_table(body: Body) -> None:
    out = render._out()
    columns = ("run", "epochs", "loss", "top-1 before", "top-1 at the end", "best top-1", "in epoch")
    rows = []
    for run in body["runs"]:
        first, last = (run["rows"][0], run["rows"][-1]) if run["rows"] else ({}, {})
        before, best = first.get("top1") if first.get("epoch") == 0 else None, run["best"] or {}
        accuracies = (_percent(value) for value in (before, last.get("top1"), best.get("top1")))
        rows.append((run["name"], last.get("epoch"), last.get("train_loss"), *accuracies, best.get("epoch")))
    out.print(render._table("Runs", columns, rows, right=",".join(columns[1:])))
    for file in body["files"]:
        render._line(out, f"written to {file}")


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


_LR = "Numbers and powers: 2^-4..2^1 (every power), or 0.05,0.1."
_BEST = "Of each lr's runs the best N count [default: all, or all but two of more than four]."
_STORAGE = "Optuna storage that several machines share [default: a journal file in the output]."


@app.command("sweep")
def _sweep(
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
        bool, typer.Option("--retake", help="Begin again what another machine has begun and not ended.")
    ] = False,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda|mps", help="Where to train.")] = "auto",
    weights: Weights = "pretrained",
    json: Json = False,
) -> int:
    """Try learning rates, each with several seeds; say which is best.

    Start the same command as often as you like, here or on machines that share the output (or the storage): each takes
    the next run that no one has begun. Killed, it continues where it was. A run that diverges is a row of the table.
    Writes runs.csv and sweep.png beside the runs.

    The keys of --json: recipe, output, seeds, counted (how many runs of each lr), lines (one per lr: runs, mean, std,
    counted, lost, full, best), trials (one per run: lr, seed, state, top1, note, folder, seconds), notes, done, files.
    """
    from normswap.training import number_grid, recipe_files, sweep_table

    if not lr:
        raise OptionError("no --lr", "which learning rates?", _LR)
    model, overrides = recipe_files.split(words or [])
    plan, lrs, kept = recipe_files.read(recipe, overrides), number_grid.parse(lr), sweep_table.keep(seeds, best)
    if any(word.startswith(("optim.lr=", "train.seed=")) for word in overrides):
        raise OptionError("optim.lr and train.seed are what a sweep varies", remedy="Use --lr and --seeds")
    place = output or Path(f"sweep-{Path(recipe).stem}")
    from normswap.training.sweep import Grid, Sweep

    name = model or (plan.model.name if plan.model else None)
    if name is None:
        raise OptionError("nothing to train", "neither a MODEL is given nor does the recipe name one")
    chosen = Grid(lrs, range(seeds))
    found = Sweep(plan, {"model": name, "weights": weights}, chosen, place, storage)
    with progress.training() as (show, say):
        done = found.work(_trainer(model, weights, device, show), retake=retake, say=say)
    trials = found.trials()
    lines = sweep_table.lines(trials, seeds, kept)
    files = [sweep_table.write_csv(trials, place / "runs.csv")]
    files += [sweep_table.plot(trials, lines, place / "sweep.png", title=Path(recipe).stem)] if trials else []
    body: Body = {
        "recipe": recipe, "output": str(place), "seeds": seeds, "counted": kept,
        "lines": [asdict(line) for line in lines], "trials": [asdict(trial) for trial in trials],
        "notes": sweep_table.notes(trials, lines, done), "done": done, "files": [str(file) for file in files],
    }  # fmt: skip
    print(as_json.dumps(body, indent=2, allow_nan=False)) if json else _sweep_table(body)
    return 0


def _trainer(model: str | None, weights: str, device: str, show: Any) -> Any:
    """How one run of a sweep is trained: top-1 after the last epoch, or None if it was asked to stop."""

    def train(recipe: Any, folder: Path) -> float | None:
        from normswap.cli import commands
        from normswap.training.engine import finetune

        source = commands.Source(model, weights).open() if model else None
        result = finetune(source, recipe, folder, resume="auto", device=device, track="none", progress=show)
        return result.rows[-1]["top1"] if result.finished else None

    return train


def _sweep_table(body: Body) -> None:
    out = render._out()
    rows = []
    for line in body["lines"]:
        spread = "" if line["std"] is None else f" ± {line['std']:.2f}"
        mean = "" if line["mean"] is None else f"{line['mean']:.2f}{spread}"
        rows.append((f"{line['lr']:g}", mean, line["counted"], line["runs"], line["lost"] or None,
                     "best" if line["best"] else None))  # fmt: skip
    columns = ("lr", "top-1", "counted", "runs", "lost", "")
    said = f"Top-1 after the last epoch: mean and std of the best {body['counted']} of {body['seeds']} runs"
    render._line(out, said)
    out.print(render._table("", columns, rows, right="lr,top-1,counted,runs,lost"))
    for note in body["notes"]:
        render._line(out, note)
    for file in body["files"]:
        render._line(out, f"written to {file}")
