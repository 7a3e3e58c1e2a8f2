"""Ultralytics' detectors, folded and exported: the boxes that ONNX Runtime gives are those of the network itself."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from lived import calm
from torch import Tensor, nn

import normswap
from normswap.errors import OptionError
from normswap.models.calling import named_tensors

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # its own
    pytest.mark.skipif(importlib.util.find_spec("ultralytics") is None, reason="ultralytics is not installed"),
]
SIZE = (3, 160, 160)


def detector(name: str) -> nn.Module:
    from ultralytics import YOLO

    torch.manual_seed(0)
    model: nn.Module = YOLO(f"{name}.yaml", verbose=False).model
    return calm(model, torch.rand(2, *SIZE, dtype=torch.float64)).float()


@pytest.mark.parametrize("name", ["yolov8n", "yolo11n", "yolo26n"])
def test_boxes(name: str, tmp_path: Path) -> None:
    model, x = detector(name), torch.rand(1, *SIZE, generator=torch.Generator().manual_seed(1))
    folded = normswap.convert(model, to="folded", inputs=x)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.model.modules())
    normswap.export(folded, tmp_path / "net.onnx", input_size=SIZE, images=[x])
    (found,) = onnxruntime.InferenceSession(tmp_path / "net.onnx").run(None, {"images": x.numpy()})
    own: Any = copy.deepcopy(model)
    fused = own.fuse(verbose=False)  # what Ultralytics folds itself
    for other in (model, fused):
        wanted: Tensor = other(x)[0].detach()
        off = (torch.from_numpy(found) - wanted).abs()
        assert wanted[:, :4].std(-1).min() > 10  # the boxes are not all alike
        assert off[:, :4].max() < 0.05  # pixels
        assert off[:, 4:].max() < 5e-4


def test_several_answers_all_go_into_the_file(tmp_path: Path) -> None:
    model = detector("yolov8n-seg")
    done = normswap.export(model, tmp_path / "net.onnx", input_size=SIZE)
    x = torch.rand(1, *SIZE, generator=torch.Generator().manual_seed(1))
    wanted = dict(named_tensors(model(x)))
    found = onnxruntime.InferenceSession(done.file).run(None, {"x": x.numpy()})
    assert len(found) == len(wanted) > 2
    for one, other in zip(found, wanted.values(), strict=True):
        assert float((torch.from_numpy(one) - other).norm() / other.norm()) < 1e-4
    with pytest.raises(OptionError, match="does not give one tensor: it gives a tuple"):
        normswap.export(model, tmp_path / "other.onnx", input_size=SIZE, softmax=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.onnx", "net.onnx.preprocess.json"]
