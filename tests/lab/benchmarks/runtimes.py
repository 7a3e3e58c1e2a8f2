"""Ours against the other ways to run the same network: one run, the same machine, the same number of threads.

    python tests/lab/benchmarks/runtimes.py -o tests/lab/benchmarks/runtimes.md

Peers: timm's network in eager mode, torch.fx's fuser, torch.compile, TorchScript (frozen, optimize_for_inference), and
torch's own ONNX export in ONNX Runtime and in OpenVINO. Ours: the folded network, and what `normswap.export` makes of
it, in the same runtimes. Every contender is a process of its own, checked against eager mode and then timed in turns
(`normswap.benchmarking`); all processes are started anew three times, as a start decides where memory lies, which alone
moves eager mode by 10 %. Weights are random, gammas positive, statistics measured.

A ratio is ours over the peer in the same runtime, the median over the rounds of the ratios within a round; above 1 ours
is faster. "best" is the ratio of the fastest passes, "CPU" that of processor times, which the load of others moves
least; with more than one thread it counts threads that spin, too. Networks are timed one after the other.

About 25 minutes on two quiet cores. On a GPU: --device cuda --dtype bf16 --channels-last --batch 1,64,256
--runtime eager,fuse,compile,compile:reduce-overhead,compile:max-autotune --compile-batch 1,64,256
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import circumstances
import torch
from torch import nn

from normswap.analysis import signal_propagation
from normswap.benchmarking import timing, timing_plot
from normswap.benchmarking.forms import Group, Making, of_model
from normswap.benchmarking.runtimes import Settings
from normswap.benchmarking.timing import Benchmark, Say, TimedRow, speedup
from normswap.exporting import checks, exporter, sidecar
from normswap.graph import inspection
from normswap.layers import affine
from normswap.storage import checkpoint

FOLDABLE = ("resnet18", "resnet50", "seresnet50", "resnext50_32x4d")
OURS_ALONE = ("resnetv2_50", "nf_resnet50", "eca_nfnet_l0", "dm_nfnet_f0")
PAIR = ("nf_resnet50", "resnetv2_50")  # baked against folded
EQUAL = 0.98  # a ratio that counts as equal


@dataclass(frozen=True)
class Pair:
    """One of ours and a peer, in the same runtime."""

    network: str
    batch: int
    peer: str
    ours: TimedRow
    other: TimedRow
    ratio: float | None
    low: float | None
    high: float | None

    def beyond_chance(self) -> bool:
        """Whether the median over the rounds is below EQUAL, by a sign test: at 5 %, of both sides together."""
        theirs, ours = ([statistics.median(runs) for runs in row.rounds] for row in (self.other, self.ours))
        slower = sum(a / b < EQUAL for a, b in zip(theirs, ours, strict=True))
        return sum(math.comb(len(ours), k) for k in range(slower, len(ours) + 1)) <= 0.025 * 2 ** len(ours)


def alive(name: str, side: int) -> nn.Module:
    """The network with random weights, gammas and betas, its statistics measured on noise, rough and smooth.

    The last gamma of each branch is small, as in trained networks: else rounding errors grow from block to block, and
    an exact copy could not be told from a wrong one.
    """
    torch.manual_seed(0)
    model = signal_propagation.awake(checkpoint.open_model(name, weights="random"))
    norms = [module for module in model.modules() if affine.is_batchnorm(module)]
    with torch.no_grad():
        for norm in norms:
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.normal_(0, 0.3)
            norm.momentum = 1.0
        for block in inspection.inspect(model).blocks:
            if block.last is not None and norms:
                model.get_submodule(block.last).weight.mul_(0.3)
        if norms:
            one = torch.ones(3, 1, 1)
            smooth = checks.pictures((3, side, side), 0.5 * one, 0.25 * one)[:4]
            model.train()(torch.cat([torch.randn(4, 3, side, side), smooth]))
    return model.eval()


def measure(args: argparse.Namespace, folder: Path, say: Say) -> list[TimedRow]:
    """The rows of every network, and of the pair."""
    settings = Settings(args.device, args.dtype, args.channels_last, args.threads, args.rounds, args.seconds)
    found: list[TimedRow] = []
    folded = {}
    for name in args.models:
        making = Making(folder / name, settings, args.batch, exporter.export, sidecar.read)
        group = of_model(name, alive(name, args.size), making, args.size)
        # torch.fx runs ours, too: its graph drops values sooner than modules do
        folded[name] = group.forms[-1] = replace(group.forms[-1], foldable=True)
        for batch in args.batch:
            wanted = [r for r in args.runtime if batch in args.compile_batch or not r.startswith("compile")]
            found += started_anew(args.starts, Benchmark(settings, folder, wanted, [batch], say), group)
    if set(PAIR) <= folded.keys():
        forms = [replace(folded[name], name=f"folded {name}") for name in reversed(PAIR)]
        group = Group(" and ".join(PAIR), forms, (3, args.size, args.size))
        wanted = [r for r in args.runtime if not r.startswith(("compile", "fuse"))]
        found += started_anew(args.starts, Benchmark(settings, folder, wanted, args.batch, say), group)
    return found


def started_anew(starts: int, benchmark: Benchmark, group: Group) -> list[TimedRow]:
    """Run a benchmark, its processes started several times, all their rounds together.

    A process keeps what it drew at its start (where its memory lies), which moves eager mode by 10 % and more.
    """
    return [together(rows) for rows in zip(*(benchmark.run([group]) for _ in range(starts)), strict=True)]


def together(rows: Sequence[TimedRow]) -> TimedRow:
    """One contender's starts as one row: the medians over the starts, and the rounds of all."""
    ill = next((row for row in rows if row.status != "ok"), None)
    if ill is not None:
        return ill
    of = lambda name: statistics.median(getattr(row, name) for row in rows)  # noqa: E731
    names = ("ms", "best_ms", "cpu_ms", "images_per_s", "speedup", "memory_mib")
    rounds = [part for row in rows for part in row.rounds]
    return replace(rows[0], **{name: of(name) for name in names}, rounds=rounds, runs=sum(row.runs for row in rows))


def pairs(rows: Sequence[TimedRow]) -> Iterator[Pair]:
    """Each peer with ours in its runtime."""
    ours = {(row.network, row.batch, row.runtime): row for row in rows if row.form == "folded"}
    for row in rows:
        own = ours.get((row.network, row.batch, row.runtime))
        if row.form != "original" or own is None:
            continue
        both = row.status == own.status == "ok"
        ratio = speedup(row.rounds, own.rounds) if both else None
        figures = (ratio.median, ratio.low, ratio.high) if ratio else (None, None, None)
        yield Pair(row.network, row.batch, row.runtime, own, row, *figures)


def table(chosen: Sequence[Pair]) -> Iterator[str]:
    yield (
        "| network | batch | runtime | peer, ms | ours, ms | peer x eager | ours x eager | ours / peer | quartiles | "
        "best | CPU | peer, MiB | ours, MiB |"
    )
    yield "|---" * 13 + "|"
    for one in chosen:
        name = "fx fuse" if one.peer == "fuse" else one.peer
        quartiles = "" if one.low is None else f"{one.low:.2f} .. {one.high:.2f}"
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}" if one.ratio >= EQUAL else f"**{one.ratio:.2f}**"
        yield (
            f"| {one.network} | {one.batch} | {name} | {_ms(one.other)} | {_ms(one.ours)} | {_faster(one.other)} | "
            f"{_faster(one.ours)} | {ratio} | {quartiles} | {_over(one.other.best_ms, one.ours.best_ms)} | "
            f"{_over(one.other.cpu_ms, one.ours.cpu_ms)} | {_whole(one.other.memory_mib)} | "
            f"{_whole(one.ours.memory_mib)} |"
        )


def _ms(row: TimedRow) -> str:
    return f"{row.ms:.1f}" if row.status == "ok" else row.status


def _over(peer: float | None, ours: float | None) -> str:
    return f"{peer / ours:.2f}" if peer and ours else ""


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _faster(row: TimedRow) -> str:
    return f"{row.speedup:.2f}" if row.status == "ok" else ""


def verdicts(rows: Sequence[TimedRow], found: Sequence[Pair]) -> Iterator[str]:
    """What must hold, and whether it does."""
    known = [one for one in found if one.ratio is not None]
    equal = [one for one in known if one.ratio >= EQUAL]
    yield f"- ours at least {EQUAL} of the peer in its runtime: {len(equal)} of {len(known)} pairs"
    for one in known:
        if one.ratio < EQUAL:
            spread = f"{one.ratio:.3f} ({one.low:.2f} .. {one.high:.2f}), best "
            spread += f"{_over(one.other.best_ms, one.ours.best_ms)}, CPU {_over(one.other.cpu_ms, one.ours.cpu_ms)}"
            yield f"  - not: {one.network}, batch {one.batch}, {one.peer}: {spread}"
    slower = sum(one.beyond_chance() for one in known if one.ratio < EQUAL)
    yield f"- below {EQUAL} beyond chance (sign test over the rounds, 5 %): {slower} pairs"
    for network, batch in dict.fromkeys((row.network, row.batch) for row in rows if row.form == "folded"):
        mine = [r for r in rows if (r.network, r.batch, r.form, r.status) == (network, batch, "folded", "ok")]
        if mine:
            best = max(mine, key=lambda row: row.speedup)
            says = f"{best.speedup:.2f} x timm in eager mode ({best.runtime})" + (" **slower**" * (best.speedup <= 1))
            yield f"- {network}, batch {batch}: the best of ours is {says}"


def against_each_other(rows: Sequence[TimedRow]) -> Iterator[str]:
    """A baked nf_resnet50 against a folded resnetv2_50."""
    baked, folded = (f"folded {name}" for name in PAIR)
    found = {(row.form, row.batch, row.runtime): row for row in rows}
    yield f"| batch | runtime | {folded}, ms | {baked}, ms | {PAIR[0]} / {PAIR[1]} | quartiles |"
    yield "|---|---|---|---|---|---|"
    for (form, batch, runtime), row in found.items():
        other = found.get((folded, batch, runtime))
        if form == baked and other is not None and row.status == other.status == "ok":
            ratio = speedup(other.rounds, row.rounds)
            yield (
                f"| {batch} | {runtime} | {other.ms:.1f} | {row.ms:.1f} | {ratio.median:.2f} | "
                f"{ratio.low:.2f} .. {ratio.high:.2f} |"
            )


def report(
    args: argparse.Namespace, rows: Sequence[TimedRow], before: dict[str, Any], after: dict[str, Any], seconds: float
) -> str:
    found = list(pairs(rows))
    versions = ", ".join(f"{name} {version}" for name, version in before["versions"].items())
    plural = "s" if args.threads > 1 else ""
    lines = [
        "# The folded network against the other ways to run it",
        "",
        f"`{args.command}`",
        "",
        " ".join((__doc__ or "").split("\n\n")[2].split()),
        " ".join((__doc__ or "").split("\n\n")[3].split()),
        "",
        f"{before['processor']}, {before['cores']} cores, {args.threads} thread{plural}, {args.device}, {args.dtype}, "
        f"{args.size} x {args.size} pixels, {args.starts} starts of {args.rounds} rounds; load {before['load'][0]:.1f} "
        f"before and {after['load'][0]:.1f} after; {seconds / 60:.0f} minutes; {versions}; "
        f"commit {circumstances.commit()}, {time.strftime('%Y-%m-%d')}. int8 beside fp32: `int8.md`.",
        "",
    ]
    for title, names in (
        ("Networks that others fold, too", [m for m in args.models if m not in OURS_ALONE]),
        ("Networks that only we fold", [m for m in args.models if m in OURS_ALONE]),
    ):
        chosen = [one for one in found if one.network in names]
        if chosen:
            lines += [f"## {title}", "", *table(chosen), ""]
    if any(row.form == f"folded {PAIR[0]}" for row in rows):
        lines += [f"## {PAIR[0]} without weight standardization, {PAIR[1]} without norms", ""]
        lines += [*against_each_other(rows), ""]
    failed = [row for row in rows if row.status != "ok"]
    if failed:
        lines += ["## Not timed", ""]
        lines += [f"- {r.network}, batch {r.batch}, {r.form} in {r.runtime}: {r.status}: {r.reason}" for r in failed]
        lines += [""]
    lines += ["## Verdict", "", *verdicts(rows, found), ""]
    return "\n".join(lines)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    names = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--models", type=names, default=[*FOLDABLE, *OURS_ALONE])
    parser.add_argument("--batch", type=numbers, default=[1, 8])
    parser.add_argument("--compile-batch", type=numbers, default=[1], help="compiling takes longest of all")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--runtime", type=names, default=names("eager,fuse,compile,torchscript,onnxruntime,openvino"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--starts", type=int, default=3, help="how often every process is started anew")
    parser.add_argument("--rounds", type=int, default=7, help="of each start")
    parser.add_argument("--seconds", type=float, default=0.7, help="of each contender, all rounds of a start together")
    parser.add_argument("-o", "--output", type=Path, help="Markdown file")
    parser.add_argument("--plot", type=Path, help="picture")
    parser.add_argument("--json", type=Path, help="all rows, with every run")
    args = parser.parse_args()
    args.command = " ".join(["python", "tests/lab/benchmarks/runtimes.py", *sys.argv[1:]])
    return args


def main() -> None:
    args = parsed()
    timing.check_device(args.device)
    start = time.perf_counter()

    def say(what: str) -> None:
        print(f"{time.perf_counter() - start:6.0f} s  {what}", file=sys.stderr)

    settings = Settings(args.device, args.dtype, args.channels_last, args.threads)
    before = timing.machine(settings)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(args, Path(folder), say)
    text = report(args, rows, before, timing.machine(settings), time.perf_counter() - start)
    print(text)
    if args.output:
        args.output.write_text(text)
    if args.plot:
        timing_plot.plot([row for row in rows if row.form in ("original", "folded")], args.plot)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
