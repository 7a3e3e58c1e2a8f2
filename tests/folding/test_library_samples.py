"""A fast sample of the walks over timm and other libraries (tests/lab/coverage)."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import needs
from support.lived_in_networks import batchnorms, distance, lived_in, run
from support.sampled_tables import sampled
from support.tiny_modules import C, bn, conv, net
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "lab" / "coverage"))

import libraries
import mutants
import network
import wild

import normswap
from normswap.models import calling

# `wild` needs it, and it has a file of the same name as one that other tests import.
sys.path.remove(str(Path(wild.__file__).resolve().parents[1] / "benchmarks"))

# How many norms fold back, fold forward, move their scale on, and stay as a scale and shift.
SAMPLE = {
    "test_resnet": (15, 0, 0, 0),
    "test_byobnet": (14, 0, 0, 0),
    "test_efficientnet": (13, 0, 0, 0),
    "regnety_002": (44, 0, 0, 0),
    "mobilenetv3_small_050": (34, 0, 0, 0),
    "tinynet_e": (31, 0, 0, 0),
    "ghostnet_050": (80, 0, 0, 0),
    "repvgg_a0": (44, 0, 0, 17),
    "levit_128s": (50, 0, 0, 2),
    "mobilevit_xxs": (32, 0, 0, 0),
    "cpubone_nano": (19, 0, 0, 0),
    "efficientvit_m0": (112, 0, 0, 1),
    "efficientvit_b0": (26, 0, 0, 0),
    "dla46_c": (48, 0, 0, 0),
    "ese_vovnet19b_slim_dw": (22, 0, 0, 0),
    "mixnet_s": (49, 0, 0, 0),
}


@pytest.mark.parametrize("arch", sampled(SAMPLE, every=3))
@pytest.mark.filterwarnings("default")
@pytest.mark.one_in(4)
def test_fold(arch: str) -> None:
    row = network.check(arch)
    assert row["status"] == "exact", row
    assert row["left"] == 0
    assert tuple(row.get(way, 0) for way in ("back", "forward", "moved", "affine")) == SAMPLE[arch]
    assert row["sensitivity"] > 1e-2
    assert row["fuse"]["status"] != "wrong"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "arch", ["test_resnet", "regnety_002", pytest.param("cpubone_nano", marks=pytest.mark.slow)]
)
def test_the_checker_notices_one_percent_of_one_channel(arch: str) -> None:
    row = mutants.check(arch)
    assert (row["detected"], row["missed"]) == (mutants.TRIALS, [])


OTHERS = (
    "torchvision:shufflenet_v2_x0_5",
    "torchvision:regnet_y_400mf",
    "torchvision:lraspp_mobilenet_v3_large",
    "torchvision:ssdlite320_mobilenet_v3_large",
    "torchvision:fasterrcnn_mobilenet_v3_large_320_fpn",
    "smp:Unet:mobilenet_v2",
    "smp:FPN:resnet18",
    "transformers:ResNet",
    "transformers:RegNet",
    "transformers:MobileNetV2",
    "transformers:MobileViTV2",
    "transformers:DPT",
    "monai:UNet 3-D",
    "monai:VNet",
)
LIBRARIES = {"smp": "segmentation_models_pytorch"}


def need(name: str) -> None:
    library = name.split(":")[0]
    needs.package(LIBRARIES.get(library, library))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sampled(OTHERS, every=3))
@pytest.mark.one_in(2)
def test_other_libraries_fold(name: str) -> None:
    need(name)
    row = wild.check(name)
    assert row["status"] == "exact", row
    assert row["approximate"]["status"] == "runs", row


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        "transformers:MobileNetV2",
        pytest.param("torchvision:ssdlite320_mobilenet_v3_large", marks=pytest.mark.slow),
    ],
)
def test_in_one_line(name: str) -> None:
    """One call of `convert`, for networks that take lists of images or keywords."""
    need(name)
    torch.manual_seed(0)
    model, given = libraries.build(name)
    (batch,) = calling.batches(given)
    example = batch.like(model.double())
    wild.live(model, example)
    done = normswap.convert(model, "folded", inputs=example)

    assert done.report.passed
    assert wild.norms(done.model) == []

    broken = torch.nn.Module.parameters(done.model)
    with torch.no_grad():
        next(broken).mul_(1.01)

    assert not normswap.verify(model, done.model, inputs=example).passed


def test_the_walk_notices_one_percent_of_one_channel() -> None:
    torch.manual_seed(0)
    model, given = libraries.build("torchvision:mobilenet_v3_small")
    example = calling.batches(given)[0].like(model.double())
    wild.live(model, example)
    reference = wild.run(model, example)
    with torch.no_grad():
        next(model.parameters())[0].mul_(1.01)
    assert wild.error(reference, wild.run(model, example)) > 1e-6


def _looks_at_values(m: Any, x: Tensor) -> Tensor:
    return m.bn(m.conv(x)) if float(x.sum()) < 1e9 else x


def test_a_scalar_behind_a_branch_that_looks_at_values() -> None:
    """The branch is kept and chained, so the norms inside it have other paths in the result."""
    torch.manual_seed(0)
    x = torch.randn(3, C, 7, 7, dtype=torch.float64)
    branch = net(_looks_at_values, conv=conv, bn=bn)
    model = lived_in(
        net(lambda m, x: ((y := m.conv(x)) + m.branch(y)).relu(), conv=conv, branch=branch)(), x
    )
    done = normswap.convert(model, "skipinit", inputs=x)
    assert batchnorms(done.model) == []
    assert str(done.outcomes["branch.bn"]) == "folds into branch.conv"
    assert distance(run(model, x), run(done.model, x)) < 1e-12
