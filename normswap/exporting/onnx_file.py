"""ONNX: the graph of torch.export, for ONNX Runtime and others.

It is in torch's own opset, with RMSNorms in opset 23.

int8 is onnxruntime.quantization's QDQ. Activations are unsigned, weights signed. On x64 without
VNNI, ONNX Runtime adds pairs of such products with saturation at 16 bits, which weights of 7 bits
cannot reach: they give the same on every CPU. Weights of 8 bits are finer.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from normswap.errors import RefusedError, VerificationError, first_line
from normswap.exporting import pt2_file
from normswap.exporting.exported_module import FileContents
from normswap.exporting.formats import Runs, counted, require_inside
from normswap.exporting.settings import SAFE_BITS, Quantization
from normswap.exporting.signature import INPUT
from normswap.sites.site import sites_of

if TYPE_CHECKING:
    import onnx
    from google.protobuf.message import Message  # type: ignore[import-untyped]

# Protobuf's 2 GiB, less what the graph itself takes.
_LIMIT = 2**31 - 2**20
# The first opset that has RMSNormalization. In earlier ones an RMSNorm is six operators.
_RMS_OPSET = 23
# The output of the last Gemm, the classifier's, is not rounded. A layer that reads another Gemm's
# output rounds it.
_UNROUNDED = {"OpTypesToExcludeOutputQuantization": ["Gemm"]}


def write(contents: FileContents, file: Path) -> None:
    """Write the network and its metadata to an .onnx file.

    The file is complete: nothing lies beside it.

    Args:
        contents: The network, its example inputs and its metadata.
        file: The path of the file.
    """
    # An opset is a version of ONNX's operators. Only a network with an RMSNorm needs a newer one.
    model = graph(contents, opset=_RMS_OPSET if _has_rms_norm(contents) else None)
    # A bf16 file stores weights in bfloat16 and computes in float32.
    if contents.network.stored != contents.network.dtype:
        _store_bf16(model.graph)
    _save(model, contents, file)


def _has_rms_norm(contents: FileContents) -> bool:
    """Whether some norm of a network is an RMSNorm.

    Args:
        contents: The contents of a file, with the network.
    """
    return any(site.is_rms_norm for site in sites_of(contents.network))


def _rms_norm(
    x: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Any:
    """Write an RMSNorm of a network into an ONNX graph, as the one operator RMSNormalization.

    torch.onnx calls this function for each aten::rms_norm. For a norm without a weight, torch's own
    translation would have the file compute a weight of ones. Here it is a constant.

    Args:
        x: The input, as a value of the graph.
        normalized_shape: The sizes of the last dimensions, over which the norm is taken.
        weight: The weight, as a value of the graph. None if the norm has none.
        eps: The epsilon. With None it is that of float32, as in torch.

    Returns:
        The output of the norm, as a value of the graph.
    """
    from onnxscript import ir
    from onnxscript.onnx_opset import opset23

    if weight is None:
        ones = ir.tensor(np.ones(normalized_shape, x.dtype.numpy()))
        weight = opset23.Constant(value=ones)  # type: ignore[arg-type]
    epsilon = torch.finfo(torch.float32).eps if eps is None else eps
    return opset23.RMSNormalization(x, weight, axis=-len(normalized_shape), epsilon=epsilon)


def graph(contents: FileContents, opset: int | None = None) -> onnx.ModelProto:
    """Return a network in fp32 or fp16 as an ONNX model, without torch's notes on each node.

    Args:
        contents: The network and its example inputs.
        opset: The version of ONNX's operators. By default it is the one that torch uses.

    Raises:
        RefusedError: The weights do not fit in one ONNX file.
    """
    tensors = (*nn.Module.parameters(contents.network), *nn.Module.buffers(contents.network))
    size = sum(t.numel() * t.element_size() for t in tensors)
    if size > _LIMIT:
        raise RefusedError(
            f"an ONNX file holds 2 GiB, the weights are {size / 2**30:.1f}", remedy="Try pt2"
        )

    network = contents.network
    to_export: nn.Module | ExportedProgram = network
    # torch's exporter writes the names of layers into source code. `traced` changes the names that
    # are keywords of Python, such as `in`.
    if pt2_file.has_keywords(network):
        to_export = pt2_file.traced(contents, network)
    program = torch.onnx.export(
        to_export,
        contents.example,
        dynamo=True,
        verbose=False,
        opset_version=opset,
        custom_translation_table={torch.ops.aten.rms_norm.default: _rms_norm}
        if opset == _RMS_OPSET
        else None,
        dynamic_shapes=contents.dynamic_shapes,
        input_names=[*network.signature.inputs],
        output_names=[*network.signature.outputs],
    )
    assert program is not None

    # Remove torch's notes, such as stack traces.
    model = program.model_proto
    main_graph = model.graph
    for item in (
        main_graph,
        *main_graph.node,
        *main_graph.value_info,
        *main_graph.input,
        *main_graph.output,
        *main_graph.initializer,
    ):
        del item.metadata_props[:]
    for node in main_graph.node:
        node.doc_string = ""
    return model


def _save(model: onnx.ModelProto, contents: FileContents, file: Path) -> None:
    """Write an ONNX model with its metadata to a file.

    Args:
        model: The model.
        contents: The contents of the file, with the metadata.
        file: The path of the file.

    Raises:
        VerificationError: `onnx.checker` rejects the model.
    """
    import onnx
    import onnx.shape_inference

    onnx.helper.set_model_props(model, dict(contents.metadata))
    model.producer_name = "normswap"
    try:
        onnx.checker.check_model(model, full_check=True)
    # The full check infers all shapes. What it finds there is an error of a class of its own.
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise VerificationError(
            "onnx.checker rejects the exported graph", first_line(error)
        ) from None
    file.write_bytes(model.SerializeToString())


def _store_bf16(graph: onnx.GraphProto) -> None:
    """Store the weights of an ONNX graph in bfloat16, in place, if no digit is lost.

    They are the constants with two dimensions or more. A cast to float32 is put behind each of
    them, since the file computes in float32. Runtimes do the cast once.

    Args:
        graph: The graph. The weights of its layers were rounded to bfloat16 before.
    """
    import onnx

    casts = []
    for tensor in graph.initializer:
        # Vectors, such as biases, stay in float32.
        if tensor.data_type != onnx.TensorProto.FLOAT or len(tensor.dims) < 2:
            continue
        value = torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy())
        if not torch.equal(value.bfloat16().float(), value):
            continue

        # The stored tensor gets another name. Its cast gets the old name, which the layer reads.
        name = tensor.name
        data = value.bfloat16().view(torch.int16).numpy().tobytes()
        stored = onnx.helper.make_tensor(
            f"{name}.bf16", onnx.TensorProto.BFLOAT16, tensor.dims, data, raw=True
        )
        tensor.CopyFrom(stored)
        casts.append(
            onnx.helper.make_node("Cast", [stored.name], [name], to=onnx.TensorProto.FLOAT)
        )

    # ONNX demands that a node stands before the nodes that read it.
    other_nodes = list(graph.node)
    del graph.node[:]
    graph.node.extend([*casts, *other_nodes])


def write_int8(contents: FileContents, file: Path, how: Quantization) -> None:
    """Write the network to an .onnx file in int8.

    Args:
        contents: The network, its example inputs and its metadata.
        file: The path of the file.
        how: The images that set the ranges of activations, and the bits of a weight.
    """
    import onnx

    model = graph(contents)
    pool_means(model.graph)
    # The tool writes a file. The model is read from there again, to add the metadata.
    quantize(model, file, how)
    _save(onnx.load(file), contents, file)


def pool_means(graph: onnx.GraphProto) -> None:
    """Replace every ReduceMean over height and width by a GlobalAveragePool, in place.

    ONNX Runtime computes a GlobalAveragePool on bytes. A ReduceMean needs floats, which costs
    networks with squeeze-and-excitation a fifth of their time.

    Args:
        graph: The graph of an ONNX model.
    """
    from onnx import helper, numpy_helper

    # The number of dimensions of each value, and the stored constants, by name.
    values = (*graph.value_info, *graph.input, *graph.output)
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in values}
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    nodes = []
    for node in graph.node:
        # The second input of a ReduceMean has the axes. `axes` is None for any other node, and for
        # axes that the file computes.
        axes = None
        if node.op_type == "ReduceMean" and len(node.input) > 1:
            axes = constants.get(node.input[1])
        # The number of dimensions of the first input. A node without inputs gets 0.
        rank = ranks.get("".join(node.input[:1]), 0)

        # Only a mean over all sides of a map (N, C, ...) is a GlobalAveragePool.
        if (
            axes is None
            or rank < 3
            or sorted(axis % rank for axis in axes.tolist()) != [*range(2, rank)]
        ):
            nodes.append(node)
            continue

        # GlobalAveragePool gives (N, C, 1, ...). A mean without `keepdims` gives (N, C), which a
        # Reshape makes of it. `keepdims` is 1 if it is not stated.
        keeps_sides = all(
            attribute.i for attribute in node.attribute if attribute.name == "keepdims"
        )
        result = node.output[0]
        pooled = result if keeps_sides else f"{result}_pooled"
        nodes.append(helper.make_node("GlobalAveragePool", [node.input[0]], [pooled], node.name))
        if not keeps_sides:
            # In the target shape of a Reshape, 0 keeps N, and -1 stands for what is left, C. The
            # type number 7 is int64.
            rows = helper.make_tensor(f"{result}_shape", 7, [2], [0, -1])
            graph.initializer.append(rows)
            nodes.append(
                helper.make_node("Reshape", [pooled, rows.name], [result], f"{node.name}_rows")
            )

    # ONNX Runtime would warn of constants that nothing reads.
    read = set(itertools.chain.from_iterable(node.input for node in nodes))
    unread = [
        tensor
        for tensor in graph.initializer
        if tensor.name in constants and tensor.name not in read
    ]
    for tensor in unread:
        graph.initializer.remove(tensor)
    del graph.node[:]
    graph.node.extend(nodes)


def quantize(model: onnx.ModelProto, file: Path, how: Quantization) -> None:
    """Quantize an ONNX model to int8, and write it to a file.

    Args:
        model: The model, in fp32.
        file: The path of the file.
        how: The images that set the ranges of activations, and the bits of a weight.
    """
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    # The tool warns in the root logger that the model was not preprocessed. It need not be, because
    # it is folded. `reduce_range` below writes weights of 7 bits in place of 8.
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            quantize_static(
                model,
                file,
                _CalibrationReader(how),
                quant_format=QuantFormat.QDQ,
                per_channel=True,
                reduce_range=how.weight_bits == SAFE_BITS,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                calibrate_method=CalibrationMethod.MinMax,
                extra_options=_UNROUNDED,
            )
    finally:
        root.setLevel(level)


class _CalibrationReader:
    """Gives the calibration images to onnxruntime's `quantize_static`, one batch after the other.

    Args:
        how: The calibration images, in batches.
    """

    def __init__(self, how: Quantization) -> None:
        self.batches: Iterator[dict[str, np.ndarray]] = ({INPUT: x.numpy()} for x in how.images)

    def get_next(self) -> dict[str, np.ndarray] | None:
        """Return a dict from the name of the file's input to the next batch of images.

        The result is None after the last batch.
        """
        return next(self.batches, None)


def open(file: Path, *, inside: bool = False) -> Runs:
    """Open an .onnx file in ONNX Runtime, and return a function that runs it.

    The function takes the file's input tensors and returns its output tensors.

    It runs on the CPU.

    Args:
        file: The path of the file.
        inside: Whether the function returns all values that the file computes, not only its
            outputs.
    """
    import onnxruntime as ort

    # The runtime would read weights from any path. This call checks that the file names none
    # outside of its folder.
    _loaded(file)
    content: Path | bytes = file
    if inside:
        import onnx

        # The results of all nodes become outputs of a copy of the graph. `left_out` are the names
        # of results that are outputs already, and "", the name of a result that a node does not
        # give.
        model = onnx.load(file)
        values = itertools.chain.from_iterable(node.output for node in model.graph.node)
        left_out = {"", *(output.name for output in model.graph.output)}
        inner = [name for name in dict.fromkeys(values) if name not in left_out]
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner)
        content = model.SerializeToString()

    options = ort.SessionOptions()
    # Only fatal errors are logged.
    options.log_severity_level = 4
    options.intra_op_num_threads = torch.get_num_threads()
    session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def runs(*tensors: Tensor) -> list[Tensor]:
        outputs = session.run(
            None, {name: x.numpy() for name, x in zip(names, tensors, strict=True)}
        )
        return [torch.from_numpy(value) for value in outputs]

    return runs


def nodes(file: Path) -> dict[str, int]:
    """Return how many operators of each kind an .onnx file has, the most frequent kind first."""
    return counted(node.op_type for node in _loaded(file).graph.node)


def metadata(file: Path) -> dict[str, str]:
    """Return the texts that `export` stored in an .onnx file as metadata, by their keys.

    An example is the name of the source network, with the key `source`.
    """
    return {entry.key: entry.value for entry in _loaded(file).metadata_props}


def _loaded(file: Path) -> onnx.ModelProto:
    """Return the model in an .onnx file, without weights that lie in other files beside it.

    ONNX calls such weights external data. Their files are not opened. Only their paths are checked.

    Raises:
        SourceError: The file takes weights from outside of its folder.
    """
    import onnx

    model = onnx.load(file, load_external_data=False)
    for tensor in _tensors(model):
        for entry in tensor.external_data:
            if entry.key == "location":
                require_inside(file, file.parent, entry.value)
    return model


def _tensors(message: Message) -> Iterator[onnx.TensorProto]:
    """Yield every tensor that is stored in an ONNX model or in a part of it.

    The tensors in attributes of nodes, and in graphs inside of nodes, are yielded, too.

    Args:
        message: The model or its part, as a message of protobuf.
    """
    import onnx

    if isinstance(message, onnx.TensorProto):
        yield message
        return

    for description, value in message.ListFields():
        # A field of numbers or text holds no tensor.
        if description.message_type is None:
            continue
        # The field is one message, a list of messages, or a map. A map is passed over, because
        # iterating it gives its keys, which are no messages.
        is_message = hasattr(value, "ListFields")
        parts = [value] if is_message else list(value)
        for part in parts:
            if hasattr(part, "ListFields"):
                yield from _tensors(part)
