"""The table of the walk through other libraries: by library, then every network that has
BatchNorms.
"""

from collections import Counter
from collections.abc import Sequence

import circumstances
from kept import Row, markdown_head, markdown_row

DISTRIBUTIONS = {
    "open_clip": "open_clip_torch",
    "smp": "segmentation_models_pytorch",
}  # called otherwise here
UNTRIED = ("not built", "too large", "none")


def table(rows: Sequence[Row], listed: Sequence[str], about: str) -> list[str]:
    """All rows that there are, in Markdown."""
    owners = {
        name: [one for one in listed if library(one) == name]
        for name in sorted(map(library, listed))
    }
    commits = Counter(row["commit"] for row in rows)
    versions = circumstances.versions(DISTRIBUTIONS.get(name, name) for name in owners)
    walked = "; ".join(f"{count} networks at {commit}" for commit, count in commits.items())
    head = (
        "library",
        "listed",
        "walked",
        "not built",
        "too large",
        "no BatchNorm",
        "exact",
        "largest error",
        "affines left in",
        "refused",
        "other",
        "groupnorm runs",
        "groupnorm refused",
        "groupnorm other",
    )
    lines = [about, "", f"Walked: {walked}. {versions}.", "", markdown_head(*head)]
    lines += [
        _library(name, names, [row for row in rows if library(_name(row)) == name])
        for name, names in owners.items()
    ]
    head = (
        "network",
        "norms",
        "status",
        "error",
        "strays",
        "affines left",
        "seconds",
        "groupnorm",
        "its relative L2",
        "its seconds",
        "why",
        "commit",
    )
    lines += ["", markdown_head(*head)]

    return lines + [_network(row) for row in sorted(rows, key=_name) if row["status"] != "none"]


def library(name: str) -> str:
    return name.split(":")[0]


def _name(row: Row) -> str:
    return str(row["key"][0])


def _library(name: str, listed: Sequence[str], rows: Sequence[Row]) -> str:
    found = Counter(row["status"] for row in rows)
    exact = [row for row in rows if row["status"] == "exact"]
    tried = sum(status not in UNTRIED for status in found.elements())
    approximate = Counter(row["approximate"]["status"] for row in rows if "approximate" in row)
    worst = f"{max(row['error'] for row in exact):.0e}" if exact else ""

    return markdown_row(
        name,
        len(listed),
        len(rows),
        *(found[status] for status in UNTRIED),
        len(exact),
        worst,
        sum(bool(row["affines"]) for row in exact),
        found["refused"],
        tried - len(exact) - found["refused"],
        approximate["runs"],
        approximate["refused"],
        approximate.total() - approximate["runs"] - approximate["refused"],
    )


def _network(row: Row) -> str:
    other: Row = row.get("approximate", {})
    strays = f"{row['straying']:.0e}" if "straying" in row else ""
    why = "; ".join(part["why"] for part in (row, other) if part.get("why"))

    return markdown_row(
        _name(row),
        row.get("norms", ""),
        row["status"],
        _size(row),
        strays,
        row.get("affines", ""),
        row.get("seconds", ""),
        other.get("status", ""),
        _size(other),
        other.get("seconds", ""),
        why.replace("|", "/"),
        row["commit"],
    )


def _size(row: Row) -> str:
    """The error; none where the shapes of the answers differ, as the number of detections may."""
    if "error" not in row:
        return ""
    return "other shapes" if row["error"] is None else f"{row['error']:.0e}"
