"""Time and peak memory of `nf --mean fit` on a large network, at several numbers of images: memory must not grow.

    python tests/lab/benchmarks/calibration_size.py [ARCH] [--size 160] [--samples 64 1024] [--scheme nf] [--batch 16]

Lived-in random weights (tests/lived.py) and 1/f noise; each number of images in a process of its own. The conversion is
compared with one forward of the same images through the source, in the same process.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import circumstances
import timm
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from lived import lived_in

import normswap
from normswap.calibration.natural_noise import pink


def measure(arch: str, scheme: str, size: int, samples: int, batch: int) -> None:
    """One conversion in this process."""
    torch.manual_seed(0)
    chans = 3
    model = lived_in(timm.create_model(arch, num_classes=1000), pink(4, (chans, size, size), 0).double()).float()

    def batches() -> Iterator[Tensor]:
        for i in range(0, samples, batch):
            yield pink(min(batch, samples - i), (chans, size, size), i)

    before = peak()
    start, cpu = time.perf_counter(), time.process_time()
    done = normswap.convert(model, scheme, input_size=(chans, size, size), calibrate=batches)
    took, cpu, most = time.perf_counter() - start, time.process_time() - cpu, peak()
    model.eval()
    forward = forward_cpu = 0.0
    with torch.no_grad():
        for images in batches():
            start, start_cpu = time.perf_counter(), time.process_time()
            model(images)
            forward += time.perf_counter() - start
            forward_cpu += time.process_time() - start_cpu
    error = done.report.worst.relative_l2
    print(f"| {arch} | {scheme} | {size} px | {samples} | {took:.0f} s | {forward:.0f} s | {took / forward:.1f} | "
          f"{cpu / forward_cpu:.1f} | {before:.0f} MiB | {most:.0f} MiB | {error:.2f} |", flush=True)  # fmt: skip


def peak() -> float:
    """Of this process, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", nargs="?", default="resnet50")
    parser.add_argument("--scheme", default="nf")
    parser.add_argument("--size", type=int, default=160)
    parser.add_argument("--samples", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("-o", "--output", type=Path, help="write the table to this file")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        measure(given.arch, given.scheme, given.size, given.samples[0], given.batch)
        return
    samples = " ".join(map(str, given.samples))
    command = f"python tests/lab/benchmarks/calibration_size.py {given.arch} --size {given.size} --samples {samples}"
    lines = [
        f"# Calibrating a {given.arch}, measured",
        "",
        "Lived-in random weights on 1/f noise, which say nothing about accuracy. Forward: the same images once through",
        "the source. What is kept of the images is a covariance per layer, and files.",
        "",
        *circumstances.lines(command, "cpu"),
        "| network | to | size | images | time | forward | ratio | ratio of CPU times | before | peak | relative L2 |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for count in given.samples:
        arguments = [given.arch, "--scheme", given.scheme, "--size", str(given.size), "--batch", str(given.batch)]
        run = [sys.executable, __file__, *arguments, "--samples", str(count), "--here"]
        lines.append(subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip())
        print(lines[-1], flush=True)
    if given.output:
        given.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
