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
