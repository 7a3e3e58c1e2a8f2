"""How fast int8 runs: ours beside what the tools make of a plain export, fp32, and timm in eager and compiled mode.

    python tests/lab/benchmarks/int8_speed.py -o tests/lab/benchmarks/int8_speed.md

Files of each network (random weights, statistics measured, as in runtimes.py): ours in fp32, ours in int8, and the
tool's int8 of timm's network as torch exports it (`onnxruntime.quantization` by its manual, `nncf.quantize`; int8.py
has the code), for ONNX Runtime and for OpenVINO, calibrated on the same images. Every contender is a process of its
own; all take turns, in one run. A ratio is the median over the rounds of the ratios within a round. int8 needs a CPU
with VNNI to be this fast: the head of the table says whether this one has it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import circumstances
import int8
import onnxruntime
import openvino as ov
import runtimes
import torch
from kept import Kept

import normswap
from normswap.benchmarking.forms import Group, Making, of_file, of_model
from normswap.benchmarking.runtimes import Settings
from normswap.benchmarking.timing import Benchmark, TimedRow, speedup
from normswap.exporting import checks, exporter, sidecar
from normswap.models import zoo

KEPT = Path(__file__).resolve().parents[3] / "runs" / "int8_speed.jsonl"
NETWORKS = ("resnet50", "resnetv2_50", "nf_resnet50", "mobilenetv2_100")
IMAGES = 16  # to calibrate on: speed does not ask what the ranges are
RUNTIMES = {"onnxruntime": "onnx", "openvino": "openvino"}
HEAD = ("network", "runtime", "batch", "timm eager, ms", "compiled, ms", "fp32, ms", "tool's int8, ms", "ours int8, ms",
        "ours / fp32", "quartiles", "ours / tool's", "ours / eager")  # fmt: skip


def group(name: str, folder: Path, settings: Settings, batches: Sequence[int]) -> Group:
    """timm's network, the folded one, and the files in int8."""
    folder.mkdir()
    model = runtimes.alive(name, 224)
    found = of_model(name, model, Making(folder / "made", settings, batches, exporter.export, sidecar.read))
    config = zoo.data_config(model)
    mean, std = (torch.tensor(config[key]).view(3, 1, 1) for key in ("mean", "std"))
    # ranges that hold for noise, too, on which every contender is checked
    images = torch.cat([checks.pictures(found.size, mean, std, count=IMAGES), torch.randn(IMAGES, *found.size)])
    *given, measured = images[torch.randperm(len(images))].split(16)
    case = SimpleNamespace(model=model, images=given)
    for runtime, form in RUNTIMES.items():
        ours, tools = (folder / f"{who}-int8{int8.RUNTIMES[form]}" for who in ("ours", "tool"))
        normswap.export(model, ours, dtype="int8", calibrate=given, images=[measured], dynamic_batch=True)
        with contextlib.redirect_stdout(io.StringIO()):
            int8.TOOLS[form](case, tools, True, False)
        found.forms += [of_file(file, found, sidecar.read(file), None)[0] for file in (ours, tools)]
        print(f"{name}: files for {runtime} are made", file=sys.stderr)
    return found


def lines(rows: Sequence[TimedRow]) -> Iterator[str]:
    """One row per network, batch and runtime."""
    found = {(row.network, row.batch, row.form, row.runtime): row for row in rows}
    for network, batch in dict.fromkeys((row.network, row.batch) for row in rows):
        eager, compiled = (found.get((network, batch, "original", how)) for how in ("eager", "compile"))
        for runtime, form in RUNTIMES.items():
            end = int8.RUNTIMES[form]
            names = ("folded", f"tool-int8{end}", f"ours-int8{end}")
            wide, tools, ours = (found.get((network, batch, one, runtime)) for one in names)
            ratio = speedup(wide.rounds, ours.rounds) if _ok(wide) and _ok(ours) else None
            yield _line(
                network, runtime, str(batch), *map(_ms, (eager, compiled, wide, tools, ours)),
                f"**{ratio.median:.2f}**" if ratio else "", f"{ratio.low:.2f} .. {ratio.high:.2f}" if ratio else "",
                _ratio(tools, ours), _ratio(eager, ours),
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(NETWORKS))
    parser.add_argument("--batch", type=lambda text: [int(part) for part in text.split(",")], default=[1])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each contender, all rounds together")
    parser.add_argument("--fresh", action="store_true", help="measure again what was kept in runs/int8_speed.jsonl")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    threads = len(os.sched_getaffinity(0))
    settings = Settings("cpu", "fp32", False, threads, args.rounds, args.seconds)
    kept = Kept(KEPT, fresh=args.fresh)
    with tempfile.TemporaryDirectory() as name:
        for network in args.names:
            if (network,) in kept.rows:
                continue
            groups = [group(network, Path(name) / network, settings, args.batch)]
            wanted = ("eager", "compile", *RUNTIMES)
            say = lambda what: print(what, file=sys.stderr)  # noqa: E731
            rows = Benchmark(settings, Path(name), wanted, args.batch, say).run(groups)
            failed = [f"- {network}, {r.form} in {r.runtime}: {r.status}: {r.reason}"
                      for r in rows if r.status not in ("ok", "skipped")]  # fmt: skip
            kept.add((network,), lines=[*lines(rows)], failed=failed)
    vnni = "VNNI" if int8.vnni() else "no VNNI"
    versions = f"onnxruntime {onnxruntime.__version__}, openvino {ov.__version__.partition('-')[0]}"
    commits = ", ".join(sorted({row["commit"] for row in kept.rows.values()}))
    text = [
        "# int8: how fast", "",
        *circumstances.lines(f"python tests/lab/benchmarks/int8_speed.py {' '.join(sys.argv[1:])}", "cpu"),
        f"{settings.threads} threads, {vnni}; {versions}; measured at commit {commits}. Each network at its own size, "
        f"{IMAGES} images to calibrate on.", "",
        _line(*HEAD), f"{'|---' * len(HEAD)}|",
        *(line for network in args.names for line in kept.rows[(network,)]["lines"]), "",
        *(line for network in args.names for line in kept.rows[(network,)]["failed"]),
    ]  # fmt: skip
    args.output.write_text("\n".join(text).rstrip() + "\n")


def _ok(row: TimedRow | None) -> bool:
    return row is not None and row.status == "ok"


def _ms(row: TimedRow | None) -> str:
    return f"{row.ms:.1f}" if row is not None and row.status == "ok" else ""


def _ratio(one: TimedRow | None, other: TimedRow | None) -> str:
    return f"{speedup(one.rounds, other.rounds).median:.2f}" if _ok(one) and _ok(other) else ""


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
