"""A small ViT with LayerNorms, with RMSNorms and folded, in each runtime: operators and times.

    python tests/lab/benchmarks/layer_norms.py -o tests/lab/benchmarks/layer_norms.md

LayerNorms: timm's network, as it is. RMSNorms: `convert --to rmsnorm`, and folded as `export` does
it. Operators: those of the file, and in brackets those that the runtime runs, where it says so.
Times: the fastest of 40 calls with one image, the three networks in turn, on one thread. The
optional runtimes must be installed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import openvino
import timm
import torch
from kept import Kept, Row, arguments
from rich.progress import track
from torch import Tensor, nn

import normswap
from normswap.errors import NormswapError, first_line
from normswap.exporting import formats
from normswap.exporting.exported_module import FileContents, Shipped
from normswap.exporting.exporter import fold_for_export
from normswap.surgery.network import Network

NETWORKS = ("LayerNorms", "RMSNorms", "folded")


def networks() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    source = timm.create_model("vit_tiny_patch16_224", depth=4, num_classes=10).eval()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter += 0.02 * torch.randn_like(parameter)

    rms = normswap.convert(source, to="rmsnorm").model
    return dict(
        zip(
            NETWORKS,
            (source, fold_for_export(Network(rms)), fold_for_export(Network(source))),
            strict=True,
        )
    )


def run_by(name: str, file: Path) -> int | None:
    """How many operators the runtime runs, without constants."""
    if name == "onnx":
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = f"{file}.optimized"
        options.log_severity_level = 4
        onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        return len(onnx.load(f"{file}.optimized").graph.node)

    if name == "openvino":
        compiled = openvino.compile_model(file, "CPU").get_runtime_model()
        kinds = [operator.get_rt_info()["layerType"].astype(str) for operator in compiled.get_ops()]
        return sum(kind not in ("Const", "Input", "Output") for kind in kinds)

    return None


def in_format(name: str, networks: Iterable[nn.Module], x: Tensor) -> Row:
    """Files of one format: operators, and milliseconds where this system runs them."""
    form = formats.get(name)
    operators: list[Any] = []

    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for i, network in enumerate(networks):
            file = Path(folder) / f"network{i}{form.ending}"
            form.write(FileContents(Shipped(network), (x,)), file)
            nodes = form.functions.nodes(file)
            operators.append((sum(nodes.values()), run_by(name, file)))
            if form.runs_here:
                runs.append((network, form.open(file)))
        return {"operators": operators, "times": times(runs, x)}


def times(runs: list[tuple[nn.Module, Any]], x: Tensor) -> list[float]:
    """Milliseconds, after a look at whether the file answers as the network does."""
    fastest = [float("inf")] * len(runs)
    for network, run in runs:
        answer = run(x)
        with torch.no_grad():
            assert float((answer - network(x)).norm() / answer.norm()) < 0.02

    for _ in range(40):
        for i, (_, run) in enumerate(runs):
            start = time.perf_counter()
            run(x)
            fastest[i] = min(fastest[i], 1000 * (time.perf_counter() - start))

    return fastest


def line(name: str, row: Row) -> str:
    cells = [name]
    for count, run in row["operators"]:
        cells.append(f"{count} ({run})" if run else f"{count}")
    cells += [f"{value:.2f}" for value in row["times"]]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    args = arguments(__doc__).parse_args()
    kept = Kept(
        Path(__file__).resolve().parents[3] / "runs" / "layer_norms.jsonl", fresh=args.fresh
    )
    columns = (
        "format",
        *(f"{name}: operators" for name in NETWORKS),
        *(f"{name}: ms" for name in NETWORKS),
    )
    x = torch.randn(1, 3, 224, 224)

    lines = ["", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name in track(formats.names(), transient=True):
        try:
            row = kept.get((name,), lambda name=name: in_format(name, networks().values(), x))
            lines.append(line(name, row))
        except NormswapError as error:
            lines.append(f"| {name} | {first_line(error)} |")

    kept.write(args.output, "LayerNorms, RMSNorms and folded norms in the runtimes", lines)


if __name__ == "__main__":
    main()
