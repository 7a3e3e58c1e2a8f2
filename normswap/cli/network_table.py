"""A network in a few lines, as `inspect` and `demo` print it."""

from __future__ import annotations

from collections import Counter

from normswap.cli.tables import counts, facts, size
from normswap.plan import Body


def network(body: Body) -> None:
    """The network in a few lines."""
    architecture = f" ({body['architecture']})" if body["architecture"] else ""
    skips = Counter(block["skip"] for block in body["blocks"]) if "blocks" in body else Counter(body["skips"])
    norms = sum(body["norms"].values())
    facts(
        ("network", f"{body['source']}: {body['class']}{architecture}"),
        ("input", size(body["input_size"])),
        ("parameters", f"{body['parameters']:,}"),
        ("converted", " -> ".join(body["plan"])),
        ("blocks", f"{sum(skips.values())} (skip: {counts(skips)})" if skips else "none"),
        ("norms", f"{norms} ({counts(body['norms'])})" if norms else "none"),
        ("roles", counts(body["roles"])),
    )
