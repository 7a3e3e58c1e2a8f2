"""What the runtimes run of timm's network and of ours: operators after their own optimization, counted, not timed.

    python tests/lab/benchmarks/operators.py -o tests/lab/benchmarks/operators.md

A runtime folds BatchNorm by itself where it follows a convolution. If what it then runs is the same, operator by
operator and shape by shape, the folded network is as fast there, whatever a clock says in a noisy hour. The files
of timm's are torch's own exports. Eager mode, torch.fx and torch.compile give no such graph. Ten minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import circumstances
import onnxruntime
import openvino
import torch
from rich.progress import track
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from compiled_operators import Compared, Operator, compared

from normswap.analysis import block_signals
from normswap.calibration.natural_noise import pink
from normswap.graph import inspection
from normswap.layers import affine
from normswap.storage import checkpoint

MODELS = (
    "resnet18", "resnet50", "seresnet50", "resnext50_32x4d", "mobilenetv2_100",
    "resnetv2_50", "nf_resnet50", "eca_nfnet_l0", "dm_nfnet_f0",
)  # fmt: skip


def alive(name: str, side: int) -> nn.Module:
    """The network with random weights, gammas and betas, its statistics measured on noise, rough and smooth.

    The last gamma of each branch is small, as in trained networks: else rounding errors grow from block to block, and
    an exact copy could not be told from a wrong one.
    """
    torch.manual_seed(0)
    model = block_signals.awake(checkpoint.open_model(name, weights="random"))
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
            smooth = (torch.sigmoid(2 * pink(4, (3, side, side), 0)) - 0.5 * one) / (0.25 * one)
            model.train()(torch.cat([torch.randn(4, 3, side, side), smooth]))
    return model.eval()


@dataclass(frozen=True)
class Row:
    network: str
    batch: int
    found: Compared

    @property
    def verdict(self) -> str:
        """`same`, `fewer` (ours has none that the peer lacks) or `other`."""
        _, peer, ours = self.found
        return "same" if peer == ours else "fewer" if not ours - peer else "other"

    def line(self) -> str:
        runtime, peer, ours = self.found
        case = f"{self.network} | {self.batch} | {runtime} | {peer.total()} | {ours.total()}"
        return f"| {case} | {self.verdict} | {by_kind(peer - ours)} | {by_kind(ours - peer)} |"


def by_kind(found: Counter[Operator]) -> str:
    """`36 Mul, 2 Conv`."""
    kinds = Counter(operator.kind for operator in found.elements())
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())


def report(found: list[Row]) -> str:
    given = circumstances.lines(" ".join(["python", "tests/lab/benchmarks/operators.py", *sys.argv[1:]]), "cpu")
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
            place = Path(folder) / name / str(batch)
            found += [Row(name, batch, one) for one in compared(name, alive(name, 224), place, batch=batch, side=224)]
    print(report(found))
    if args.output:
        args.output.write_text(report(found))


if __name__ == "__main__":
    main()
