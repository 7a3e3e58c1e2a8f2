"""`normswap recipes`: what to train by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from normswap.cli.options import Json
from normswap.cli.tables import show, table
from normswap.plan import Body

KEYS = (
    "name, summary, source, model (null where the recipe leaves it open), convert (the same); of show: name, text (the "
    "file), recipe (every key with its value, defaults too)"
)
EXAMPLES = (
    "recipes",
    "recipes show cifar10_recover_skipinit",
)
_COLUMNS = ("name", "summary", "source")
GROUP = typer.Typer(name="recipes", invoke_without_command=True)


@GROUP.callback()
def run(context: typer.Context, json: Json = False) -> int | None:
    """List the recipes of `normswap finetune`; show one.

    --json prints a list, one object per recipe.
    """
    if context.invoked_subcommand is not None:
        return None
    from normswap.training import recipe_files  # pydantic takes a moment, and --help needs none

    recipes = {name: recipe_files.load_recipe(name) for name in recipe_files.names()}
    rows = [
        {
            "name": name,
            "summary": recipe.summary,
            "source": recipe.source,
            "model": recipe.model and recipe.model.name,
            "convert": recipe.convert and recipe.convert.to,
        }
        for name, recipe in recipes.items()
    ]
    show(rows, json, _print)
    return 0


def _print(rows: Sequence[Body]) -> None:
    table("Recipes", _COLUMNS, [[row[column] for column in _COLUMNS] for row in rows])
    print("normswap recipes show NAME prints one; with > FILE behind it it is yours: `normswap finetune --recipe FILE`")


@GROUP.command("show")
def show_one(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="As `normswap recipes` lists it.")],
    json: Json = False,
) -> int:
    """Print a recipe as it is written."""
    from normswap.training import recipe_files

    text = recipe_files.text(name)
    body = {"name": name, "text": text, "recipe": recipe_files.load_recipe(name).model_dump(mode="json")}
    show(body, json, lambda found: print(found["text"], end=""))
    return 0
