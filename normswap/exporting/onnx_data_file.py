"""ONNX with its weights in a file of their own, FILE.onnx.data, as torch.onnx writes them.

ONNX Runtime maps such weights into memory where it copies those that lie in the graph: a network opens sooner and takes
less (tests/lab/benchmarks/loading.md). They may be more than the 2 GiB that protobuf allows a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from normswap.exporting import onnx_file
from normswap.exporting.exported_module import FileContents

NAME = "onnx-data"
NEEDS = onnx_file.NEEDS
GRAPH = True
PARTS = (".onnx.data",)
NOTES: Mapping[str, str] = {}
metadata, nodes, open = onnx_file.metadata, onnx_file.nodes, onnx_file.open


def write(contents: FileContents, file: Path) -> None:
    """See `formats.Format.write`. The graph names the other file, so that neither can be renamed alone."""
    import onnx

    model = onnx_file.graph(contents)
    data = file.with_suffix(PARTS[0])
    onnx.save_model(model, file, save_as_external_data=True, location=data.name)
    data.touch()  # onnx leaves tensors of less than 1 KiB in the graph, and all of a small network's may be
    onnx_file.check(file)
