"""Accuracy after pruning, averaging and rounding, before and after `recalibrate`; and by torch's own tool.

    PYTHONPATH=tests python tests/lab/benchmarks/recalibrate_pruned.py > FILE.md

Pruned: the smallest weights of each convolution are set to 0 (torch's `l1_unstructured`), without training. Averaged:
the weights of two short trainings of the network (SGD, 0.05, 6000 images, other seeds). Rounded: weights to so many
bits, one step per tensor. Statistics from 1000 unlabelled training images in batches of 100; top-1 on CIFAR-10 test
images.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from recalibrate import accuracy
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim.swa_utils import update_bn
from trained_networks import NETWORKS, SHARED
from unpacked import unpacked

import normswap
from normswap.images.datasets import make_loader
from normswap.storage.checkpoint import open_model
from normswap.surgery.recalibration import recalibrate

SHARES, BITS = (0.3, 0.5, 0.7), (6, 5, 4)
DATA = SHARED / "data" / "cifar10"
TRAIN, TEST = (str(unpacked(DATA / f"{part}.tar.xz")) for part in ("train", "test"))


@dataclass(frozen=True)
class Changed:
    """A network after a change, those that it was before, and what a peer makes of it."""

    label: str
    sources: tuple[nn.Module, ...]
    network: nn.Module
    peer: Callable[[], nn.Module] | None = None

    @property
    def has_norms(self) -> bool:
        return any(isinstance(module, nn.BatchNorm2d) for module in self.network.modules())


def layers(model: nn.Module) -> Iterator[nn.Conv2d | nn.Linear]:
    return (module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear))


def pruned(model: nn.Module, share: float) -> nn.Module:
    other = copy.deepcopy(model)
    for module in other.modules():
        if isinstance(module, nn.Conv2d):
            prune.l1_unstructured(module, "weight", amount=share)
            prune.remove(module, "weight")
    return other


@torch.no_grad()
def rounded(model: nn.Module, bits: int) -> nn.Module:
    other = copy.deepcopy(model)
    for layer in layers(other):
        step = layer.weight.abs().max() / (2 ** (bits - 1) - 1)
        layer.weight.copy_((layer.weight / step).round() * step)
    return other


@torch.no_grad()
def averaged(one: nn.Module, two: nn.Module) -> nn.Module:
    """Parameters alone, as averages of weights are made; buffers are those of the first."""
    other = copy.deepcopy(one)
    for mean, first, second in zip(other.parameters(), one.parameters(), two.parameters(), strict=True):
        mean.copy_((first + second) / 2)
    return other


def trained(model: nn.Module, seed: int) -> nn.Module:
    other = copy.deepcopy(model).train()
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    batches = make_loader(model, TRAIN, batch_size=100, workers=1, samples=6000, seed=seed)
    pairs = list(batches)
    images, labels = (torch.cat([pair[i] for pair in pairs]) for i in (0, 1))
    for chosen in torch.randperm(len(images)).split(100):
        optimizer.zero_grad()
        x = images[chosen]
        F.cross_entropy(other(x.flip(3) if torch.rand(()) < 0.5 else x), labels[chosen]).backward()
        optimizer.step()
    return other.eval()


def top1(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    return accuracy(model.eval(), batches, lambda x: x)


def by_torch(model: nn.Module, images: list[Tensor]) -> nn.Module:
    other = copy.deepcopy(model)
    update_bn(images, other)
    return other


def zeros(model: nn.Module) -> int:
    return sum(int((layer.weight == 0).sum()) for layer in layers(model))


def changes(model: nn.Module, images: list[Tensor]) -> Iterator[Changed]:
    for share in SHARES:
        sparse = pruned(model, share)
        yield Changed(f"pruned {share:.0%}", (model,), sparse, lambda sparse=sparse: by_torch(sparse, images))
    one, two = (trained(model, seed) for seed in (0, 1))
    mean = averaged(one, two)
    yield Changed("average of two trainings", (one, two), mean, lambda: by_torch(mean, images))
    free = {scheme: normswap.convert(model, scheme).model for scheme in ("folded", "skipinit")}
    for scheme, share in (("folded", 0.3), ("folded", 0.5), ("folded", 0.7), ("skipinit", 0.5)):
        yield Changed(f"`{scheme}`, pruned {share:.0%}", (free[scheme],), pruned(free[scheme], share))
    pair = [normswap.convert(network, "folded").model for network in (one, two)]
    yield Changed("`folded`, average of two trainings", tuple(pair), averaged(*pair))
    for bits in BITS:
        yield Changed(f"`folded`, rounded to {bits} bits", (free["folded"],), rounded(free["folded"], bits))


def row(name: str, change: Changed, images: list[Tensor], test: list[tuple[Tensor, Tensor]]) -> str:
    values = [sum(top1(source, test) for source in change.sources) / len(change.sources), top1(change.network, test)]
    if change.has_norms:
        mended, means = recalibrate(change.network, images).model, None
    else:
        mended = recalibrate(change.network, images, against=change.sources).model
        means = recalibrate(change.network, images, against=change.sources, means_only=True).model
    cells = [f"{value:.1f}" for value in (*values, top1(mended, test))]
    cells += [f"{top1(other, test):.1f}" if other else "-" for other in (means, change.peer and change.peer())]
    kept = "yes" if zeros(mended) == zeros(change.network) else "no"
    return f"| `{name}` | {change.label} | {' | '.join(cells)} | {kept} |"


def main() -> None:
    print(
        "| network | change | top-1 before | changed | recalibrated | means alone | torch's `update_bn` | zeros kept |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in ("resnet18_narrow", "resnetv2_18_narrow"):
        model = open_model(str(NETWORKS[name]))
        test = list(make_loader(model, TEST, batch_size=100, workers=1, samples=2000))
        train = [x for x, _ in make_loader(model, TRAIN, batch_size=100, workers=1, samples=1000)]
        for change in changes(model, train):
            print(row(name, change, train, test), flush=True)


if __name__ == "__main__":
    main()
