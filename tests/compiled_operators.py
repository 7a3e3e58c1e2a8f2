"""What a runtime runs, once it has compiled a file: which operators, on what shapes. No clock is needed to compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from normswap.benchmarking.forms import Making, of_model
from normswap.benchmarking.runtimes import Settings
from normswap.exporting import exporter, sidecar
from normswap.models.weight_files import quiet


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
    making = Making(folder, Settings(), [batch], exporter.export, sidecar.read)
    forms = of_model(name, model, making, side).forms
    for runtime, (kind, operators) in COMPILED.items():
        yield Compared(runtime, *(operators(forms[which].make[kind]()) for which in (0, -1)))


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


def torchscript(file: Path) -> Counter[Operator]:
    """Of a frozen graph, optimized for inference."""
    with quiet():
        model = torch.jit.optimize_for_inference(torch.jit.load(file))
    return Counter(Operator(node.kind()) for node in model.inlined_graph.nodes())


COMPILED: Mapping[str, tuple[str, Callable[[Path], Counter[Operator]]]] = {
    "onnxruntime": ("onnx", onnxruntime),
    "openvino": ("onnx", openvino),
    "torchscript": ("torchscript", torchscript),
}
"""By runtime: the kind of file it opens, and what it makes of it."""
