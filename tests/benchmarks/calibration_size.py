"""Time and peak memory of `nf --mean fit` on a large network, at several numbers of images: memory must not grow.

    python tests/benchmarks/calibration_size.py [ARCH] [--size 160] [--samples 64 256 1024] [--scheme nf] [--batch 16]

Lived-in random weights (tests/lived.py) and 1/f noise; each number of images in a process of its own.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import timm
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from lived import lived_in

import normswap
from normswap.schemes.parts.steady_signs import pink


def measure(arch: str, scheme: str, size: int, samples: int, batch: int) -> None:
    """One conversion in this process."""
    torch.manual_seed(0)
    chans = 3
    model = lived_in(timm.create_model(arch, num_classes=1000), pink(4, (chans, size, size), 0).double()).float()

    def batches() -> Iterator[Tensor]:
        for i in range(0, samples, batch):
            yield pink(min(batch, samples - i), (chans, size, size), i)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    start = time.perf_counter()
    done = normswap.convert(model, scheme, size=(chans, size, size), calibrate=batches)
    took = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    error = done.report.worst.relative_l2
    print(f"| {arch} | {scheme} | {size} px | {samples} | {took:.0f} s | {before:.0f} MiB | {peak:.0f} MiB | "
          f"{error:.2f} |", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", nargs="?", default="resnet50")
    parser.add_argument("--scheme", default="nf")
    parser.add_argument("--size", type=int, default=160)
    parser.add_argument("--samples", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        measure(given.arch, given.scheme, given.size, given.samples[0], given.batch)
        return
    print("| network | to | size | images | time | memory before | peak | relative L2 on noise |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for samples in given.samples:
        arguments = [given.arch, "--scheme", given.scheme, "--size", str(given.size), "--batch", str(given.batch)]
        subprocess.run([sys.executable, __file__, *arguments, "--samples", str(samples), "--here"], check=True)


if __name__ == "__main__":
    main()
