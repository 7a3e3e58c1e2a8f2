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
    """Return the record that --json prints of a scheme, or of `unfold`."""
    if name == "unfold":
        return {
            "name": name,
            "summary": schemes.UNFOLD,
            "paper": "",
            "options": {},
            "exact_only_with": [],
            "exact": True,
        }

    scheme = schemes.get(name)
    options = scheme.defaults
    # The scheme is no longer exact if one of these options has another value than its default.
    must_keep_default = [
        option for option in options if not scheme.is_exact({**options, option: "another"})
    ]
    return {
        "name": name,
        "summary": scheme.summary,
        "paper": scheme.paper,
        "options": options,
        "exact_only_with": must_keep_default,
        "exact": scheme.is_exact(scheme.defaults),
    }


def _print(bodies: Sequence[Body]) -> None:
    """Print each scheme: what it does, its options, and whether it is exact."""
    for body in bodies:
        defaults = body["options"]
        options = [f"{flag(name)} (default {value})" for name, value in defaults.items()]
        # The options that must keep their default for the conversion to be exact.
        needed = [f"{flag(name)} {defaults[name]}" for name in body["exact_only_with"]]

        exact = "always" if body["exact"] else "no"
        if needed and body["exact"]:
            exact = f"with {', '.join(needed)}"
        facts(
            ("scheme", body["name"]),
            ("", body["summary"]),
            ("paper", body["paper"]),
            ("options", ", ".join(options)),
            ("exact", exact),
        )
