"""A fast sample of the walk through other libraries (tests/lab/coverage/wild.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from crossed import sampled

sys.path.insert(0, str(Path(__file__).parents[1] / "lab" / "coverage"))

import libraries
import wild

import normswap
from normswap.models import calling

SAMPLE = (
    "torchvision:shufflenet_v2_x0_5", "torchvision:regnet_y_400mf",
    "torchvision:lraspp_mobilenet_v3_large", "torchvision:ssdlite320_mobilenet_v3_large",
    "torchvision:fasterrcnn_mobilenet_v3_large_320_fpn", "smp:Unet:mobilenet_v2", "smp:FPN:resnet18",
    "transformers:ResNet", "transformers:RegNet", "transformers:MobileNetV2",
    "transformers:MobileViTV2", "transformers:DPT", "monai:UNet 3-D", "monai:VNet",
)  # fmt: skip
LIBRARIES = {"smp": "segmentation_models_pytorch"}
pytestmark = pytest.mark.filterwarnings("ignore")


def need(name: str) -> None:
    library = name.split(":")[0]
    pytest.importorskip(LIBRARIES.get(library, library))


@pytest.mark.parametrize("name", sampled(SAMPLE, every=2))
def test_fold(name: str) -> None:
    need(name)
    row = wild.check(name)
    assert row["status"] == "exact", row
    assert row["approximate"]["status"] == "runs", row


@pytest.mark.parametrize("name", ["torchvision:ssdlite320_mobilenet_v3_large", "transformers:MobileNetV2"])
def test_in_one_line(name: str) -> None:
    """As a user calls it: lists of images in and detections out, keywords in and a Hugging Face output out."""
    need(name)
    torch.manual_seed(0)
    model, given = libraries.build(name)
    (example,) = [one.like(model.double()) for one in calling.batches(given)]
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
