"""Where a runtime folds BatchNorm by itself, it runs of ours what it runs of timm's: fp32 cannot be slower there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from compiled_operators import Compared, compared
from lived import lived_in
from onnx_operators import operators_once  # noqa: F401 (a fixture)

NARROW: dict[str, Any] = {"channels": (8, 8, 16, 16)}


def compiled(arch: str, options: dict[str, Any], folder: Path) -> Iterator[Compared]:
    for package in ("onnxscript", "onnxruntime", "openvino"):
        pytest.importorskip(package)
    torch.manual_seed(0)
    model = lived_in(timm.create_model(arch, num_classes=5, **options), torch.randn(4, 3, 64, 64)).float()
    return compared(arch, model, folder, batch=1, side=64)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "options"), [("resnet18", NARROW), ("seresnet18", NARROW), ("mobilenetv2_035", {})])
def test_the_same(arch: str, options: dict[str, Any], tmp_path: Path) -> None:
    for runtime, peer, ours in compiled(arch, options, tmp_path):
        assert ours == peer, runtime
        assert any("conv" in operator.kind.lower() for operator in ours), runtime


@pytest.mark.slow
def test_fewer(tmp_path: Path) -> None:
    """Weights that a normalizer-free network standardizes and scales in each pass; OpenVINO does so beforehand, too."""
    least = {"onnxruntime": 5, "openvino": 0}
    for runtime, peer, ours in compiled("nf_resnet26", {}, tmp_path):
        assert not ours - peer, runtime
        assert (peer - ours).total() >= least[runtime], runtime
