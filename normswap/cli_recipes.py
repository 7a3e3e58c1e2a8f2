"""`normswap recipes`, `curves` and `sweep`: what to train by, and what came of it. `cli` imports this file for them."""

from __future__ import annotations

import json as as_json
from pathlib import Path
from typing import Annotated, Any

import typer

from normswap import render, writing
from normswap.cli import app
from normswap.cli_options import Json

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
    writing.claim(file, force=force)
    writing.text(file, text)
    if json:
        print(as_json.dumps({"name": name, "file": str(file)}))
    else:
        render._line(render._out(), f"written to {file}")
    return 0


def _load() -> Any:
    from normswap.recover import load  # pydantic takes a moment, and --help needs none

    return load


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
        from normswap.draw import check_format

        check_format(output)
    for file in (output, table):
        if file is not None:
            writing.claim(file, force=force)
    from normswap.recover import curves

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
