"""Accuracy after magnitude pruning, before and after new statistics: `recalibrate`, and torch's own `update_bn`.

    PYTHONPATH=tests python tests/lab/benchmarks/recalibrate_pruned.py [--images N] > FILE.md

The smallest weights of each convolution are set to 0 (torch's `l1_unstructured`), without training. Statistics from
1000 unlabelled training images in batches of 100; top-1 on CIFAR-10 test images.
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim.swa_utils import update_bn
from trained_networks import NETWORKS, SHARED

from normswap.images.datasets import make_loader
from normswap.storage.checkpoint import open_model
from normswap.surgery.recalibration import recalibrate

SHARES = (0.3, 0.5, 0.7)


def pruned(model: nn.Module, share: float) -> nn.Module:
    other = copy.deepcopy(model)
    for module in other.modules():
        if isinstance(module, nn.Conv2d):
            prune.l1_unstructured(module, "weight", amount=share)
            prune.remove(module, "weight")
    return other


@torch.inference_mode()
def top1(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    model.eval()
    hits = sum(int((model(x).argmax(1) == y).sum()) for x, y in batches)
    return 100 * hits / sum(len(y) for _, y in batches)


def by_torch(model: nn.Module, images: list[Tensor]) -> nn.Module:
    other = copy.deepcopy(model)
    update_bn(images, other)
    return other


def zeros(model: nn.Module) -> int:
    return sum(int((module.weight == 0).sum()) for module in model.modules() if isinstance(module, nn.Conv2d))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=2000)
    count = parser.parse_args().images
    data = SHARED / "data" / "cifar10"
    print("| network | pruned | top-1 as trained | pruned | recalibrated | `update_bn` | zeros kept |")
    print("|---|---|---|---|---|---|---|")
    for name in ("resnet18_narrow", "resnetv2_18_narrow"):
        model = open_model(str(NETWORKS[name]))
        test = list(make_loader(model, str(data / "test.tar.xz"), batch_size=100, workers=1, samples=count))
        train = [x for x, _ in make_loader(model, str(data / "train.tar.xz"), batch_size=100, workers=1, samples=1000)]
        whole = top1(model, test)
        for share in SHARES:
            sparse = pruned(model, share)
            ours = recalibrate(sparse, train).model
            values = [top1(one, test) for one in (sparse, ours, by_torch(sparse, train))]
            kept = "yes" if zeros(ours) == zeros(sparse) else "no"
            print(f"| `{name}` | {share:.0%} | {whole:.1f} | " + " | ".join(f"{one:.1f}" for one in values)
                  + f" | {kept} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
