"""`normswap recipes`: what to train by."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from normswap.cli.options import Json
from normswap.cli.tables import show, table
from normswap.plan import Body
from normswap.storage import atomic_write

KEYS = (
    "name, summary, source, model (null where the recipe leaves it open), convert (the same); of show: name, text (the "
    "file), recipe (every key with its value, defaults too); of copy: name, file"
)
EXAMPLES = ("recipes", "recipes show cifar10_recover_skipinit", "recipes copy demo_train mine.yaml")
_COLUMNS = ("name", "summary", "source")
Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="As `normswap recipes` lists it.")]


GROUP = typer.Typer(name="recipes", invoke_without_command=True)


@GROUP.callback()
def run(context: typer.Context, json: Json = False) -> int | None:
    """List the recipes of `normswap finetune`; show or copy one.

    --json prints a list, one object per recipe.
    """
    if context.invoked_subcommand is not None:
        return None
    from normswap.training import recipe_files  # pydantic takes a moment, and --help needs none

    show([_row(name) for name in recipe_files.names()], json, _print)
    return 0


def _row(name: str) -> Body:
    from normswap.training import recipe_files

    recipe = recipe_files.load_recipe(name)
    return {
        "name": name,
        "summary": recipe.summary,
        "source": recipe.source,
        "model": recipe.model and recipe.model.name,
        "convert": recipe.convert and recipe.convert.to,
    }


def _print(rows: Sequence[Body]) -> None:
    table("Recipes", _COLUMNS, [[row[column] for column in _COLUMNS] for row in rows])
    print("normswap recipes show NAME prints one; normswap recipes copy NAME FILE makes it yours")


@GROUP.command("show")
def show_one(name: Name, json: Json = False) -> int:
    """Print a recipe as it is written."""
    from normswap.training import recipe_files

    text = recipe_files.text(name)
    body = {"name": name, "text": text, "recipe": recipe_files.load_recipe(name).model_dump(mode="json")}
    show(body, json, lambda found: print(found["text"], end=""))
    return 0


@GROUP.command("copy")
def copy(
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False, help="A .yaml file to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    json: Json = False,
) -> int:
    """Write a recipe to a file of your own: `normswap finetune --recipe FILE` takes it."""
    from normswap.training import recipe_files

    text = recipe_files.text(name)
    atomic_write.check_writable(file, force=force)
    atomic_write.text(file, text)
    show({"name": name, "file": file}, json, lambda body: print(f"written to {body['file']}"))
    return 0
