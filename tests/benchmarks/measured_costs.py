"""What `normswap advise` tells of costs, from the tables beside this: `python tests/benchmarks/measured_costs.py`.

Run it again when schemes.md, kinds.md or step_time.md has been measured anew; a test sees that what is shipped is what
they say.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FILE = HERE.parent.parent / "normswap" / "analysis" / "measured_costs.json"
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def rows(file: str) -> list[list[str]]:
    """The cells of every table in a file, row by row."""
    lines = (HERE / file).read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def kept() -> dict[str, Any]:
    """The smallest and the largest share of the accuracy, by scheme with its defaults and by calibration."""
    found: dict[str, dict[str, list[float]]] = {}
    networks = set()
    for row in rows("schemes.md"):
        scheme = re.fullmatch(r"`([a-z-]+)`", row[1]) if len(row) > 6 else None
        if scheme and row[6].endswith(" %"):
            networks.add(row[0])
            found.setdefault(scheme[1], {}).setdefault(row[2], []).append(float(row[6].removesuffix(" %")))
    spans = {
        scheme: {how: [min(shares), max(shares)] for how, shares in by.items() if len(shares) == len(networks)}
        for scheme, by in found.items()
    }
    return {
        "on": f"{_NUMBERS[len(networks)]} CIFAR-10 ResNets",
        "where": "tests/benchmarks/schemes.md",
        "figures": spans,
    }


def kinds() -> dict[str, Any]:
    """By kind of network: the networks, and the smallest and largest share kept, by way and calibration images."""
    table = rows("kinds.md")
    family = {row[0]: row[1] for row in table if len(row) == 5 and row[0] not in ("network", "---")}
    found: dict[str, dict[str, Any]] = {}
    for row in table:
        share = re.match(r"([0-9.]+) %", row[5]) if len(row) > 6 else None
        if share and row[0] in family:
            part = found.setdefault(family[row[0]], {"on": [], "figures": {}})
            part["on"] += [row[0]] if row[0] not in part["on"] else []
            shares = part["figures"].setdefault(row[1].strip("`"), {}).setdefault(row[2], [])
            shares[:] = (
                [min(*shares, float(share[1])), max(*shares, float(share[1]))] if shares else [float(share[1])] * 2
            )
    return {"where": "tests/benchmarks/kinds.md", "by_kind": found}


def steps() -> dict[str, dict[str, Any]]:
    """Time and memory of a training step against BatchNorm's: the middle, the lowest, the highest."""
    title = (HERE / "step_time.md").read_text().splitlines()[0]
    network, size = re.fullmatch(r"# Time of a training step: (\w+), (.*), precision no", title).groups()  # type: ignore[union-attr]
    known = {"on": f"{network}, {size}", "where": "tests/benchmarks/step_time.md"}
    measured = rows("step_time.md")[2:]
    time = {row[0]: [float(row[2]), float(row[3]), float(row[4])] for row in measured}
    return {"step": {**known, "figures": time}, "memory": {**known, "figures": {r[0]: float(r[6]) for r in measured}}}


def table() -> dict[str, Any]:
    """All of it."""
    return {"made_by": "python tests/benchmarks/measured_costs.py", "kept": kept(), "kinds": kinds(), **steps()}


if __name__ == "__main__":
    text = json.dumps(table(), indent=1)
    FILE.write_text(re.sub(r"\[\s+([^]]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text) + "\n")
