"""`normswap schemes`: what one can convert to."""

from collections.abc import Sequence
from typing import Annotated

from typer import Argument

from normswap import schemes
from normswap.cli.options import Json
from normswap.cli.tables import facts, show
from normswap.errors import flag
from normswap.plan import Body

KEYS = (
    "name, summary, paper, options (defaults), exact_only_with (options that must keep their"
    " default), exact"
)
EXAMPLES = ("schemes", "schemes groupnorm dyt")


def run(
    names: Annotated[list[str] | None, Argument(metavar="NAME", help="Only these.")] = None,
    *,
    json: Json = False,
) -> int:
    """List the schemes, their papers and options.

    --json prints a list, one object per scheme.
    """
    target = names[0] if names and len(names) == 1 else "SCHEME"
    cards = [_card(name) for name in names or [*schemes.names(), "unfold"]]
    show(cards, json, _print, "convert", "MODEL", "--to", target)
    return 0


def _card(name: str) -> Body:
    if name == "unfold":
        nothing: Body = {"paper": "", "options": {}, "exact_only_with": []}
        return {"name": name, "summary": schemes.UNFOLD, **nothing, "exact": True}
    scheme = schemes.get(name)
    options = scheme.defaults
    exact = scheme.is_exact(scheme.defaults)
    only = [option for option in options if not scheme.is_exact({**options, option: "another"})]
    described: Body = {
        "name": name,
        "summary": scheme.summary,
        "paper": scheme.paper,
        "options": options,
    }
    return {**described, "exact_only_with": only, "exact": exact}


def _print(bodies: Sequence[Body]) -> None:
    for body in bodies:
        only = body["exact_only_with"]
        options = ", ".join(
            f"{flag(name)} (default {value})" for name, value in body["options"].items()
        )
        needed = ", ".join(f"{flag(name)} {body['options'][name]}" for name in only)
        exact = "always" if body["exact"] else "no"
        if only and body["exact"]:
            exact = f"with {needed}"
        names = ("scheme", body["name"]), ("", body["summary"]), ("paper", body["paper"])
        facts(*names, ("options", options), ("exact", exact))
