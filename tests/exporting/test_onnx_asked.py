"""What torch's ONNX exporter is asked, and what of its model stands in the file.

A model that is made here takes the place of the exporter's.
"""

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import quantization
from onnxscript import onnx_opset
from support.stand_in_tools import METADATA, Record
from torch import nn
from torch.export import ExportedProgram

from normswap.errors import VerificationError
from normswap.exporting import formats, onnx_file
from normswap.exporting.exported_module import FileContents, Shipped
from normswap.exporting.settings import Quantization
from normswap.exporting.signature import Signature
from normswap.models.calling import Example

X = torch.rand(1, 3, 4, 5, generator=torch.Generator().manual_seed(0))
# Numbers that bfloat16 has, and numbers that it has not.
KERNEL = np.arange(12, dtype=np.float32).reshape(4, 3, 1, 1) / 8
MATRIX = np.arange(20, dtype=np.float32).reshape(4, 5)
INEXACT = np.full((4, 5), 0.1, np.float32)
BIAS = np.array([0.5, 1, -1, 2], np.float32)
# Whole numbers, which no precision changes.
INDEX = np.arange(4).reshape(2, 2)
STORED = {
    "bias": BIAS,
    "index": INDEX,
    "kernel": KERNEL,
    "inexact": INEXACT,
    "matrix": MATRIX,
}


def model_with_notes() -> Any:
    """A model of a convolution, a sum and a product, with a note on each part, as torch's has."""
    inputs = [helper.make_tensor_value_info("images", TensorProto.FLOAT, [1, 3, 4, 5])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, 4, 4, 5])]
    inner = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 4, 5])]
    nodes = [
        helper.make_node("Conv", ["images", "kernel", "bias"], ["y"], doc_string="secret.py"),
        helper.make_node("Add", ["y", "matrix"], ["z"], doc_string="secret.py"),
        helper.make_node("Mul", ["z", "inexact"], ["logits"], doc_string="secret.py"),
    ]
    tensors = [numpy_helper.from_array(value, name) for name, value in STORED.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, tensors, value_info=inner)
    for part in (graph, *nodes, *graph.node, *graph.value_info, *graph.input, *graph.output):
        part.metadata_props.add(key="stack_trace", value="secret.py")
    for tensor in graph.initializer:
        tensor.metadata_props.add(key="stack_trace", value="secret.py")
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What torch's exporter is asked."""
    calls: list[Any] = []

    def export(network: Any, example: Any, **options: Any) -> Any:
        calls.append((network, example, options))
        return Record(model_proto=model_with_notes())

    monkeypatch.setattr(torch.onnx, "export", export)
    return calls


def contents(*layers: nn.Module, dynamic: bool = False) -> FileContents:
    """The contents of a file that takes X, or two of it, and calls them by names of its own."""
    network = nn.Sequential(*layers)
    named = Signature(Example((X,)), ("pixels",), ("answers",))
    example = (X.repeat(2, 1, 1, 1),) if dynamic else (X,)
    return FileContents(Shipped(network, named), example, dynamic, METADATA)


NORMS: dict[str, tuple[tuple[nn.Module, ...], int | None]] = {
    "no norm": ((nn.ReLU(),), None),
    "a LayerNorm": ((nn.LayerNorm(5),), None),
    "an RMSNorm": ((nn.RMSNorm(5),), 23),
    "both": ((nn.LayerNorm(5), nn.RMSNorm(5)), 23),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_the_exporter_is_given_the_network_with_its_names(
    name: str, dynamic: bool, asked: list[Any], tmp_path: Path
) -> None:
    """One RMSNorm is enough for the opset that has it."""
    layers, opset = NORMS[name]
    given = contents(*layers, dynamic=dynamic)

    onnx_file.write(given, tmp_path / "net.onnx")

    ((network, example, options),) = asked
    assert network is given.network
    assert example is given.example
    translated = {torch.ops.aten.rms_norm.default: onnx_file._rms_norm}
    batch = options.pop("dynamic_shapes")
    assert str(batch) == str(given.dynamic_shapes)
    assert (batch is not None) is dynamic
    assert options == {
        "dynamo": True,
        "verbose": False,
        "opset_version": opset,
        "custom_translation_table": translated if opset else None,
        "input_names": ["pixels"],
        "output_names": ["answers"],
    }


def test_a_network_with_a_keyword_in_a_path_goes_to_the_exporter_without_it(
    asked: list[Any], tmp_path: Path
) -> None:
    network = nn.Sequential()
    network.add_module("class", nn.Conv2d(3, 4, 1))

    onnx_file.write(FileContents(Shipped(network), (X,)), tmp_path / "net.onnx")

    ((program, _, _),) = asked
    assert isinstance(program, ExportedProgram)
    assert {*program.state_dict} == {"network.class_.weight", "network.class_.bias"}
    torch.testing.assert_close(program.module()(X), network(X))


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_a_file_has_weights_of_its_precision_and_the_metadata_alone(
    dtype: torch.dtype | None, asked: list[Any], tmp_path: Path
) -> None:
    """A matrix of numbers that bfloat16 has is stored in it. A cast to float32 reads it."""
    file = tmp_path / "net.onnx"
    given = contents(nn.ReLU())
    if dtype:
        given.network.in_half(dtype)

    onnx_file.write(given, file)

    assert len(asked) == 1
    model = onnx.load(file)
    assert b"secret" not in file.read_bytes()
    assert b"stack_trace" not in file.read_bytes()
    assert model.producer_name == "normswap"
    assert onnx_file.metadata(file) == METADATA
    in_bf16 = dtype == torch.bfloat16
    kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    wanted = dict.fromkeys(STORED, TensorProto.FLOAT) | {"index": TensorProto.INT64}
    if in_bf16:
        for name in ("kernel", "matrix"):
            del wanted[name]
            wanted[f"{name}.bf16"] = TensorProto.BFLOAT16
    assert kinds == wanted
    operators = [node.op_type for node in model.graph.node]
    assert operators == ["Cast"] * 2 * in_bf16 + ["Conv", "Add", "Mul"]

    found = formats.get("onnx").open(file)(X)
    right = torch.einsum("oc,nchw->nohw", torch.from_numpy(KERNEL[..., 0, 0]), X)
    right = (right + torch.from_numpy(BIAS).reshape(4, 1, 1) + torch.from_numpy(MATRIX)) * 0.1
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize(("wrong", "said"), [("no such value", "no such value"), ("index", "Add")])
def test_a_model_that_is_none_is_not_written(
    wrong: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No node can read a value that is not there, or add whole numbers to others.

    The error names the checker. That ONNX cannot express the network is not known.
    """
    model = model_with_notes()
    model.graph.node[1].input[1] = wrong
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: Record(model_proto=model))

    with pytest.raises(VerificationError, match=f"onnx.checker .*{said}"):
        formats.get("onnx").write(contents(nn.ReLU()), tmp_path / "net.onnx")

    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("bits", "reduced"), [(7, True), (8, False)])
@pytest.mark.parametrize("fails", [False, True])
def test_the_quantizer_is_given_all_images_and_its_log_is_put_back(
    fails: bool,
    bits: int,
    reduced: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    asked: list[Any] = []
    images = torch.rand(5, *X.shape[1:]).split(2)
    root = logging.getLogger()

    def quantize_static(model: Any, file: Path, reader: Any, **options: Any) -> None:
        print("a note of the tool")
        assert root.level == logging.ERROR
        batches = iter(reader.get_next, None)
        given = [torch.from_numpy(batch["images"]) for batch in batches]
        asked.append((model, file, given, options))
        if fails:
            raise ValueError("it cannot")

    monkeypatch.setattr(quantization, "quantize_static", quantize_static)
    model = model_with_notes()

    monkeypatch.setattr(root, "level", logging.DEBUG)

    with pytest.raises(ValueError, match="it cannot") if fails else nullcontext():
        onnx_file.quantize(model, tmp_path / "a.onnx", Quantization(images, bits))

    assert root.level == logging.DEBUG
    ((taken, file, given, options),) = asked
    assert taken is model
    assert file == tmp_path / "a.onnx"
    assert len(given) == 3
    assert torch.equal(torch.cat(given), torch.cat(images))
    assert options == {
        "quant_format": quantization.QuantFormat.QDQ,
        "per_channel": True,
        "reduce_range": reduced,
        "activation_type": quantization.QuantType.QUInt8,
        "weight_type": quantization.QuantType.QInt8,
        "calibrate_method": quantization.CalibrationMethod.MinMax,
        # The scores of the classifier are not rounded.
        "extra_options": {"OpTypesToExcludeOutputQuantization": ["Gemm"]},
    }
    assert capfd.readouterr() == ("", "")


def test_the_quantizer_is_given_means_as_pools_and_its_file_gets_the_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [helper.make_tensor_value_info("images", TensorProto.FLOAT, [1, 3, 4, 5])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, 3, 1, 1])]
    axes = numpy_helper.from_array(np.array([2, 3]), "axes")
    mean = helper.make_node("ReduceMean", ["images", "axes"], ["logits"])
    graph = helper.make_graph([mean], "g", inputs, outputs, [axes])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: Record(model_proto=model))
    given: list[list[str]] = []

    def quantize_static(model: Any, file: Path, *_: Any, **__: Any) -> None:
        given.append([node.op_type for node in model.graph.node])
        onnx.save(model, file)

    monkeypatch.setattr(quantization, "quantize_static", quantize_static)
    file = tmp_path / "net.onnx"

    onnx_file.write_int8(contents(nn.ReLU()), file, Quantization([X]))

    assert given == [["GlobalAveragePool"]]
    assert onnx_file.metadata(file) == METADATA
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize("sides", [[5], [4, 5]])
@pytest.mark.parametrize(("given", "used"), [(0.25, 0.25), (0.0, 0.0), (None, 2**-23)])
@pytest.mark.parametrize("weight", ["a weight", None])
def test_an_rms_norm_is_translated_with_all_of_its_numbers(
    weight: str | None,
    given: float | None,
    used: float,
    sides: list[int],
    asked: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    onnx_file.write(contents(nn.RMSNorm(5)), tmp_path / "net.onnx")
    ((_, _, options),) = asked
    translate = options["custom_translation_table"][torch.ops.aten.rms_norm.default]
    operators = Record(
        Constant=lambda value: value,
        RMSNormalization=lambda *inputs, **numbers: (inputs, numbers),
    )
    monkeypatch.setattr(onnx_opset, "opset23", operators)
    x = Record(dtype=Record(numpy=lambda: np.float16))

    (normed, scale), numbers = translate(x, sides, weight, given)

    assert normed is x
    assert numbers == {"axis": -len(sides), "epsilon": used}
    if weight:
        assert scale == weight
    else:
        assert scale.numpy().dtype == np.float16
        assert np.array_equal(scale.numpy(), np.ones(sides))
