"""The weights that an int8 file holds, read off it, beside those that the correction of biases takes them for."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from crossed import quick
from onnx_operators import operators_once  # noqa: F401 (a fixture)
from torch import Tensor, fx, nn

import normswap
from normswap.exporting import formats, pt2, quantizing, sensitivity, weight_rounding
from normswap.exporting.equalization import AS_FOLDED, equalizations
from normswap.exporting.exported_module import FileContents, Shipped
from normswap.exporting.settings import Int8Settings, Quantization
from normswap.exporting.weight_grid import WeightGrid
from normswap.graph.node_reader import LINEAR
from normswap.layers.planned_layer import Linearity


def network(ending: str) -> nn.Sequential:
    """Plain, depthwise and grouped convolutions, one with two filters for each channel, and what goes up, but in pt2,
    where it stays in fp32."""
    torch.manual_seed(0)
    up = nn.Conv2d(24, 10, 1) if ending == "pt2" else nn.ConvTranspose2d(24, 10, 2)
    layers = [
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 12, 3, groups=4),
        nn.Conv2d(12, 12, 3, groups=2), nn.Conv2d(12, 24, 1, groups=12), up,
    ]  # fmt: skip
    body = [part for layer in layers for part in (layer, nn.ReLU())]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(10, 5)).eval()


def in_onnx(file: Path) -> list[Any]:
    graph = onnx.load(file).graph
    held = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    makers = {node.output[0]: node for node in graph.node}
    found = []
    for layer in (node for node in graph.node if node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul")):
        node = makers[layer.input[1]]
        values, step = (held[name].astype(float) for name in node.input[:2])
        shape = [1] * values.ndim
        shape[next((a.i for a in node.attribute if a.name == "axis"), 0)] = -1
        found.append(values * (step.reshape(shape) if step.size > 1 else step))
    return found


def in_openvino(file: Path) -> list[Any]:
    ov = pytest.importorskip("openvino")

    def value(node: Any) -> Any:
        kind = node.get_type_name()
        if kind == "Constant":
            return node.data.astype(float)
        read = [value(node.input_value(i).get_node()) for i in range(node.get_input_size())]
        if kind == "Reshape":
            return read[0].reshape([int(side) for side in read[1]])
        return {"Convert": lambda: read[0], "Multiply": lambda: read[0] * read[1]}[kind]()

    kinds = ("Convolution", "GroupConvolution", "ConvolutionBackpropData", "MatMul")
    ops = [op for op in ov.Core().read_model(file).get_ordered_ops() if op.get_type_name() in kinds]
    return [value(op.input_value(1).get_node()) for op in ops]


def in_pt2(file: Path) -> list[Any]:
    found: list[Any] = []

    class Reading(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            made = super().run_node(node)
            if "dequantize" in str(node.target) and node.args[0].op == "get_attr":  # type: ignore[union-attr]
                found.append(made.double().numpy())
            return made

    Reading(pt2.load(file).module()).run(torch.zeros(2, 3, 24, 24))
    return found


HELD = {"onnx": in_onnx, "xml": in_openvino, "pt2": in_pt2}


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("steps", quick([(7, True), (7, False), (8, True)], [(7, False)]), ids=str)
@pytest.mark.parametrize("ending", list(HELD))
def test_weights_are_rounded_as_the_file_does(
    ending: str, steps: tuple[int, bool], sharing: bool, tmp_path: Path
) -> None:
    """Also where the weights that are given share what is lost by rounding them."""
    bits, per_channel = steps
    if ending == "xml":
        pytest.importorskip("nncf")
    file, x = tmp_path / f"net.{ending}", torch.randn(16, 3, 24, 24)
    tool, model = formats.quantizer(formats.choose(file, None).NAME), network(ending)
    layers: list[Linearity] = [m for m in model.modules() if isinstance(m, tool.LAYERS)]  # type: ignore[misc]
    grid = WeightGrid(functools.partial(tool.levels, bits=bits), per_channel)
    if sharing:
        paths = [path for path, module in model.named_modules() if isinstance(module, LINEAR)]
        for path, one in weight_rounding.weights(model, [x], paths, grid).items():
            model.get_parameter(f"{path}.weight").data.copy_(one.given)
    contents = FileContents(Shipped(model), (x,), dynamic=True)
    tool.write_int8(contents, file, Quantization([x], Int8Settings(per_channel, bits)))
    held = HELD[ending](file)
    assert len(held) == len(layers) == 7
    for layer, values in zip(layers, held, strict=True):
        expected = grid.rounded(layer).double()
        found = torch.as_tensor(np.reshape(values, expected.shape))
        off = (found - expected).abs() > 1e-4 * expected.abs().amax() / 127
        rows: Tensor = off.transpose(0, 1) if isinstance(layer, nn.ConvTranspose2d) else off
        # the largest of a row may lie half-way between two integers, on either side
        assert int(rows.flatten(1).sum(1).max()) <= (bits == 7 and ending == "xml")


def test_an_export_holds_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under an equalization that is not that of the folded network."""
    found: list[dict[str, Any]] = []
    weights = weight_rounding.weights

    def watched(*args: Any) -> Any:
        found.append(weights(*args))
        return found[-1]

    monkeypatch.setattr(weight_rounding, "weights", watched)
    monkeypatch.setattr(quantizing, "_WORTH", 1e9)
    monkeypatch.setattr(
        quantizing, "equalizations", lambda *, per_channel: [AS_FOLDED, equalizations(per_channel=per_channel)[1]]
    )
    monkeypatch.setattr(sensitivity, "error", lambda *args: next(errors))
    errors = iter([1.0, 0.5])
    file, x = tmp_path / "net.pt2", torch.randn(16, 3, 24, 24)
    options = {"calibrate": x, "images": x, "input_size": (3, 24, 24), "dynamic_batch": True}
    done = normswap.export(network("pt2"), file, dtype="int8", **options)
    assert done.quantized is not None
    assert done.quantized.gauge == "weights"
    (only,) = found
    for one, values in zip(only.values(), in_pt2(file), strict=True):
        assert torch.allclose(one.held.double(), torch.as_tensor(values), rtol=1e-5)
    plain = [module.weight.detach() for module in network("pt2").modules() if isinstance(module, LINEAR)]
    assert any(float((one.held - weight).norm() / weight.norm()) > 0.05
               for one, weight in zip(only.values(), plain, strict=True))  # fmt: skip


class AsGiven:
    """Stands for an `Equalizer` whose networks are the equalizations themselves."""

    network = nn.Sequential(nn.Conv2d(3, 4, 1))

    def __init__(self, *given: Any, per_channel: bool) -> None:
        pass

    def equalized(self, equalization: Any) -> Any:
        return equalization

    def settle_(self, network: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("errors", "chosen"),
    [((1.0, 0.95, 0.97), "as folded"), ((1.0, 0.95, 0.5), "ranges"), ((1.0, 0.5, 0.7), "weights")],
    ids=["worth nothing", "ranges", "weights"],
)
def test_equalization_is_chosen_where_it_is_worth_it(
    errors: tuple[float, ...], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = dict(zip(equalizations(per_channel=True), errors, strict=True))
    monkeypatch.setattr(quantizing, "Equalizer", AsGiven)
    monkeypatch.setattr(sensitivity, "error", lambda network, x, layers, grid: tried[network])
    shipped: Any = SimpleNamespace(network=None, prepared=lambda x: x, around=lambda network: network)
    settings, tool = Int8Settings(per_channel=True), SimpleNamespace(LAYERS=(nn.Conv2d,))
    calibration: Any = SimpleNamespace(settings=settings, grid=None, fed=torch.zeros(2, 3, 4, 4), tool=tool)
    assert quantizing.Equalized.of(shipped, calibration).gauge == chosen
