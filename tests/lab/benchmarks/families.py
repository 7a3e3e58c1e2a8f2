"""What the approximate conversions keep beyond ResNets: relative L2 at the logits and same argmax, before any training.

    python tests/lab/benchmarks/families.py [ARCH ...] [--size 64] [--samples 256] [--fit] > families.md

There are no trained checkpoints of these here: lived-in random weights (tests/lived.py) on 1/f noise, whose logits
differ little between images, so that the argmax is a hard test. SkipInit is exact, its row is there to compare.
`--fit` adds the rows calibrated on other noise.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import timm
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from lived import lived_in, run

import normswap
from normswap.calibration.natural_noise import pink

ARCHS = ("regnetx_002", "resnext26ts", "seresnext26t_32x4d", "efficientnet_b0", "mobilenetv3_small_050")
WAYS: tuple[tuple[str, dict[str, Any], bool], ...] = (
    ("skipinit", {}, False),
    ("nf", {"mean": "keep"}, False),
    ("groupnorm", {"steady": 0}, False),
    ("groupnorm", {}, False),
    ("groupnorm", {}, True),
    ("nf", {}, True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archs", nargs="*", default=ARCHS)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--fit", action="store_true")
    given = parser.parse_args()
    size = (3, given.size, given.size)
    print(f"torch {torch.__version__}, CPU, {given.size} px, {given.samples} images\n")
    print("| network | to | calibration | relative L2 | same argmax | seconds |\n|---|---|---|---|---|---|")
    for arch in given.archs:
        torch.manual_seed(0)
        model = lived_in(timm.create_model(arch, num_classes=10), pink(32, size, 1000).double()).float()
        x = pink(given.samples, size, 2000)
        reference = run(model, x)
        for scheme, options, fitted in WAYS:
            if fitted and not given.fit:
                continue
            data = list(pink(given.samples, size, 3000).split(32)) if fitted else None
            start = time.perf_counter()
            result = normswap.convert(model, scheme, input_size=size, calibrate=data, **options).model
            took = time.perf_counter() - start
            found = run(result, x)
            error = float((found - reference).double().norm() / (reference - reference.mean(0)).double().norm())
            same = 100 * float((found.argmax(1) == reference.argmax(1)).double().mean())
            how = " ".join([scheme, *(f"--{key} {value}" for key, value in options.items())])
            noise = f"{given.samples} images of noise" if fitted else "none"
            print(f"| `{arch}` | `{how}` | {noise} | {error:.1e} | {same:.1f} % | {took:.0f} |", flush=True)


if __name__ == "__main__":
    main()
