"""Count timm's LayerNorms that are exactly RMSNorms once all that writes to their stream is centred
(`--to rmsnorm`).

    python tests/lab/benchmarks/centring.py -o tests/lab/benchmarks/centring.md

Every network with a LayerNorm is planned, the smallest first, without weights (on the meta device),
what is refused left out as by `--skip`. Those of at most `PROVEN` parameters are also converted,
with random weights, and measured in float64. runs/centring.jsonl keeps what was counted; a second
call goes on.
"""

import re
import sys
import time
from collections import Counter
from pathlib import Path

import timm
import torch
from kept import Kept, Row, arguments, markdown_head, markdown_row
from torch import nn

import normswap
from normswap.graph.inspection import inspect
from normswap.schemes import rmsnorm

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "tests"))
from support.small_transformers import inhabit  # noqa: E402

PROVEN = 8_000_000
COLUMNS = (
    "family",
    "networks",
    "whole",
    "LayerNorms",
    "become RMSNorms",
    "proven",
    "largest error",
    "why not",
)


def create(name: str, device: str) -> nn.Module:
    with torch.device(device):
        return timm.create_model(name).eval()


def seen(name: str) -> Row:
    model = create(name, "meta")
    norms = sum(isinstance(m, nn.LayerNorm) for m in model.modules())
    size = sum(p.numel() for p in model.parameters())
    return {"family": type(model).__module__.rpartition(".")[2], "norms": norms, "size": size}


def counted(name: str, network: Row) -> Row:
    """How many become RMSNorms, how many stay for which reason, and of a small network the largest
    error.
    """
    model = create(name, "meta")
    kinds = {path: type(module).__name__ for path, module in model.named_modules()}

    row: Row = {"become": 0, "proven": 0, "error": 0.0}
    try:
        builder = rmsnorm.plan(inspect(model))
        plain = [
            re.sub(r"[\w.]+", lambda word: kinds.get(word[0], word[0]), why)
            for why in builder.refusals.values()
        ]
        plain = [
            re.sub(r"^its input must keep its mean: | in [\w.]+(?= adds|$)", "", why)
            for why in plain
        ]

        if network["size"] <= PROVEN and builder.outcomes:
            done = normswap.convert(
                inhabit(create(name, "cpu")), "rmsnorm", skip=[*builder.refusals]
            )
            row["proven"] = sum(
                isinstance(done.model.get_submodule(path), nn.RMSNorm) for path in builder.outcomes
            )
            row["error"] = max(
                error.relative_l2 for error in done.report.logits if error.precision == "float64"
            )

        return {**row, "become": len(builder.outcomes), "reasons": Counter(plain)}
    except Exception as error:
        return {**row, "reasons": {f"{type(error).__name__}: {error}"[:200]: network["norms"]}}


def line(family: str, rows: list[Row]) -> str:
    whole = sum(row["become"] > 0 and not row["reasons"] for row in rows)
    norms = sum(row["norms"] for row in rows)
    become = sum(row["become"] for row in rows)
    proven = sum(row["proven"] for row in rows)
    reasons: Counter[str] = Counter()
    for row in rows:
        reasons.update(row["reasons"])

    why = "; ".join(f"{why} ({count})" for why, count in reasons.most_common(2))
    error = f"{max(row['error'] for row in rows):.0e}" if proven else ""
    return markdown_row(family, len(rows), whole, norms, become, proven, error, why)


def main() -> None:
    (parser := arguments(__doc__)).add_argument(
        "--minutes", type=float, default=600, help="begin none after this time"
    )
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    kept = Kept(ROOT / "runs" / "centring.jsonl", fresh=args.fresh)
    networks = {
        name: kept.get((name,), lambda name=name: seen(name)) for name in timm.list_models()
    }
    networks = {name: network for name, network in networks.items() if network["norms"]}

    rows: list[Row] = []
    for name, network in sorted(networks.items(), key=lambda item: item[1]["size"]):
        if ("plan", name) in kept.rows or time.monotonic() < end:
            rows.append(
                network
                | kept.get(
                    ("plan", name), lambda name=name, network=network: counted(name, network)
                )
            )

    lines = [
        "",
        (
            f"The {len(rows)} smallest of {len(networks)} networks: up to"
            f" {rows[-1]['size'] / 1e6:.0f} M parameters."
        ),
    ]
    lines += ["", markdown_head(*COLUMNS), line("**all**", rows)]
    for family in sorted({row["family"] for row in rows}):
        lines.append(line(family, [row for row in rows if row["family"] == family]))
    kept.write(
        args.output, "LayerNorms of timm that are RMSNorms once their streams are centred", lines
    )


if __name__ == "__main__":
    main()
