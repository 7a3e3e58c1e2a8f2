"""`normswap schemes`: what one can convert to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from normswap.cli import progress
from normswap.cli.options import Json
from normswap.cli.printing import show
from normswap.cli.tables import entry
from normswap.plan import Body

ORDER = 50


def register(app: typer.Typer) -> None:
    app.command("schemes")(run)


def run(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Only these.")] = None,
    *,
    json: Json = False,
) -> int:
    """List the schemes, their papers and options.

    The keys of --json: one object per scheme with name, summary, paper, options (defaults) and exact_only_with (the
    options that must keep their default for the conversion to be exact).
    """
    with progress.working("looking"):
        from normswap.analysis import summary

        bodies = list(summary.of_schemes(names or ()))
    show(bodies, json, _say)
    return 0


def _say(bodies: Sequence[Body]) -> None:
    for body in bodies:
        only = body["exact_only_with"]
        options = ", ".join(f"{_flag(name)} (default {value})" for name, value in body["options"].items())
        needed = ", ".join(f"{_flag(name)} {body['options'][name]}" for name in only)
        exact = "no" if not body["exact"] else f"with {needed}" if only else "always"
        entry(body["name"], (body["summary"], body["paper"], options and f"options: {options}", f"exact: {exact}"))


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")
