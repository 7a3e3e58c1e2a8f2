"""Accuracy before and after the approximate conversions, on the trained networks, with no gradient step.

    python tests/benchmarks/schemes_table.py [--test DIR] [--train DIR] [--networks NAME ...] > FILE.md

1000 unlabelled training images to calibrate on where the row says so, all 10,000 test images, relative L2 at the
logits.
"gamma, beta copied" is what replacing the modules does: a GroupNorm with the BatchNorm's own gamma and beta.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import normswap
from normswap import affine, conversion, persample
from normswap.checkpoint import open_model
from normswap.data import make_loader

SHARED = Path(__file__).resolve().parents[3] / "shared"
NETWORKS = {
    "resnet18_narrow": SHARED / "checkpoints" / "resnet18_narrow",
    "resnetv2_18_narrow": SHARED / "checkpoints" / "resnetv2_18_narrow",
    "demo": Path(normswap.__file__).parent / "demo_data",
}
ROWS: tuple[tuple[str, dict[str, Any], bool], ...] = (
    ("groupnorm", {"steady": 0}, False),
    ("groupnorm", {}, False),
    ("groupnorm", {"groups": 4}, False),
    ("groupnorm", {}, True),
    ("instancenorm", {}, False),
    ("nf", {"mean": "keep"}, False),
    ("nf", {}, True),
    ("nf", {"stem": "keep"}, True),
)


def copied(model: nn.Module) -> nn.Module:
    """The naive way: a GroupNorm of one group, with the BatchNorm's gamma and beta."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for path, norm in [*model.named_modules()]:
            if affine.is_batchnorm(norm):
                parent, _, name = path.rpartition(".")
                new = persample.GroupNorm.replacing(norm, like=torch.empty(0), groups=1, copied=True)
                setattr(model.get_submodule(parent), name, new)
    return model.eval()


@torch.inference_mode()
def logits(model: nn.Module, batches: list[Tensor]) -> Tensor:
    return torch.cat([model(batch) for batch in batches])


def row(name: str, how: str, data: str, reference: Tensor, found: Tensor, labels: Tensor, seconds: float) -> None:
    before, after = (100 * float((x.argmax(1) == labels).double().mean()) for x in (reference, found))
    error = float((found - reference).double().norm() / reference.double().norm())
    print(f"| `{name}` | {how} | {data} | {error:.1e} | {before:.2f} | {after:.2f} | {100 * after / before:.1f} % | "
          f"{seconds:.0f} |", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--test", default=str(SHARED / "data" / "cifar10" / "test.tar.xz"))
    parser.add_argument("--train", default=str(SHARED / "data" / "cifar10" / "train.tar.xz"))
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    given = parser.parse_args()
    print("| network | to | calibration | relative L2 | top-1 before | after | kept | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for name in given.networks:
        source = open_model(str(NETWORKS[name]))
        test = list(make_loader(source, given.test, batch_size=250, workers=1))
        images, labels = [x for x, _ in test], torch.cat([y for _, y in test])
        train = [x for x, _ in make_loader(source, given.train, batch_size=100, workers=1, samples=1000, seed=0)]
        reference = logits(source, images)
        row(name, "gamma, beta copied", "none", reference, logits(copied(source), images), labels, 0)
        for scheme, options, fitted in ROWS:
            start = time.perf_counter()
            result = conversion.convert(source, scheme, calibrate=train if fitted else None, **options).model
            took = time.perf_counter() - start
            how = " ".join([f"`{scheme}`", *(f"`--{key} {value}`" for key, value in options.items())])
            data = "1000 images" if fitted else "none"
            row(name, how, data, reference, logits(result, images), labels, took)


if __name__ == "__main__":
    main()
