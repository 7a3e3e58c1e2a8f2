"""LiteRT: a .tflite file for phones and boards, which litert-torch makes of a network, once called TensorFlow Lite.

Its convolutions want channels last: the first operator turns the images round. The metadata are one entry of the
file's own, called `normswap`.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from normswap.errors import RefusedError, VerificationError, first_line
from normswap.exporting import constants
from normswap.exporting.exported_module import FileContents, as_convolutions
from normswap.exporting.formats import Runs, described, reason
from normswap.exporting.signature import Signature, alone
from normswap.exporting.silence import silent

if TYPE_CHECKING:
    from ai_edge_litert.schema_py_generated import BufferT
    from flatbuffers import Builder

NAME = "litert"
NEEDS = ("litert_torch", "ai_edge_litert")
GRAPH = True
PARTS = ()
NOTES: Mapping[str, str] = {
    "fp16": "weights only: LiteRT computes in what the device is fast in, and here it was checked in fp32"
}
_METADATA = "normswap"
_ALIGNED = 16  # bytes, as the schema asks of every buffer; the writer in Python leaves that out


def write(contents: FileContents, file: Path) -> None:
    """See `formats.Format.write`. Inputs and outputs have the names that the sidecar gives them."""
    network = contents.network
    if network.stored == torch.bfloat16:
        raise RefusedError("LiteRT is not written in bf16", remedy="Its files are fp32, fp16 or int8")
    contents.require_one_image("a LiteRT file")  # XNNPACK takes a transposed convolution for one number only
    contents.require_floats("a LiteRT file")
    content = converted(contents.in_float32)
    if network.dtype == torch.float16:
        content = _halved(content)
    file.write_bytes(finished(content, network.signature, contents.metadata))


def converted(contents: FileContents) -> bytes:
    """The file that litert-torch makes of a network in float32.

    Raises:
        RefusedError: it cannot read the network.
    """
    try:
        with silent(), torch.no_grad():
            import litert_torch

            network = constants.with_constants(contents, as_convolutions(contents.network))
            made = litert_torch.convert(network, contents.example)
            return bytes(made.model_content())
    except Exception as error:  # whatever it and torch meet on their way
        raise RefusedError("LiteRT cannot express the network", reason(error)) from None


def _halved(content: bytes) -> bytes:
    """The same with the weights of convolutions and products in fp16; a cast to fp32 follows each."""
    with silent():
        from ai_edge_quantizer import qtyping, quantizer

        weights = qtyping.TensorQuantizationConfig(num_bits=16, dtype=qtyping.TensorDataType.FLOAT)
        how = qtyping.OpQuantizationConfig(
            weight_tensor_config=weights, compute_precision=qtyping.ComputePrecision.FLOAT, explicit_dequantize=True
        )
        halving = quantizer.Quantizer(bytearray(content))
        for kind in ("CONV_2D", "DEPTHWISE_CONV_2D", "CONV_2D_TRANSPOSE", "FULLY_CONNECTED"):
            halving.update_quantization_recipe(".*", qtyping.TFLOperationName[kind], how, algorithm_key="float_casting")
        return bytes(halving.quantize().quantized_model)


def finished(content: bytes, signature: Signature, metadata: Mapping[str, str]) -> bytes:
    """The same file, whose inputs and outputs have the signature's names and order, with the metadata."""
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromPackedBuf(bytearray(content))
    graph, called = model.subgraphs[0], model.signatureDefs[0]
    for maps, names in ((called.inputs, signature.inputs), (called.outputs, signature.outputs)):
        maps.sort(key=lambda one: int(one.name.rpartition(b"_")[2]))  # args_0, args_1 ...
        for one, name in zip(maps, names, strict=True):
            one.name = graph.tensors[one.tensorIndex].name = name
    graph.inputs = [one.tensorIndex for one in called.inputs]
    graph.outputs = [one.tensorIndex for one in called.outputs]
    noted = schema.MetadataT(name=_METADATA, buffer=len(model.buffers))
    model.metadata = [*(model.metadata or []), noted]
    text = json.dumps(dict(metadata)).encode()
    model.buffers.append(schema.BufferT(data=np.frombuffer(text, np.uint8)))
    for buffer in model.buffers:
        if buffer.offset:  # the quantizer puts large ones behind the graph
            buffer.data = np.frombuffer(content, np.uint8, buffer.size, buffer.offset)
            buffer.offset = buffer.size = 0
        buffer.Pack = functools.partial(_aligned, buffer)
    builder = flatbuffers.Builder(len(content))
    builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
    return bytes(builder.Output())


def _aligned(buffer: BufferT, builder: Builder) -> int:
    """Pack a buffer where the schema wants it to begin."""
    if buffer.data is not None:
        builder.Prep(_ALIGNED, len(buffer.data))
    return int(type(buffer).Pack(buffer, builder))


def open(file: Path) -> Runs:
    """See `formats.Format.open`; on the CPU, in XNNPACK where that has the operator."""
    try:
        with silent():
            from ai_edge_litert.interpreter import Interpreter

            engine = Interpreter(str(file), num_threads=torch.get_num_threads())
            engine.allocate_tensors()
    except Exception as error:  # its own exceptions derive from nothing else
        raise VerificationError("LiteRT cannot run it", first_line(error)) from None
    inputs, outputs = (
        [one["index"] for one in ends] for ends in (engine.get_input_details(), engine.get_output_details())
    )

    def runs(*tensors: Tensor) -> object:
        for place, x in zip(inputs, tensors, strict=True):
            engine.set_tensor(place, x.numpy())
        engine.invoke()
        return alone(torch.from_numpy(engine.get_tensor(place)) for place in outputs)

    return runs


def _described(file: Path) -> tuple[dict[str, int], dict[str, str]]:
    """The operators and the metadata of a file."""
    from ai_edge_litert import schema_py_generated as schema

    content = file.read_bytes()
    if content[4:8] != b"TFL3":
        raise ValueError("it does not begin as such files do")
    model = schema.ModelT.InitFromPackedBuf(bytearray(content))
    kinds = {number: name for name, number in vars(schema.BuiltinOperator).items() if isinstance(number, int)}
    called = [
        one.customCode.decode() if one.customCode else kinds[max(one.builtinCode, one.deprecatedBuiltinCode)]
        for one in model.operatorCodes
    ]
    counted = Counter(called[one.opcodeIndex] for graph in model.subgraphs for one in graph.operators)
    noted = (model.buffers[one.buffer].data for one in model.metadata or [] if one.name == _METADATA.encode())
    return dict(counted.most_common()), json.loads(bytes(next(noted, b"{}")))


nodes, metadata = described(_described)
