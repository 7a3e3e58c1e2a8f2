"""An exported file, as `export`, `verify` and `inspect` print it."""

from __future__ import annotations

from collections.abc import Mapping

from normswap.cli.tables import facts, text
from normswap.plan import Body

CHECKED_ON_NOISE = "on noise only; give --data IMAGES to check it on photographs"


def same(figures: Body) -> str:
    """How many of its answers are the network's."""
    if figures["agreement"] is None:
        return ""
    answers, unit = figures["answers"], figures["unit"]
    of = "" if unit == "images" else f" {unit} of {figures['count']} images"
    return f"{round(figures['agreement'] * answers)} of {answers}{of} ({figures['inputs']})"


def top1(figures: Body) -> str:
    """The accuracies of network and file, on labelled images."""
    if figures["top1"] is None:
        return ""
    source, result = figures["source_top1"], figures["top1"]
    return f"{source:.2f} % -> {result:.2f} % ({result - source:+.2f} points), on {figures['count']} images"


def operators(nodes: Mapping[str, int] | None) -> str:
    """How many there are, and of each kind."""
    listed = ", ".join(f"{count} {kind}" for kind, count in (nodes or {}).items())
    return f"{sum(nodes.values())}: {listed}" if nodes else ""


def described(body: Body) -> None:
    """A file in a few lines, and what its sidecar says of what it takes and gives."""
    noted, sidecar = body["metadata"], body["sidecar"]
    missing = "`normswap export` did not write it: nothing says how images are prepared for it"
    facts(
        ("file", f"{body['source']} ({body['bytes'] / 1e6:.1f} MB)"),
        ("format", body["format"]),
        ("operators", operators(body["nodes"])),
        ("made from", " ".join(noted[key] for key in ("architecture", "source") if noted.get(key))),
        *((name, text(value)) for name, value in sidecar.items()),
        ("note", None if sidecar else missing),
    )
