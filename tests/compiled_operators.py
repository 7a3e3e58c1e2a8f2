"""What a runtime runs, once it has compiled a file: which operators, on what shapes. No clock is needed to compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from normswap.models.weight_files import quiet


def onnxruntime(file: Path) -> Counter[str]:
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

    def described(node: onnx.NodeProto) -> str:
        attributes = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
        return f"{node.op_type} {sorted(attributes.items())} {[shapes.get(name) for name in node.input]}"

    return Counter(map(described, graph.node))


def openvino(file: Path) -> Counter[str]:
    """Of the graph that OpenVINO's CPU plugin runs: what it calls a layer, its kernel and what it gives."""
    import openvino as ov

    def described(node: ov.Node) -> str:
        says = {key: getattr(value, "value", value) for key, value in node.get_rt_info().items()}
        keys = ("layerType", "primitiveType", "outputPrecisions")
        return f"{says['layerType']} {[says[key] for key in keys]} {node.get_output_partial_shape(0)}"

    model = ov.Core().compile_model(file, "CPU").get_runtime_model()
    return Counter(described(node) for node in model.get_ordered_ops() if node.get_output_size())


def torchscript(file: Path) -> Counter[str]:
    """Of a frozen graph, optimized for inference."""
    with quiet():
        model = torch.jit.optimize_for_inference(torch.jit.load(file))
    return Counter(node.kind() for node in model.inlined_graph.nodes())


COMPILED: Mapping[str, tuple[str, Callable[[Path], Counter[str]]]] = {
    "onnxruntime": ("onnx", onnxruntime),
    "openvino": ("onnx", openvino),
    "torchscript": ("torchscript", torchscript),
}
"""By runtime: the kind of file it opens, and what it makes of it."""
