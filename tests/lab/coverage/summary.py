"""The walk's rows as one table by family."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import timm
import torch
from kept import Row, markdown_head, markdown_row

HEAD = (
    "family",
    "networks",
    "exact",
    "refused",
    "wrong",
    "raised",
    "norms",
    "folded back",
    "forward",
    "scale moved",
    "affine left",
    "worst error",
    "seconds",
    "fx.fuse: complete",
    "partial",
    "no-op",
    "wrong",
    "raised",
    "norms left",
)


def table(rows: Iterable[Row], mutants: Iterable[Row]) -> str:
    rows = list(rows)
    mine = [row for row in rows if row["status"] not in ("none", "large")]
    families: dict[str, list[Row]] = defaultdict(list)
    for row in mine:
        families[row["family"]].append(row)
    lines = [_line(name, group) for name, group in sorted(families.items())]
    parts = [
        "# Every timm architecture with BatchNorm, folded",
        (
            f"Written by `tests/lab/coverage/walk.py`; timm {timm.__version__}, torch"
            f" {torch.__version__.split('+')[0]}, float64, lived-in statistics, at most 100 M"
            " parameters. Exact: relative L2 at the logits <= 1e-8 and no statistics-bearing norm"
            " left. Beside it `torch.fx.experimental.optimization.fuse` in the same run."
        ),
        _totals(rows, mine),
        *_mutants(list(mutants)),
        "\n".join([markdown_head(*HEAD), *lines, _line("**all**", mine)]),
        *_problems(mine),
    ]

    return "\n\n".join(parts) + "\n"


def _totals(rows: list[Row], mine: list[Row]) -> str:
    states = Counter(row["status"] for row in mine)
    theirs = Counter(row["fuse"]["status"] for row in mine if "fuse" in row)
    exact = states["exact"]
    left = sum(row["fuse"]["left"] for row in mine if "fuse" in row)
    total = sum(row.get("norms", 0) for row in mine)
    other = Counter(row["status"] for row in rows)

    return "\n".join(
        [
            f"- {len(mine)} architectures, {total:,} norms: **{exact} exact"
            f" ({exact / max(len(mine), 1):.1%})**"
            + "".join(f", {n} {state}" for state, n in states.most_common() if state != "exact")
            + f"; not walked: {other['none']} without BatchNorm, {other['large']} larger.",
            (
                f"- fx.fuse: {', '.join(f'{n} {state}' for state, n in theirs.most_common())};"
                f" {left:,} norms left ({left / max(total, 1):.0%})."
            ),
            (
                "- Worst exact error"
                f" {max((r['error'] for r in mine if r['status'] == 'exact'), default=0):.0e};"
                " least input sensitivity"
                f" {min((r['sensitivity'] for r in mine if 'sensitivity' in r), default=0):.0e};"
                f" {sum(r.get('seconds', 0) for r in mine) / 60:.0f} minutes on a busy core; most"
                " memory for one network"
                f" {max((r.get('peak', 0) for r in mine), default=0) / 1024:.1f} GiB."
            ),
        ]
    )


def _mutants(rows: list[Row]) -> list[str]:
    tried = [row for row in rows if row["status"] == "mutants"]
    if not tried:
        return []

    trials = sum(row["trials"] for row in tried)
    found = sum(row["detected"] for row in tried)
    missed: list[str] = []
    for row in tried:
        missed += [f"{row['name']} {where}" for where in row["missed"]]
    unseen = sum(row["unseen"] for row in tried)

    return [
        f"The checker, checked: one channel of one norm off by 1 %, on {len(tried)} networks: "
        f"{found} of {trials} detected ({found / trials:.1%}); {unseen} drawn again, as their "
        "channel was dead on these images." + (f" Missed: {'; '.join(missed)}." if missed else "")
    ]


def _line(name: str, rows: list[Row]) -> str:
    states = Counter(row["status"] for row in rows)
    fuse = Counter(row["fuse"]["status"] for row in rows if "fuse" in row)
    errors = [row["error"] for row in rows if "error" in row]
    figures: list[Any] = [name, len(rows), states["exact"], states["refused"], states["wrong"]]
    figures += [sum(states[state] for state in ("raised", "crashed", "timeout"))]
    figures += [
        sum(row.get(key, 0) for row in rows)
        for key in ("norms", "back", "forward", "moved", "affine")
    ]
    figures += [
        f"{max(errors):.0e}" if errors else "",
        f"{sum(row.get('seconds', 0) for row in rows):.0f}",
    ]
    figures += [fuse[state] for state in ("complete", "partial", "no-op", "wrong", "raised")]
    figures += [sum(row["fuse"]["left"] for row in rows if "fuse" in row)]

    return markdown_row(*figures)


def _problems(rows: list[Row]) -> list[str]:
    found = [row for row in rows if row["status"] != "exact"]
    if not found:
        return []
    lines = [
        f"- `{row['name']}` {row['status']}: {row.get('why') or row.get('error') or ''}"
        for row in found
    ]
    return ["## Not exact", "\n".join(lines)]
