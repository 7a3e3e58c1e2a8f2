"""ONNX: the graph that torch.export sees, in torch's current opset, for ONNX Runtime and whatever else reads it.

torch.onnx's own optimizer is enough: onnxslim finds nothing more in a folded network (tests/lab/benchmarks/export.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from normswap.errors import RefusedError, VerificationError, first_line, spelled
from normswap.exporting import rounding
from normswap.exporting.exported_module import FileContents, as_convolutions
from normswap.exporting.formats import Runs, described, reason
from normswap.exporting.signature import alone
from normswap.models.weight_files import quiet

if TYPE_CHECKING:
    import onnx

NAME = "onnx"
NEEDS = ("onnx", "onnxscript", "onnxruntime")
GRAPH = True
PARTS = ()
NOTES: Mapping[str, str] = {}
_LIMIT = 2**31 - 2**20  # protobuf's 2 GiB, less what the graph itself takes


def write(contents: FileContents, file: Path) -> None:
    """See `formats.Format.write`. The file is complete: nothing lies beside it."""
    tensors = (*contents.network.parameters(), *contents.network.buffers())
    size = sum(t.numel() * t.element_size() for t in tensors)
    if size > _LIMIT:
        raise RefusedError(
            f"an ONNX file holds 2 GiB, the weights are {size / 2**30:.1f}",
            remedy=f"Try {spelled('format', 'onnx-data')}, which puts them beside it",
        )
    model = graph(contents)
    check(model)
    file.write_bytes(model.SerializeToString())


def graph(contents: FileContents) -> onnx.ModelProto:
    """The model in the file, its weights in it.

    Raises:
        RefusedError: ONNX cannot express the network.
    """
    import onnx

    model = _exported(contents)
    _strip(model.graph)
    if contents.network.stored != contents.network.dtype:
        _store_bf16(model.graph)
    onnx.helper.set_model_props(model, dict(contents.metadata))
    model.producer_name = "normswap"
    return model


def check(model: onnx.ModelProto | Path) -> None:
    """See what `onnx.checker` has against a model, or a file that holds one.

    Raises:
        VerificationError: it rejects the model.
    """
    import onnx

    try:
        onnx.checker.check_model(model, full_check=True)
    except onnx.checker.ValidationError as error:
        raise VerificationError("onnx.checker rejects the exported graph", first_line(error)) from None


def _exported(contents: FileContents) -> onnx.ModelProto:
    network = as_convolutions(contents.network)
    try:
        with quiet(), torch.no_grad():
            program = torch.onnx.export(
                network, contents.example, dynamo=True, verbose=False, dynamic_shapes=contents.dynamic_shapes,
                input_names=[*network.signature.inputs], output_names=[*network.signature.outputs],
            )  # fmt: skip
    except Exception as error:  # torch's exporter raises whatever it meets on its way
        raise RefusedError("ONNX cannot express the network", reason(error)) from None
    assert program is not None
    return program.model_proto


def _strip(graph: onnx.GraphProto) -> None:
    """Take out what torch notes on each node: the user's file names and lines, twice the size of the graph."""
    for item in (*graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer, graph):
        del item.metadata_props[:]
    for node in graph.node:
        node.doc_string = ""


def _store_bf16(graph: onnx.GraphProto) -> None:
    """Store every weight that bfloat16 holds exactly in it, and let the graph cast it; runtimes do so once, on loading.

    Biases and what else is small stay as they are.
    """
    import onnx

    casts = []
    for tensor in graph.initializer:
        if tensor.data_type != onnx.TensorProto.FLOAT:
            continue
        value = torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy())
        if not rounding.is_bfloat16(value):
            continue
        name = tensor.name
        data = value.bfloat16().view(torch.int16).numpy().tobytes()
        stored = onnx.helper.make_tensor(f"{name}.bf16", onnx.TensorProto.BFLOAT16, tensor.dims, data, raw=True)
        tensor.CopyFrom(stored)
        casts.append(onnx.helper.make_node("Cast", [stored.name], [name], to=onnx.TensorProto.FLOAT))
    rest = list(graph.node)
    del graph.node[:]
    graph.node.extend([*casts, *rest])


def open(file: Path) -> Runs:
    """See `formats.Format.open`; on the CPU."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its own exceptions derive from nothing else
        raise VerificationError(f"ONNX Runtime {ort.__version__} cannot run it", first_line(error)) from None
    names = [each.name for each in session.get_inputs()]

    def runs(*tensors: Tensor) -> object:
        outputs = session.run(None, {name: x.numpy() for name, x in zip(names, tensors, strict=True)})
        return alone(torch.from_numpy(value) for value in outputs)

    return runs


def _described(file: Path) -> tuple[dict[str, int], dict[str, str]]:
    """The operators and the metadata of a file."""
    import onnx

    model = onnx.load(file, load_external_data=False)
    kinds = Counter(node.op_type for node in model.graph.node)
    return dict(kinds.most_common()), {entry.key: entry.value for entry in model.metadata_props}


nodes, metadata = described(_described)
