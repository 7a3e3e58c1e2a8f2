"""LiteRT, once TensorFlow Lite: a .tflite file for phones and boards, made by litert-torch.

The metadata are the file's entry `normswap`. ai-edge-quantizer converts the file in fp32 to fp16
and int8. Weights of int8 have 8 bits: LiteRT multiplies bytes exactly on every CPU.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from normswap import reading
from normswap.errors import SourceError
from normswap.exporting import simpler_graph
from normswap.exporting.exported_module import FileContents
from normswap.exporting.formats import Runs, counted, silent
from normswap.exporting.settings import WHOLE_BITS, Quantization

if TYPE_CHECKING:
    from ai_edge_litert.schema_py_generated import BufferT, ModelT
    from ai_edge_quantizer.quantizer import Quantizer
    from flatbuffers import Builder

# The smallest and the largest number of each tensor of the file, by its name.
Extremes: TypeAlias = "dict[str, dict[str, np.ndarray]]"
_METADATA = "normswap"
# The schema asks that every buffer starts at a multiple of 16 bytes; the writer in Python leaves
# that out.
_ALIGNED = 16


def write(contents: FileContents, file: Path) -> None:
    """Write the network and its metadata to a .tflite file.

    Inputs and outputs have the names that the sidecar gives them.

    Args:
        contents: The network, its example inputs and its metadata.
        file: The path of the file.
    """
    content = _converted(contents.in_float32)
    if contents.network.dtype == torch.float16:
        content = _halved(content)
    file.write_bytes(_finished(content, contents))


def _converted(contents: FileContents) -> bytes:
    """Return the bytes of the .tflite file that litert-torch makes of a network.

    Args:
        contents: The network, in fp32, and its example inputs.
    """
    with silent():
        import litert_torch

        network = simpler_graph.with_constants(contents)
        return bytes(litert_torch.convert(network, contents.example).model_content())


def _halved(content: bytes) -> bytes:
    """Return a .tflite file with the weights of convolutions and linear layers in fp16.

    The file computes in fp32: each weight is cast when a layer reads it.

    Args:
        content: The bytes of the file in fp32.
    """
    with silent():
        from ai_edge_quantizer import qtyping, quantizer

        weights = qtyping.TensorQuantizationConfig(num_bits=16, dtype=qtyping.TensorDataType.FLOAT)
        how = qtyping.OpQuantizationConfig(
            weight_tensor_config=weights,
            compute_precision=qtyping.ComputePrecision.FLOAT,
            explicit_dequantize=True,
        )
        halving = quantizer.Quantizer(bytearray(content))
        for kind in ("CONV_2D", "DEPTHWISE_CONV_2D", "CONV_2D_TRANSPOSE", "FULLY_CONNECTED"):
            halving.update_quantization_recipe(
                ".*", qtyping.TFLOperationName[kind], how, algorithm_key="float_casting"
            )
        return bytes(halving.quantize().quantized_model)


def write_int8(contents: FileContents, file: Path, how: Quantization) -> None:
    """Write the network to a .tflite file in int8. The quantizer takes every layer that it knows.

    Args:
        contents: The network, its example inputs and its metadata.
        file: The path of the file.
        how: The images that set the ranges of activations.
    """
    content = _converted(contents)
    with silent():
        from ai_edge_quantizer import qtyping, quantizer

        # ".*" is a pattern for the names of all layers.
        tool = quantizer.Quantizer(bytearray(content))
        every_kind = qtyping.TFLOperationName.ALL_SUPPORTED
        tool.add_static_config(".*", every_kind, activation_num_bits=8, weight_num_bits=WHOLE_BITS)
        # Inputs and outputs stay in float32.
        for name in ("INPUT", "OUTPUT"):
            tool.update_quantization_recipe(
                ".*", qtyping.TFLOperationName[name], algorithm_key="no_quantize"
            )
        rounded = bytes(tool.quantize(_extremes(tool, how.images)).quantized_model)
    file.write_bytes(_finished(rounded, contents))


def _extremes(tool: Quantizer, images: Sequence[Tensor]) -> Extremes:
    """Return the smallest and the largest number that each tensor of a file has on images.

    They set the ranges of int8. The quantizer itself would average them over batches.

    Args:
        tool: The quantizer, which has read the file.
        images: Batches of images.
    """
    total: Extremes = {}
    for x in images:
        # The converter gives these names to the file's only signature and its first input.
        for name, values in tool.calibrate({"serving_default": [{"args_0": x.numpy()}]}).items():
            before = total.setdefault(name, values)
            total[name] = {
                **values,
                "min": np.minimum(before["min"], values["min"]),
                "max": np.maximum(before["max"], values["max"]),
            }

    return total


def _finished(content: bytes, contents: FileContents) -> bytes:
    """Return a .tflite file with our names of inputs and outputs, and with the metadata.

    Args:
        content: The bytes of the file, as the converter and the quantizer made it.
        contents: The network, its signature and its metadata.
    """
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    signature = contents.network.signature
    model = schema.ModelT.InitFromPackedBuf(bytearray(content))
    graph = model.subgraphs[0]
    in_file = model.signatureDefs[0]

    # The converter's own names end in the number of the input or output, such as `args_0`. Sorted
    # by this number, they are in the order of our names.
    for entries, names in (
        (in_file.inputs, signature.inputs),
        (in_file.outputs, signature.outputs),
    ):
        entries.sort(key=lambda entry: int(entry.name.rpartition(b"_")[2]))
        for entry, name in zip(entries, names, strict=True):
            entry.name = graph.tensors[entry.tensorIndex].name = name
    graph.inputs = [entry.tensorIndex for entry in in_file.inputs]
    graph.outputs = [entry.tensorIndex for entry in in_file.outputs]

    # The metadata become the last buffer of the file, as JSON.
    metadata_entry = schema.MetadataT(name=_METADATA, buffer=len(model.buffers))
    model.metadata = [*(model.metadata or []), metadata_entry]
    text = json.dumps(dict(contents.metadata)).encode()
    model.buffers.append(schema.BufferT(data=np.frombuffer(text, np.uint8)))

    # In the old file, the bytes of some buffers lie behind the flatbuffer, at an offset that will
    # be wrong in the new file. So they are moved into their buffers.
    for buffer in model.buffers:
        if buffer.offset:
            buffer.data = np.frombuffer(content, np.uint8, buffer.size, buffer.offset)
            buffer.offset = buffer.size = 0
        # The builder below calls `Pack` of each buffer. The schema's own would not align the bytes.
        buffer.Pack = functools.partial(_aligned, buffer)

    builder = flatbuffers.Builder(len(content))
    builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
    return bytes(builder.Output())


def _aligned(buffer: BufferT, builder: Builder) -> int:
    """Write a buffer of a .tflite file so that its bytes begin at a multiple of 16.

    Args:
        buffer: The buffer, as a record of the file.
        builder: The writer of the whole file.

    Returns:
        The offset of the buffer in the file.
    """
    if buffer.data is not None:
        builder.Prep(_ALIGNED, len(buffer.data))
    return int(type(buffer).Pack(buffer, builder))


def open(file: Path, *, inside: bool = False) -> Runs:
    """Open a .tflite file in LiteRT, and return a function that runs it.

    The function takes the file's input tensors and returns its output tensors.
    It runs on the CPU. XNNPACK computes the operators that it has. With `inside`, LiteRT computes
    all of them.

    Args:
        file: The path of the file.
        inside: Whether the function returns all values that the file computes, not only its
            outputs.
    """
    # Refuse a file that takes weights from other files.
    _model(file)
    with silent():
        from ai_edge_litert.interpreter import Interpreter, OpResolverType

        kernels = (
            OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES if inside else OpResolverType.AUTO
        )
        engine = Interpreter(
            str(file),
            num_threads=torch.get_num_threads(),
            experimental_op_resolver_type=kernels,
            experimental_preserve_all_tensors=inside,
        )
        engine.allocate_tensors()
    inputs = [entry["index"] for entry in engine.get_input_details()]
    outputs = engine.get_tensor_details() if inside else engine.get_output_details()

    def runs(*tensors: Tensor) -> list[Tensor]:
        for index, x in zip(inputs, tensors, strict=True):
            engine.set_tensor(index, x.numpy())
        engine.invoke()
        values = [
            _real(engine.get_tensor(entry["index"]), entry["quantization"]) for entry in outputs
        ]
        # Inside of the file, channels are the last dimension of images. With `inside`, a copy of
        # each value with channels second is added, as the values of PyTorch have them.
        return values + [value.movedim(-1, 1) for value in values if inside and value.ndim == 4]

    return runs


def _real(value: np.ndarray, quantization: tuple[float, int]) -> Tensor:
    """Return the real numbers that a tensor of a .tflite file stands for: scale (value - zero).

    Args:
        value: The tensor, in int8 if the file is quantized.
        quantization: The scale and the zero of the tensor.
    """
    # The scale of a value that is not quantized is 0.
    scale, zero = quantization
    tensor = torch.as_tensor(value)
    return scale * (tensor.float() - zero) if scale else tensor


def _operator_name(entry: Any, kinds: dict[int, str]) -> str:
    """Return the name of a kind of operator in a .tflite file, such as CONV_2D.

    A custom operator states its own name. The schema names all others.

    Args:
        entry: The kind, in the file's table of kinds.
        kinds: The schema's names of kinds, by number.
    """
    if entry.customCode:
        return str(entry.customCode.decode())
    # Older files have the number in the deprecated field alone, with 0 in the other.
    return kinds[max(entry.builtinCode, entry.deprecatedBuiltinCode)]


def nodes(file: Path) -> dict[str, int]:
    """Return how many operators of each kind a .tflite file has, the most frequent kind first."""
    from ai_edge_litert import schema_py_generated as schema

    model = _model(file)
    kinds = {
        number: name
        for name, number in vars(schema.BuiltinOperator).items()
        if isinstance(number, int)
    }
    # Each operator of a graph names its kind by an index into the file's table of kinds.
    table = [_operator_name(entry, kinds) for entry in model.operatorCodes]
    return counted(
        table[entry.opcodeIndex] for graph in model.subgraphs for entry in graph.operators
    )


def metadata(file: Path) -> dict[str, str]:
    """Return the texts that `export` stored in a .tflite file as metadata, by their keys.

    An example is the name of the source network, with the key `source`.
    """
    model = _model(file)
    contents = (
        model.buffers[entry.buffer].data
        for entry in model.metadata or []
        if entry.name == _METADATA.encode()
    )
    # A file of another program has no such entry.
    text = bytes(next(contents, b"{}")).decode("utf-8")
    return {name: str(value) for name, value in reading.parse_object(text).items()}


def _model(file: Path) -> ModelT:
    """Return the parsed content of a .tflite file, which is not run.

    Raises:
        SourceError: The file takes weights from other files.
        ValueError: The file is no LiteRT file.
    """
    from ai_edge_litert import schema_py_generated as schema

    content = file.read_bytes()
    if content[4:8] != b"TFL3":
        raise ValueError("it does not begin as such files do")
    model = schema.ModelT.InitFromPackedBuf(bytearray(content))
    # Newer files may take weights from other files by name; `export` writes none of those.
    if getattr(model, "externalBufferGroups", None):
        raise SourceError(f"{file} takes its weights from other files", remedy="Put them into it")
    return model
