"""What baking saves: eval time of a timm NF network before and after `--to folded`, as a ratio.

    python tests/lab/benchmarks/norm_free.py [ARCH] [--size 160] [--batch 4] [--rounds 9]

The gains and biases are random. Source and result are timed in turn, the shortest of each counts.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import timm
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from lived import distance, run
from narrow_networks import STANDARDIZED, randomized

import normswap


def seconds(model: nn.Module, x: torch.Tensor) -> float:
    start = time.perf_counter()
    with torch.inference_mode():
        model(x)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arch", nargs="?", default="nf_resnet50")
    for name, default in (("size", 160), ("batch", 4), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(0)
    source = randomized(timm.create_model(args.arch, num_classes=1000)).float()
    done = normswap.convert(source, "folded", input_size=(3, args.size, args.size))
    left = sum(isinstance(module, STANDARDIZED) for module in done.model.modules())
    double = normswap.convert(source.double(), "folded", input_size=(3, args.size, args.size)).model
    x = torch.randn(args.batch, 3, args.size, args.size)
    error = distance(run(source, x.double()), run(double, x.double()))
    print(f"{args.arch}: {left} standardized convolutions left, relative L2 {error:.1e} in float64,", end=" ")
    print(f"{done.report.worst.relative_l2:.1e} in float32")
    source.float()
    rounds = [(seconds(source, x), seconds(done.model, x)) for _ in range(args.rounds)]
    before, after = (min(times) for times in zip(*rounds, strict=True))
    print(f"eval, batch {args.batch} at {args.size} px: {before:.3f} s -> {after:.3f} s, ratio {after / before:.2f}")


if __name__ == "__main__":
    main()
