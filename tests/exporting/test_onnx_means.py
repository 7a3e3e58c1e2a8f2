"""Means in an ONNX graph: GlobalAveragePool where they are over a whole map, and what they were
elsewhere.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest
import torch
from support.small_transformers import small
from torch import Tensor, nn

import normswap
from normswap.errors import quiet
from normswap.exporting import onnx_file


class Calls(nn.Module):
    """Two convolutions around what a case does."""

    def __init__(self, what: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.what = what
        self.one = nn.Conv2d(3, 8, 3, padding=1)
        self.two = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Any:
        return self.two(self.what(self.one(x)))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("what", "kinds"),
    [
        (lambda x: x.mean((2, 3), keepdim=True), {"Conv": 2, "GlobalAveragePool": 1}),
        (
            lambda x: x.mean((2, 3))[:, :, None, None],
            {"GlobalAveragePool": 1, "Reshape": 1, "ReduceMean": 0},
        ),
        (lambda x: x.mean(2, keepdim=True), {"ReduceMean": 1, "GlobalAveragePool": 0}),
        (lambda x: x - x.mean((1, 2), keepdim=True), {"ReduceMean": 1, "GlobalAveragePool": 0}),
    ],
    ids=["over a map", "without its sides", "over rows", "over channels"],
)
def test_means(what: Callable[[Tensor], Any], kinds: dict[str, int]) -> None:
    torch.manual_seed(0)
    network = Calls(what).eval()

    x = torch.randn(2, 3, 12, 12)
    with quiet(), torch.no_grad():
        program = torch.onnx.export(
            network,
            (x,),
            dynamo=True,
            verbose=False,
            input_names=["images"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
        )

    assert program is not None

    model = program.model_proto
    onnx_file.pool_means(model.graph)
    onnx.checker.check_model(model, full_check=True)

    found = Counter(node.op_type for node in model.graph.node)
    assert {kind: found[kind] for kind in kinds} == kinds

    (y,) = ort.InferenceSession(model.SerializeToString()).run(None, {"images": x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(y), network(x), rtol=1e-5, atol=1e-6)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "sides", [(), (12,), (12, 12), (6, 6, 6)], ids=["rows", "series", "maps", "volumes"]
)
def test_a_scale_that_stays_has_any_dimension(sides: tuple[int, ...], tmp_path: Path) -> None:
    """Nothing linear stands before the norm, and the activation behind it keeps it from going
    forward.
    """
    torch.manual_seed(0)
    norm = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(sides)](4)
    norm.running_mean.normal_()  # type: ignore[union-attr]
    linear = (
        nn.Linear(4, 3) if not sides else (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(sides) - 1](4, 3, 3)
    )
    network = nn.Sequential(norm, nn.ReLU(), linear).eval()
    x = torch.randn(1, 4, *sides)
    exported = normswap.export(network, tmp_path / "network.onnx", inputs=x)
    session = ort.InferenceSession(exported.file)
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})

    torch.testing.assert_close(torch.from_numpy(y), network(x).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "norms"),
    [
        ("onnx", ("LayerNormalization", "RMSNormalization")),
        ("pt2", ("layer_norm.default", "rms_norm.default")),
    ],
)
def test_an_rms_norm_is_one_operator(ending: str, norms: tuple[str, str], tmp_path: Path) -> None:
    """With RMSNorms the file has no more operators than with LayerNorms."""
    source, x = small("vit")
    source = source.float()
    x = x.float()

    counts = {}
    for name, model in zip(
        norms, (source, normswap.convert(source, to="rmsnorm", inputs=x).model), strict=True
    ):
        exported = normswap.export(model, tmp_path / f"{name}.{ending}", dynamic_batch=True)
        assert exported.nodes[name] == 5
        counts[name] = sum(exported.nodes.values())

    assert counts[norms[1]] <= counts[norms[0]]
