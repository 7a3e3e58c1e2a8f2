"""Exports of timm's deep networks (`lived.calm`), each file in a process of its own; up to two
minutes each.

Node counts beside a plain export, and the figures: tests/lab/benchmarks/export.py writes them as
tables.
"""

from pathlib import Path

import pytest
import timm
import torch
from support.lived_in_networks import calm, distance, run
from support.runtime_process import run_alone
from support.sampled_tables import crossed

import normswap

ENDINGS = {"onnx": "onnx", "openvino": "xml", "pt2": "pt2"}
DEEP = ("resnet18", "resnet50", "resnetv2_50", "seresnet50", "nf_resnet50", "resnext50_32x4d")
SIZE = (3, 64, 64)

pytestmark = pytest.mark.slow


@crossed("name, form", DEEP, ENDINGS)
def test_a_deep_network_alone(name: str, form: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, *SIZE)
    source = calm(timm.create_model(name), x).float()
    x = x[:4]
    expected = run(source, x)

    assert (
        distance(expected.mean(0).expand_as(expected), expected) > 0.1
    )  # the input moves the output

    file = tmp_path / f"net.{ENDINGS[form]}"
    done = normswap.export(source, file, input_size=SIZE)
    assert not [kind for kind in done.nodes if "norm" in kind.lower()]
    assert distance(expected, run_alone(file, form, x)) <= 1e-5
