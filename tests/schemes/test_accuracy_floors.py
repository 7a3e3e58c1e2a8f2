"""What the approximate conversions must keep of the trained networks' accuracy, with no gradient
step.

    pytest -m slow tests/schemes/test_accuracy_floors.py -s

Needs `../shared` (images and checkpoints); all figures: tests/lab/benchmarks/schemes.md.
"""

from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from support import needs
from support.cifar_tars import unpacked
from support.sampled_tables import weight
from support.trained_networks import IMAGES, NETWORKS, SHARED, logits

import normswap
from normswap.images import datasets
from normswap.storage.checkpoint import open_model

TRAIN: Path = unpacked(SHARED / "data" / "cifar10" / "train.tar.xz")
# A scheme, its options, whether it is fitted, and the floor of each network.
Floor: TypeAlias = tuple[str, dict[str, Any], bool, dict[str, float]]
FLOORS: tuple[Floor, ...] = (
    ("groupnorm", {}, False, {"resnet18_narrow": 98, "resnetv2_18_narrow": 98, "demo": 99}),
    (
        "groupnorm",
        {"groups": 4},
        False,
        {"resnet18_narrow": 91, "resnetv2_18_narrow": 90, "demo": 97},
    ),
    ("groupnorm", {"groups": 4, "relative_eps": 1}, False, {"resnetv2_18_narrow": 91}),
    ("groupnorm", {}, True, {"resnet18_narrow": 99, "resnetv2_18_narrow": 99, "demo": 99}),
    ("dyt", {}, False, {"resnet18_narrow": 98, "resnetv2_18_narrow": 98, "demo": 96}),
    ("dyt", {}, True, {"resnet18_narrow": 99, "resnetv2_18_narrow": 99, "demo": 99}),
    ("nf", {}, True, {"resnet18_narrow": 99, "resnetv2_18_narrow": 99, "demo": 99}),
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs("shared files", IMAGES.is_file(), str(IMAGES)),
]


# The rows of which one network is slow; the others are long.
SLOW_ROWS = tuple(row for row in FLOORS if row[0] == "nf" or (row[0] == "groupnorm" and not row[1]))


def marks_of(network: str, row: Floor) -> list[pytest.MarkDecorator]:
    """Of the networks of some rows one is slow, by its name; all others are long."""
    others = set(row[3]) - {"demo"}
    slow = min(others, key=lambda name: weight(name, str(row[:3])))
    return [] if row in SLOW_ROWS and network == slow else [pytest.mark.long]


@pytest.mark.parametrize(
    ("network", "scheme", "options", "fitted", "floor"),
    [
        pytest.param(network, *row[:3], floor, marks=marks_of(network, row))
        for row in FLOORS
        for network, floor in row[3].items()
    ],
)
def test_floor(
    network: str, scheme: str, options: dict[str, Any], fitted: bool, floor: float
) -> None:
    """`floor`: percent of the source's top-1 on all 10,000 test images."""
    needs.need("shared files", NETWORKS[network].is_dir(), str(NETWORKS[network]))
    source = open_model(str(NETWORKS[network]))
    loader = (
        datasets.make_loader(source, str(TRAIN), batch_size=100, workers=1, samples=1000, seed=0)
        if fitted
        else None
    )
    result = normswap.convert(source, scheme, calibrate=loader, **options).model
    (before, after), labels = logits(
        [source, result], datasets.make_loader(source, str(IMAGES), batch_size=250, workers=2)
    )

    assert len(labels) == 10_000

    right, kept = (torch.eq(x.argmax(1), labels).sum().item() for x in (before, after))
    print(
        f"\n{network} {scheme} {options}: {right / 100:.2f} -> {kept / 100:.2f},"
        f" {100 * kept / right:.1f} % kept"
    )

    assert 100 * kept / right >= floor
