"""Where a runtime folds BatchNorm by itself, it runs of ours what it runs of timm's: fp32 cannot be slower there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from compiled_operators import COMPILED
from lived import lived_in
from onnx_operators import operators_once  # noqa: F401 (a fixture)

from normswap.benchmarking.forms import Form, Making, of_model
from normswap.benchmarking.runtimes import Settings
from normswap.exporting import exporter, sidecar

NARROW: dict[str, Any] = {"channels": (8, 8, 16, 16)}


def files(arch: str, options: dict[str, Any], folder: Path) -> tuple[Form, Form]:
    """timm's network, exported by torch, and the folded one, exported by us."""
    for package in ("onnxscript", "onnxruntime", "openvino"):
        pytest.importorskip(package)
    torch.manual_seed(0)
    model = lived_in(timm.create_model(arch, num_classes=5, **options), torch.randn(4, 3, 64, 64)).float()
    group = of_model(arch, model, Making(folder, Settings(), [1], exporter.export, sidecar.read), 64)
    return group.forms[0], group.forms[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "options"), [("resnet18", NARROW), ("seresnet18", NARROW), ("mobilenetv2_035", {})])
def test_the_same(arch: str, options: dict[str, Any], tmp_path: Path) -> None:
    peer, ours = files(arch, options, tmp_path)
    for runtime, (kind, operators) in COMPILED.items():
        found = operators(ours.make[kind]())
        assert found == operators(peer.make[kind]()), runtime
        assert any("onv" in operator for operator in found), runtime


@pytest.mark.slow
def test_fewer(tmp_path: Path) -> None:
    """Weights that a normalizer-free network standardizes and scales in each pass; OpenVINO does so beforehand, too."""
    peer, ours = files("nf_resnet26", {}, tmp_path)
    for runtime, least in {"onnxruntime": 5, "openvino": 0, "torchscript": 5}.items():
        kind, operators = COMPILED[runtime]
        theirs, own = operators(peer.make[kind]()), operators(ours.make[kind]())
        assert not own - theirs, runtime
        assert (theirs - own).total() >= least, runtime
