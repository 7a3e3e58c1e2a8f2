"""What a runtime runs, once it has compiled a file: which operators, on what shapes. No clock is needed to compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import normswap
from normswap.errors import quiet


class Operator(NamedTuple):
    """One of a graph: its kind, and what else the runtime says of it (attributes, shapes, types)."""

    kind: str
    how: str = ""


class Compared(NamedTuple):
    """What a runtime runs of timm's network, exported by torch, and of the folded one, exported by us."""

    runtime: str
    peer: Counter[Operator]
    ours: Counter[Operator]


def compared(name: str, model: nn.Module, folder: Path, *, batch: int, side: int) -> Iterator[Compared]:
    """In each of COMPILED, on `batch` images of `side` pixels; a batch of more than one is a free one."""
    dynamic = batch > 1
    example, shapes = torch.zeros(1 + dynamic, 3, side, side), ({0: torch.export.Dim("batch", min=1)},)
    folder.mkdir(parents=True, exist_ok=True)
    plain, ours = folder / f"{name}.onnx", folder / f"{name}_folded.onnx"
    with quiet(), torch.no_grad():
        dynamic_shapes = shapes if dynamic else None
        torch.onnx.export(model.eval(), (example,), plain, dynamo=True, verbose=False, dynamic_shapes=dynamic_shapes)
    normswap.export(model, ours, dynamic_batch=dynamic, input_size=(3, side, side), force=True)
    for runtime, operators in COMPILED.items():
        yield Compared(runtime, operators(plain), operators(ours))


def onnxruntime(file: Path) -> Counter[Operator]:
    """Of the graph that ONNX Runtime makes of an ONNX file, with all its optimizations."""
    import onnx
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    compiled = file.with_suffix(".compiled.onnx")
    options.optimized_model_filepath = str(compiled)
    ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    graph = onnx.load(compiled).graph
    shapes = {weight.name: [*weight.dims] for weight in graph.initializer}

    def described(node: onnx.NodeProto) -> Operator:
        attributes = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
        return Operator(node.op_type, f"{sorted(attributes.items())} {[shapes.get(name) for name in node.input]}")

    return Counter(map(described, graph.node))


def openvino(file: Path) -> Counter[Operator]:
    """Of the graph that OpenVINO's CPU plugin runs: what it calls a layer, its kernel and what it gives."""
    import openvino as ov

    def described(node: ov.Node) -> Operator:
        says = {key: getattr(value, "value", value) for key, value in node.get_rt_info().items()}
        how = f"{says['primitiveType']} {says['outputPrecisions']} {node.get_output_partial_shape(0)}"
        return Operator(says["layerType"], how)

    model = ov.Core().compile_model(file, "CPU").get_runtime_model()
    return Counter(described(node) for node in model.get_ordered_ops() if node.get_output_size())


COMPILED: Mapping[str, Callable[[Path], Counter[Operator]]] = {"onnxruntime": onnxruntime, "openvino": openvino}
"""By runtime: what it makes of an ONNX file."""
