"""`normswap recipes`: what to train by."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from typer import Argument, Option

from normswap.cli.options import Json
from normswap.cli.tables import one_line, show, table
from normswap.cli.terminal import say_lines
from normswap.plan import Body

KEYS = (
    "name, summary, source, model (null where the recipe leaves it open), convert (the same); of"
    " one: name, text (the file), recipe (every key with its value, defaults too); with --keys:"
    " key, takes, default, help"
)
EXAMPLES = ("recipes", "recipes cifar10_recover_skipinit", "recipes --keys")
_KEYS = ("key", "takes", "default", "help")
_COLUMNS = ("name", "summary", "source")


def run(
    name: Annotated[
        str | None,
        Argument(metavar="NAME", show_default=False, help="Print this one as it is written."),
    ] = None,
    *,
    keys: Annotated[bool, Option("--keys", help="List every key that a recipe may have.")] = False,
    json: Json = False,
) -> int:
    """List the recipes of `normswap finetune`; show one, or all keys.

    `normswap recipes NAME > FILE` makes one yours: `normswap finetune --recipe FILE`.
    """
    from normswap.training import recipe_files

    if keys:
        show([*recipe_files.every_key()], json, partial(_print, "Keys of a recipe", _KEYS))
    elif name is not None:
        recipe = recipe_files.load_recipe(name)
        body = {
            "name": name,
            "text": recipe_files.text(name),
            "recipe": recipe.model_dump(mode="json"),
        }
        show(body, json, _print_text)
    else:
        rows = [_row(each) for each in recipe_files.names()]
        show(rows, json, partial(_print, "Recipes", _COLUMNS))
    return 0


def _row(name: str) -> Body:
    """Return the name, summary, source, network and conversion of a recipe of the package."""
    from normswap.training import recipe_files

    recipe = recipe_files.load_recipe(name)
    return {
        "name": name,
        "summary": recipe.summary,
        "source": recipe.source,
        "model": recipe.model and recipe.model.name,
        "convert": recipe.convert and recipe.convert.to,
    }


def _print_text(body: Body) -> None:
    say_lines(body["text"])


def _print(title: str, columns: Sequence[str], rows: Sequence[Body]) -> None:
    cells = [[one_line(row[column]) for column in columns] for row in rows]
    table(title, columns, cells)
