"""A robot's policy by what becomes of its encoder's norms, seed by seed against BatchNorm.

    python tests/lab/benchmarks/after_training.py --tasks policy -o FILE
    python tests/lab/benchmarks/policy_seeds.py -o tests/lab/benchmarks/policy_seeds.md

The runs are those of `after_training.py`, which keeps each as it ends: a call that was cut goes
on. A seed decides head, order and flips alike for every way, so ways are compared seed by seed. The
sign test is two-sided (Dixon & Mood 1946); seeds that end level are left out of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import comb
from pathlib import Path
from statistics import mean, stdev

from kept import Kept, arguments, markdown_head, markdown_row, write_table
from schemes_table import ROOT

BASE = "BatchNorm"
WAYS = (
    BASE,
    "BatchNorm in eval mode",
    "`frozen-bn`",
    "`skipinit`",
    "`groupnorm`",
    "`groupnorm --groups 32`",
    "`groupnorm --relative-eps 0.00001`",
    "`nf`, 500 images",
)


def sign_test(differences: Sequence[float]) -> float:
    """The chance that so uneven signs, or more uneven ones, come of fair coins."""
    positive = sum(difference > 0 for difference in differences)
    negative = sum(difference < 0 for difference in differences)
    count = positive + negative
    tail = sum(comb(count, k) for k in range(min(positive, negative) + 1)) / 2**count
    return min(2 * tail, 1.0)


def ends(kept: Kept, way: str) -> dict[str, float]:
    """The success of each seed's run at its end, in percent, by seed."""
    found: dict[str, float] = {}
    for key, row in kept.rows.items():
        if key[:3] == ("policy", way, "seed"):
            found[key[3]] = row["end"]
    return found


def row(way: str, own: Mapping[str, float], base: Mapping[str, float]) -> str:
    """A way's line: its seeds, its mean, and how it stands against BatchNorm on the same seeds."""
    values = list(own.values())
    spread = f" ± {stdev(values):.1f}" if values[1:] else ""
    cells = [way, len(values), f"{mean(values):.1f}{spread}"]
    if way == BASE:
        return markdown_row(*cells, "", "", "")

    differences = [own[seed] - base[seed] for seed in own if seed in base]
    if not differences:
        return markdown_row(*cells, "", "", "")
    higher = sum(difference > 0 for difference in differences)
    against = f"{higher} of {len(differences)}"
    return markdown_row(
        *cells, f"{mean(differences):+.1f}", against, f"{sign_test(differences):.2g}"
    )


def lines(kept: Kept) -> Iterator[str]:
    yield from ("", *(__doc__ or "").splitlines()[5:], "")
    yield markdown_head("way", "seeds", "success, %", "to BatchNorm", "seeds above it", "sign test")
    base = ends(kept, BASE)
    for way in WAYS:
        own = ends(kept, way)
        if own:
            yield row(way, own, base)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=Path, default=ROOT / "runs" / "after_training.jsonl")
    given = parser.parse_args()
    command = f"benchmarks/policy_seeds.py -o {given.output}"
    table = lines(Kept(given.rows))
    write_table(given.output, "A robot's policy, seed by seed", command, table)


if __name__ == "__main__":
    main()
