"""`normswap demo`: the whole way, offline, on a network that ships with the package."""

from normswap.cli.options import Json
from normswap.cli.progress import working
from normswap.cli.tables import print_network, show, small, table
from normswap.cli.terminal import say
from normswap.plan import Body

KEYS = "passed, seconds, images (how many), anatomy (as `inspect` gives it), rows (one per network)"
EXAMPLES = ("demo", "demo --json")
_COLUMNS = ("network", "norms", "parameters", "top-1", "agreement", "relative L2")


def run(json: Json = False) -> int:
    """Convert a shipped network; measure it before and after.

    Offline, in seconds. The exit code is 1 if a converted network answers unlike its source.
    """
    with working("starting") as progress:
        from normswap.reporting import demo

        result = demo.run(progress)
    show(result, json, _print, "advise", "MODEL")
    return int(not result["passed"])


def _print(body: Body) -> None:
    """Print the shipped network, and how each conversion changed its figures."""
    print_network(body["anatomy"])

    rows = []
    for row in body["rows"]:
        cells = (
            row["network"],
            row["norms"],
            f"{row['parameters']:,}",
            f"{row['top1']:.2f} %",
            f"{100 * row['agreement']:.2f} %",
            small(row["relative_l2"]),
        )
        rows.append(cells)
    title = f"Converted, saved, loaded again, and measured on {body['images']} images"
    table(title, _COLUMNS, rows, right=_COLUMNS[1:])

    verdict = "every figure agrees"
    if not body["passed"]:
        verdict = "WRONG: the converted networks disagree with the source"
    say(f"{verdict}; {body['seconds']:.0f} s")
