"""Count timm's LayerNorms that are exactly RMSNorms once all that writes to their stream is centred (`--to rmsnorm`).

    python tests/lab/benchmarks/centring.py -o tests/lab/benchmarks/centring.md

Every network with a LayerNorm is planned, the smallest first, without weights (on the meta device) and, as `--skip`
does, without the norms that are refused. Those of at most `PROVEN` parameters are also converted, with random weights,
and measured in float64. Of networks alike (module for module, tensor for tensor, setting for setting) one is planned.
What was counted is kept, a line each, in runs/centring.jsonl; a second call goes on.
"""

import hashlib
import re
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import kept
import timm
import torch
from torch import nn

import normswap
from normswap.graph.inspection import inspect
from normswap.schemes import rmsnorm

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "tests"))
from small_transformers import inhabit  # noqa: E402

PROVEN = 8_000_000
COLUMNS = ("family", "networks", "LayerNorms", "become RMSNorms", "whole networks", "proven", "largest error",
           "of those that stay: why most do")  # fmt: skip


def create(name: str, device: str) -> Any:
    with torch.device(device):
        return timm.create_model(name).eval()


def seen(name: str) -> kept.Row:
    """Its family, size, number of LayerNorms, and a digest of all that decides its plan."""
    model = create(name, "meta")
    settings = [(path, type(m), {k: v for k, v in vars(m).items() if isinstance(v, int | float | str | tuple)})
                for path, m in model.named_modules()]  # fmt: skip
    shapes = [(path, value.shape) for path, value in model.state_dict().items()]
    digest = hashlib.sha256(repr((model, settings, shapes, model.pretrained_cfg["input_size"])).encode()).hexdigest()
    norms = sum(isinstance(m, nn.LayerNorm) for m in model.modules())
    size = sum(p.numel() for p in model.parameters())
    return {"family": type(model).__module__.rpartition(".")[2], "params": size, "norms": norms, "digest": digest}


def counted(name: str, params: int) -> kept.Row:
    """How many become RMSNorms, why the others stay, and of small networks how many did and the largest error."""
    start, row = time.monotonic(), {"become": 0, "reasons": {}}
    try:
        model = create(name, "meta")
        builder = rmsnorm.plan(inspect(model))
        kinds = {path: type(module).__name__ for path, module in model.named_modules()}
        plain = [re.sub(r"[\w.]+", lambda m: kinds.get(m[0], m[0]), why) for why in builder.refusals.values()]
        plain = [re.sub(r"^its input must keep its mean: | in [\w.]+(?= adds|$)", "", why) for why in plain]
        row = {"become": len(builder.outcomes), "reasons": dict(Counter(plain))}
        if params <= PROVEN and builder.outcomes:
            result = normswap.convert(inhabit(create(name, "cpu")), "rmsnorm", skip=[*builder.refusals])
            now = [result.model.get_submodule(path) for path in builder.outcomes]
            row["proven"] = sum(isinstance(module, nn.RMSNorm) for module in now)
            row["error"] = max(error.relative_l2 for error in result.report.logits if error.precision == "float64")
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return {**row, "seconds": round(time.monotonic() - start, 1)}


def line(family: str, rows: list[kept.Row]) -> str:
    norms, become = (sum(row[key] for row in rows) for key in ("norms", "become"))
    whole = sum(row["norms"] == row["become"] for row in rows)
    reasons = sum((Counter(row["reasons"]) for row in rows), Counter())
    why = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common(2))
    proven, error = sum(row.get("proven", 0) for row in rows), max(row.get("error", 0) for row in rows)
    return kept.markdown_row(family, len(rows), norms, become, whole, proven, f"{error:.0e}" if proven else "", why)


def main() -> None:
    parser = kept.arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=600, help="begin no network after this time")
    args = parser.parse_args()
    end, rows = time.monotonic() + 60 * args.minutes, kept.Kept(ROOT / "runs" / "centring.jsonl", fresh=args.fresh)
    networks = [(name, rows.get((name,), lambda name=name: seen(name))) for name in timm.list_models()]
    families, left = defaultdict(list), []
    for name, net in sorted((pair for pair in networks if pair[1]["norms"]), key=lambda pair: pair[1]["params"]):
        key = ("plan", net["digest"])
        if key not in rows.rows and time.monotonic() > end:
            left.append(f"{name} ({net['norms']})")
            continue
        row = {**net, **rows.get(key, lambda name=name, net=net: counted(name, net["params"]))}
        (left.append(f"{name} ({row['failed']})") if "failed" in row else families[net["family"]].append(row))
        print(name, row, flush=True)
    lines = [
        "",
        f"Not counted, with their LayerNorms or why: {', '.join(left) or 'none'}.",
        "",
        kept.markdown_head(*COLUMNS),
    ]
    lines.append(line("**all**", [row for family in families.values() for row in family]))
    lines += [line(family, families[family]) for family in sorted(families)]
    rows.write(args.output, "LayerNorms of timm that are RMSNorms once their streams are centred", lines)


if __name__ == "__main__":
    main()
