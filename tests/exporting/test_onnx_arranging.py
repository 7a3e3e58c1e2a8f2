"""An arranged ONNX graph gives what it gave, by other nodes; in int8 ONNX Runtime computes all of it on bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from crossed import named, sampled
from onnx_operators import operators_once  # noqa: F401 (a fixture)
from torch import Tensor, nn

from normswap.errors import quiet
from normswap.exporting import onnx_arranging, onnx_file
from normswap.exporting.settings import Quantization


class Calls(nn.Module):
    """Two convolutions around what a case does."""

    def __init__(self, what: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.what, self.one, self.two = what, nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Any:
        return self.two(self.what(self.one(x)))


def stream(x: Tensor) -> Tensor:
    total = x + x.flip(1)
    return total + F.relu(total)


def pooled_twice(x: Tensor) -> Tensor:
    x = F.max_pool2d(x, 2)
    return x + F.relu(x)


KEPT: dict[str, int] = {}
CASES: list[tuple[str, Callable[[Tensor], Any], dict[str, int]]] = [
    ("a sum read with and without ReLU", stream, {"Add": 3, "Relu": 1}),
    ("a sum read by its ReLU only", lambda x: F.relu(x + x.flip(1)), KEPT),
    ("ReLU after padded max-pooling", lambda x: F.relu(F.max_pool2d(x, 3, 2, 1)), {"MaxPool": 1, "Relu": 1}),
    ("max-pooling that is read twice", pooled_twice, KEPT),
    ("average over windows side by side", lambda x: F.avg_pool2d(x, (2, 3)), {"AveragePool": 0, "Conv": 3}),
    ("average over windows that overlap", lambda x: F.avg_pool2d(x, 3, 2), KEPT),
    ("average with padding", lambda x: F.avg_pool2d(x, 2, 2, 1), KEPT),
    ("average over an edge", lambda x: F.avg_pool2d(x, 5, 5, ceil_mode=True, count_include_pad=False), KEPT),
    ("the mean over a map", lambda x: x.mean((2, 3), keepdim=True), {"GlobalAveragePool": 1, "ReduceMean": 0}),
    ("the mean over a map without its sides", lambda x: x.mean((2, 3))[:, :, None, None],
     {"GlobalAveragePool": 1, "ReduceMean": 0, "Reshape": 1}),
    ("the mean over rows", lambda x: x.mean(2, keepdim=True), KEPT),
    ("the mean over channels", lambda x: x - x.mean((1, 2), keepdim=True), KEPT),
]  # fmt: skip


def exported(network: nn.Module, x: Tensor) -> Any:
    with quiet(), torch.no_grad():
        program = torch.onnx.export(network.eval(), (x,), dynamo=True, verbose=False, input_names=["images"],
                                    dynamic_shapes=({0: torch.export.Dim("batch")},))  # fmt: skip
    assert program is not None
    return program.model_proto


def run(model: Any, x: Tensor) -> Tensor:
    return torch.from_numpy(ort.InferenceSession(model.SerializeToString()).run(None, {"images": x.numpy()})[0])


def kinds(model: Any) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


@pytest.mark.parametrize("case", sampled(CASES, 2, pytest.mark.slow), ids=named)
def test_a_graph_gives_what_it_gave(case: tuple[str, Callable[[Tensor], Any], dict[str, int]]) -> None:
    _, what, expected = case
    torch.manual_seed(0)
    network, x = Calls(what), torch.randn(2, 3, 12, 12)
    plain, other = (exported(network, x) for _ in range(2))
    onnx_arranging.arrange(other)
    onnx.checker.check_model(other, full_check=True)
    with torch.no_grad():
        torch.testing.assert_close(run(other, x), network(x), rtol=1e-5, atol=1e-6)
    before, after = kinds(plain), kinds(other)
    assert {kind: after[kind] for kind in expected} == expected
    if not expected:
        assert after == before
    read = {name for node in other.graph.node for name in node.input}
    assert {one.name for one in other.graph.initializer} <= read


def test_relu_stands_before_pooling() -> None:
    model = exported(Calls(lambda x: F.relu(F.max_pool2d(x, 2))), torch.randn(2, 3, 8, 8))
    onnx_arranging.arrange(model)
    assert [n.op_type for n in model.graph.node] == ["Conv", "Relu", "MaxPool", "Conv"]


def test_in_int8_all_is_computed_on_bytes(tmp_path: Path) -> None:
    """A pre-activation network: of the runtime's own graph only the ends are floats."""

    class Preactivation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.short = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
            self.one, self.two = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
            self.head = nn.Conv2d(8, 5, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(F.max_pool2d(self.stem(x), 3, 2, 1))
            x = self.one(x) + self.short(x)
            x = x + self.two(F.relu(x))
            x = x + self.one(F.relu(x))
            return self.head(F.relu(x).mean((2, 3), keepdim=True)).flatten(1)

    torch.manual_seed(0)
    network, x = Preactivation(), torch.randn(16, 3, 16, 16)
    file, seen, model = tmp_path / "int8.onnx", tmp_path / "seen.onnx", exported(network, x[:2])
    onnx_arranging.arrange(model)
    onnx_file.quantize(model, file, Quantization([x]))
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(seen)
    session = ort.InferenceSession(file, options)
    with torch.no_grad():
        wanted = network(x)
    error = torch.from_numpy(session.run(None, {"images": x.numpy()})[0]) - wanted
    assert error.norm() < 0.1 * wanted.norm()
    found = kinds(onnx.load(seen))
    assert found["QuantizeLinear"] == found["DequantizeLinear"] == 1
    assert not {"Relu", "Conv", "Add", "ReduceMean", "MaxPool"} & set(found)


def test_what_an_inner_graph_reads_is_read() -> None:
    inner = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["outer"], ["y"])], "then", [], [])
    node = onnx.helper.make_node("If", ["which"], ["out"], then_branch=inner, else_branch=inner)
    assert {*onnx_arranging._read(onnx.helper.make_graph([node], "net", [], []))} == {"which", "outer"}
