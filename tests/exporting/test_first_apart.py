"""A fault in one layer of a file, or of a converted network, is found by the path of the layer."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import normswap
from normswap.cli.app import main
from normswap.exporting import exported_file, exporter
from normswap.exporting.exported_file import ExportedFile
from normswap.graph import recording
from normswap.images.datasets import make_loader
from normswap.models.calling import Example
from normswap.storage import checkpoint
from normswap.surgery.departure import first_apart
from normswap.surgery.network import Network

LAYER = "layer2.1.conv1"
IMAGES = ("--data", "demo", "--samples", "40", "--workers", "0")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, padding=1)
        self.skip, self.last = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.last(self.branch(x).relu() + self.skip(x))


@pytest.mark.parametrize("fault", ["first", "branch", "skip", "last", ""])
def test_the_layer_is_named_though_some_values_are_not_in_the_file(fault: str) -> None:
    torch.manual_seed(0)
    network, example, values = Residual().eval(), Example((torch.randn(1, 3, 8, 8),)), dict[str, object]()
    other = copy.deepcopy(network)
    if fault:
        other.get_submodule(fault).weight.data.mul_(1.5)
    recording.record_once(other, example, lambda name, value: values.update({name: copy.deepcopy(value)}))
    # Runtimes fuse a convolution with the activation that follows.
    del values["branch"]
    found = first_apart(copy.deepcopy(network), example, values.values(), 1e-5)
    assert (found.site if found else "") == fault
    if found:
        assert found.kind == "Conv2d"
        assert found.relative_l2 > 0.1


def change(file: Path, before: np.ndarray, after: np.ndarray) -> None:
    content = file.read_bytes()
    assert content.count(before.tobytes()) == 1
    file.write_bytes(content.replace(before.tobytes(), after.tobytes()))


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "dtype", "fault"), [
    ("onnx", "fp32", "weight"), ("onnx", "fp32", "bias"), ("xml", "fp32", "weight"), ("onnx", "int8", "weight"),
])  # fmt: skip
def test_a_fault_in_a_file_is_found(ending: str, dtype: str, fault: str, tmp_path: Path) -> None:
    model = checkpoint.open_model("demo")
    images = [make_loader(model, "demo", samples=32, seed=seed, workers=0) for seed in (0, 1)]
    data = {"images": images[0], "calibrate": images[1]} if dtype == "int8" else {}
    file = tmp_path / f"a.{ending}"
    assert normswap.export(model, file, dtype=dtype, **data).figures.apart is None
    exported = ExportedFile.find(str(file))
    assert exported is not None
    before = exporter.fold_for_export(Network(model)).get_parameter(f"{LAYER}.{fault}").detach().numpy()
    if dtype == "int8":
        onnx = pytest.importorskip("onnx")
        scales = {tensor.name: tensor for tensor in onnx.load(file).graph.initializer}
        before = onnx.numpy_helper.to_array(scales[f"network.{LAYER}.{fault}_scale"])
    after = np.zeros_like(before) if fault == "bias" else np.float32(1.5) * before
    change(file.with_suffix(".bin") if ending == "xml" else file, before, after)
    found = exported_file.verify(exported, model, images[0]).apart
    assert found is not None
    assert (found.site, found.kind) == (LAYER, "Conv2d")
    assert main(["verify", str(file), "--against", "demo", *IMAGES]) == int(dtype == "fp32")
