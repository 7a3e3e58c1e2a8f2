"""Exports of timm's networks (`lived.calm`), and of the trained ones on real images, each file in a process of its own;
and the trained ones on all 10,000 test images. Up to two minutes each.

    pytest -m slow tests/exporting/test_exported_networks.py  # -m "slow and not long": a part, each row and column

Node counts beside a plain export, and the figures: tests/lab/benchmarks/export.py writes them as tables.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from alone import run_alone
from crossed import crossed
from lived import calm, distance, run
from torch import nn

import normswap
from normswap import demo_files
from normswap.images import datasets
from normswap.storage.checkpoint import open_model

SHARED = Path(__file__).resolve().parents[3] / "shared"
SHARED_NETWORKS = ("resnet18_narrow", "resnetv2_18_narrow")
TRAINED = {**{name: SHARED / "checkpoints" / name for name in SHARED_NETWORKS}, "demo": demo_files.FOLDER}
ENDINGS = {"onnx": "onnx", "openvino": "xml", "pt2": "pt2"}
DEEP = ("resnet18", "resnet50", "resnetv2_50", "seresnet50", "nf_resnet50", "resnext50_32x4d")
NFNETS = ("eca_nfnet_l0", "dm_nfnet_f0")
SIZE = (3, 64, 64)

pytestmark = pytest.mark.slow


def trained(name: str) -> nn.Module:
    if not TRAINED[name].is_dir():
        pytest.skip(f"the checkpoint is not there: {TRAINED[name]}")
    return open_model(str(TRAINED[name]))


@crossed("name, form", DEEP, ENDINGS, 3)
def test_a_deep_network_alone(name: str, form: str, tmp_path: Path) -> None:
    computes_the_same_alone(name, form, tmp_path)


def computes_the_same_alone(name: str, form: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, *SIZE)
    source = calm(timm.create_model(name), x).float()
    x = x[:4]
    expected = run(source, x)
    assert distance(expected.mean(0).expand_as(expected), expected) > 0.1  # the input moves the output
    file = tmp_path / f"net.{ENDINGS[form]}"
    done = normswap.export(source, file, input_size=SIZE)
    assert not [kind for kind in done.nodes if "norm" in kind.lower()]
    assert distance(expected, run_alone(file, form, x)) <= 1e-5


@crossed("name, form", TRAINED, ENDINGS, 3)
def test_a_trained_network_alone_on_real_images(name: str, form: str, tmp_path: Path) -> None:
    source = trained(name)
    x, _ = next(iter(datasets.make_loader(source, str(demo_files.FOLDER / "images.tar"), batch_size=32, workers=0)))
    file = tmp_path / f"net.{ENDINGS[form]}"
    done = normswap.export(source, file, dynamic_batch=True)
    assert not [kind for kind in done.nodes if "norm" in kind.lower()]
    expected, got = run(source, x), run_alone(file, form, x, batch=8)
    assert distance(expected, got) <= 1e-5
    assert torch.equal(expected.argmax(1), got.argmax(1))
