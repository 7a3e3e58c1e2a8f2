"""THE table: every scheme x every architecture keeps the function, in float64, on networks that
look trained.

The laws that every row obeys are in test_every_scheme.py, on small networks; where alpha starts, in
test_branch_scale.py.
"""

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import timm
import torch
from support.lived_in_networks import batchnorms, distance, lived_in, run, swapped
from support.sampled_tables import crossed
from support.scheme_rows import EXACT, ROWS, Row
from torch import Tensor, nn

from normswap import schemes

ARCHITECTURES = (
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet50d",
    "resnet26t",
    "resnext50_32x4d",
    "wide_resnet50_2",
    "seresnet50",
    "ecaresnet50t",
    "resnetaa50",
    "resnetblur50",
    "resnetrs50",
    "resnetv2_18",
    "resnetv2_34",
    "resnetv2_50",
    "resnetv2_50d",
    "regnetx_002",
    "regnety_002",
    "seresnext26t_32x4d",
    "efficientnet_b0",
    "mobilenetv3_small_050",
)
BASIC = (64, 32, 64, 128)
BOTTLENECK = (16, 32, 64, 128)  # channels: the stem's 64 go on without a downsample, or not
SIZES = (64, 97)
TOLERANCE = 1e-10


@dataclass
class Lived:
    """A lived-in network with what it computes."""

    model: nn.Module
    inputs: list[Tensor]
    features: list[Tensor]
    logits: list[Tensor]


def features_and_logits(
    model: nn.Module, inputs: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs of `forward_features` (as they pass by in `forward`), and of `forward`."""
    net: Any = model
    features: list[Tensor] = []
    inner = net.forward_features

    def spy(x: Tensor) -> Tensor:
        features.append(inner(x))
        return features[-1].clone()

    net.forward_features = spy
    try:
        logits = [run(model, x) for x in inputs]
    finally:
        del net.forward_features
    return features, logits


@functools.lru_cache(1)
def lived(arch: str) -> Lived:
    """A network that can tell: the input moves the output, no branch is dead, gammas of every kind
    are there.
    """
    generator = torch.Generator().manual_seed(0)

    def noise(size: int) -> Tensor:
        return torch.randn(2, 3, size, size, generator=generator, dtype=torch.float64)

    torch.manual_seed(0)
    narrow = (
        {"channels": BASIC if arch.endswith(("18", "34")) else BOTTLENECK}
        if "resne" in arch
        else {}
    )
    model = lived_in(timm.create_model(arch, num_classes=10, **narrow), noise(64))
    inputs = [noise(size) for size in SIZES]
    features, logits = features_and_logits(model, inputs)
    assert all(distance(values, values.flip(0)) > 0.01 for values in logits)
    for path in batchnorms(model):
        gamma = model.get_submodule(path).get_parameter("weight")
        assert bool((gamma < 0).any())
        assert bool((gamma == 0).any())
        assert bool((gamma > 0).any())
    return Lived(model, inputs, features, logits)


@crossed("arch, row", ARCHITECTURES, EXACT)
@pytest.mark.one_in(4)
def test_exact_on_every_architecture(arch: str, row: Row) -> None:
    trained = lived(arch)
    result = swapped(trained.model, row.scheme, **row.options)
    assert batchnorms(trained.model)
    assert batchnorms(result) == (batchnorms(trained.model) if row.norms else [])
    assert type(result) is type(trained.model)
    features, logits = features_and_logits(result, trained.inputs)
    for found, expected in zip(
        [*features, *logits], [*trained.features, *trained.logits], strict=True
    ):
        assert distance(expected, found) <= TOLERANCE


def test_every_scheme_has_a_row() -> None:
    """An exact one, but for the norms with statistics per sample."""
    assert {row.scheme for row in ROWS} == set(schemes.names()) - {
        "rmsnorm"
    }  # has a table of its own: test_rmsnorm.py
    assert {row.scheme for row in ROWS} - {row.scheme for row in EXACT} == {
        "groupnorm",
        "layernorm",
        "instancenorm",
        "dyt",
    }


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_rows_say_what_the_scheme_says(row: Row) -> None:
    assert (
        schemes.get(row.scheme).is_exact(schemes.chosen(row.scheme, row.options).options)
        is row.exact
    )


@pytest.mark.parametrize("harm", ["eps", "one gamma", "one channel", "mean", "alpha"])
def test_the_table_notices_harm(harm: str) -> None:
    """The checker of this file fails on known-bad results."""
    own = lived("resnet18")
    broken = swapped(own.model, "skipinit")
    net: Any = broken.layer3[0]

    source: Any = own.model.layer3[0]
    with torch.no_grad():
        if harm == "eps":
            ratio = ((source.bn1.running_var + 1e-5) / (source.bn1.running_var + 1.001e-5)).sqrt()
            net.conv1.weight *= ratio.view(-1, 1, 1, 1)
        elif harm == "one gamma":
            net.conv1.weight[7] /= source.bn1.weight[7]
        elif harm == "one channel":
            net.conv2.weight[7] *= 1.01
        elif harm == "mean":
            net.conv2.bias += 1e-6
        else:
            net.bn2.alpha *= 1.01

    features, logits = features_and_logits(broken, own.inputs)
    assert all(distance(a, b) > TOLERANCE for a, b in zip(own.features, features, strict=True))
    assert all(distance(a, b) > TOLERANCE for a, b in zip(own.logits, logits, strict=True))
