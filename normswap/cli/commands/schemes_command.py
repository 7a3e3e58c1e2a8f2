"""`normswap schemes`: what one can convert to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from normswap import schemes
from normswap.cli import progress
from normswap.cli.help_page import Keys, page
from normswap.cli.options import Json
from normswap.cli.printing import show
from normswap.cli.tables import entry, listing, next_step, table
from normswap.errors import OptionError, flag
from normswap.plan import Body
from normswap.schemes.parts import cards

ORDER = 50
KEYS: Keys = {
    "name": "",
    "summary": "",
    "paper": "",
    "options": "defaults",
    "exact_only_with": "the options that must keep their default for the conversion to be exact",
    "exact": "whether it is with its defaults",
}
_WITH_CHECK: Keys = {
    "network": "",
    "path": "the targets",
    "exact": "",
    "distance": "relative L2 of the logits",
    "why": "it was refused",
    "wrong": "",
}


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("schemes", cls=page(KEYS, "schemes", "schemes groupnorm dyt", with_check=_WITH_CHECK))(run)


def run(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Only these.")] = None,
    *,
    check: Annotated[
        bool, typer.Option("--check", help="Try them on small networks, and from there every other target.")
    ] = False,
    json: Json = False,
) -> int:
    """List the schemes, their papers and options.

    --json prints a list, one object per scheme; with --check one per conversion. Something wrong with --check makes the
    exit code 1.
    """
    if check:
        return _check(names or (), json=json)
    show([_card(name) for name in names or [*schemes.names(), "unfold"]], json, _print)
    return 0


def _card(name: str) -> Body:
    """Describe a scheme, its paper and its options."""
    if name == "unfold":
        first = cards.docstring("normswap.surgery.unfolding").split("\n")[0]
        return {"name": name, "summary": first, "paper": "", "options": {}, "exact_only_with": [], "exact": True}
    scheme = schemes.card(name)
    options = scheme.defaults
    only = [option for option in options if not scheme.is_exact({**options, option: "another"})]
    return {"name": name, "summary": scheme.summary, "paper": scheme.paper, "options": options,
            "exact_only_with": only, "exact": scheme.is_exact(options)}  # fmt: skip


def _check(names: Sequence[str], *, json: bool) -> int:
    if not names:
        raise OptionError(
            "--check tries the schemes that are named", remedy="For instance `normswap schemes dyt --check`"
        )
    with progress.working("converting small networks"):
        from normswap.analysis import scheme_check

        walked = [one for name in names for one in scheme_check.walk(name)]
    show([asdict(one) for one in walked], json, _say_walked)
    return int(any(one.wrong for one in walked))


def _say_walked(bodies: Sequence[Body]) -> None:
    rows: list[Sequence[object]] = []
    failed: dict[bool, dict[str, list[str]]] = {False: {}, True: {}}
    for body in bodies:
        path = " -> ".join(body["path"])
        if body["distance"] is not None:
            claim = "exact" if body["exact"] else "approximate"
            rows.append((body["network"], path, claim, f"{body['distance']:.1e}"))
        else:
            failed[body["wrong"]].setdefault(f"{path}: {body['why']}", []).append(body["network"])
    table("Conversions", ("network", "path", "claims", "relative L2"), rows, right=("relative L2",))
    for title, wrong in (("refused", False), ("wrong", True)):
        listing(title, (f"{text} ({', '.join(kinds)})" for text, kinds in failed[wrong].items()))


def _print(bodies: Sequence[Body]) -> None:
    for body in bodies:
        only = body["exact_only_with"]
        options = ", ".join(f"{flag(name)} (default {value})" for name, value in body["options"].items())
        needed = ", ".join(f"{flag(name)} {body['options'][name]}" for name in only)
        exact = "no" if not body["exact"] else f"with {needed}" if only else "always"
        entry(body["name"], (body["summary"], body["paper"], options and f"options: {options}", f"exact: {exact}"))
    next_step("convert", "MODEL", "--to", bodies[0]["name"] if len(bodies) == 1 else "SCHEME")
