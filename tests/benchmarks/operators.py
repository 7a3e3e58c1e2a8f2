"""What the runtimes run of timm's network and of ours: operators after their own optimization, counted, not timed.

    python tests/benchmarks/operators.py -o tests/benchmarks/operators.md

A runtime folds BatchNorm by itself where it follows a convolution. If what it then runs is the same, operator by
operator and shape by shape, the folded network is as fast there, whatever a clock says in a noisy hour. Networks, files
and batches are those of `runtimes.py`; the files of timm's are torch's own exports. Eager mode, torch.fx and
torch.compile give no such graph. Three minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import circumstances
import onnxruntime
import openvino
import runtimes
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parent.parent))
from compiled_operators import COMPILED

from normswap.benchmarking.forms import Making, of_model
from normswap.benchmarking.runtimes import Settings
from normswap.exporting import exporter, sidecar

MODELS = (*runtimes.FOLDABLE, "mobilenetv2_100", *runtimes.OURS_ALONE)


@dataclass(frozen=True)
class Row:
    network: str
    batch: int
    runtime: str
    peer: Counter[str]
    ours: Counter[str]

    @property
    def verdict(self) -> str:
        """`same`, `fewer` (ours has none that the peer lacks) or `other`."""
        return "same" if self.peer == self.ours else "fewer" if not self.ours - self.peer else "other"

    def line(self) -> str:
        counts = f"{self.peer.total()} | {self.ours.total()} | {self.verdict}"
        alone = f"{by_kind(self.peer - self.ours)} | {by_kind(self.ours - self.peer)}"
        return f"| {self.network} | {self.batch} | {self.runtime} | {counts} | {alone} |"


def by_kind(found: Counter[str]) -> str:
    """`36 Mul, 2 Conv`: what an operator's description begins with."""
    kinds: Counter[str] = Counter()
    for described, count in found.items():
        kinds[described.split()[0]] += count
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())


def rows(name: str, batch: int, folder: Path) -> Iterator[Row]:
    making = Making(folder / name / str(batch), Settings(), [batch], exporter.export, sidecar.read)
    group = of_model(name, runtimes.alive(name, 224), making, 224)
    for runtime, (kind, operators) in COMPILED.items():
        peer, ours = (operators(group.forms[which].make[kind]()) for which in (0, -1))
        yield Row(name, batch, runtime, peer, ours)


def report(found: list[Row]) -> str:
    given = circumstances.lines(" ".join(["python", "tests/benchmarks/operators.py", *sys.argv[1:]]), "cpu")
    count = Counter(row.verdict for row in found)
    lines = [
        "# What the runtimes run: operators of timm's network and of the folded one, after optimization",
        "",
        *given,
    ]
    lines += [f"onnxruntime {onnxruntime.__version__}, openvino {openvino.__version__.partition('-')[0]}.", ""]
    lines += ["| network | batch | runtime | timm's | ours | ours has | timm's alone | ours alone |", "|---" * 8 + "|"]
    lines += [row.line() for row in found]
    lines += ["", f"- the same operators on the same shapes: {count['same']} of {len(found)}"]
    lines += [f"- fewer, and none that timm's lacks: {count['fewer']}", f"- others: {count['other']}", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=MODELS)
    parser.add_argument("-o", "--output", type=Path, help="Markdown file")
    args = parser.parse_args()
    found: list[Row] = []
    cases = [(name, batch) for name in args.models for batch in (1, 8)]
    with tempfile.TemporaryDirectory() as folder:
        for name, batch in track(cases, transient=True):
            found += rows(name, batch, Path(folder))
    print(report(found))
    if args.output:
        args.output.write_text(report(found))


if __name__ == "__main__":
    main()
