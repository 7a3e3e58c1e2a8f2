"""Opening a file in ONNX Runtime: seconds until the network can run, and the memory it takes while it runs.

    python tests/lab/benchmarks/loading.py -o tests/lab/benchmarks/loading.md

`plain` is torch's own ONNX export of timm's network (weights beside the graph, as it writes them), `onnx` and
`onnx-data` are ours. Each opening is a process of its own, in turns, one thread, one image of 224 pixels; files were
read before, so that no disk is timed. MiB are above what the process took before the file was opened: the most while it
was opened, and while it ran. Weights are random.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import circumstances
import onnxruntime
import runtimes
from rich.progress import track

import normswap
from normswap.benchmarking.runtimes import Settings
from normswap.benchmarking.subjects import Making, of_model
from normswap.exporting import exporter, sidecar

MODELS = ("resnet18", "resnet50", "mobilenetv2_100", "resnetv2_50", "nf_resnet50")
FORMS = ("plain", "onnx", "onnx-data")
HEAD = (
    "| network | plain, s | onnx, s | onnx-data, s | plain / data | onnx / data | opening: plain, MiB | onnx | "
    "onnx-data | running: plain, MiB | onnx | onnx-data |"
)
OPENED = """
import json, sys, time
import numpy, onnxruntime
from normswap.benchmarking.worker import reset_peak, resident
options = onnxruntime.SessionOptions()
options.intra_op_num_threads, options.log_severity_level = 1, 4
before = resident(peak=False)
reset_peak("cpu")
start = time.perf_counter()
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
seconds, opening = time.perf_counter() - start, resident(peak=True)
reset_peak("cpu")
for _ in range(3):
    session.run(None, {session.get_inputs()[0].name: numpy.zeros((1, 3, 224, 224), numpy.float32)})
print(json.dumps([seconds, opening - before, resident(peak=True) - before]))
"""


def files(name: str, folder: Path) -> dict[str, Path]:
    model = runtimes.alive(name, 224)
    making = Making(folder, Settings(), [1], exporter.export, sidecar.read)
    found = {"plain": of_model(name, model, making, 224).subjects[0].file("onnx")}
    for form in FORMS[1:]:
        (folder / form).mkdir()
        found[form] = normswap.export(model, folder / form / "net.onnx", format=form, input_size=(3, 224, 224)).file
    return found


def opened(file: Path) -> list[float]:
    """Seconds, and MiB while it opens and while it runs."""
    done = subprocess.run([sys.executable, "-c", OPENED, str(file)], capture_output=True, text=True, check=True)
    return [float(value) for value in json.loads(done.stdout)]


def line(name: str, runs: Sequence[Sequence[Sequence[float]]]) -> str:
    """Medians over rounds, and the median of the ratios within a round."""
    columns = [
        [statistics.median(run[form][value] for run in runs) for form in range(len(FORMS))] for value in (0, 1, 2)
    ]
    seconds = " | ".join(f"{value:.2f}" for value in columns[0])
    memory = " | ".join(f"{value:.0f}" for column in columns[1:] for value in column)
    sooner = [statistics.median(run[form][0] / run[2][0] for run in runs) for form in (0, 1)]
    return f"| {name} | {seconds} | {sooner[0]:.2f} | {sooner[1]:.2f} | {memory} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("-o", "--output", type=Path, help="Markdown file")
    args = parser.parse_args()
    command = " ".join(["python", "tests/lab/benchmarks/loading.py", *sys.argv[1:]])
    lines = ["# Opening a file in ONNX Runtime: weights in it, or beside it", "", *circumstances.lines(command, "cpu")]
    lines += [f"onnxruntime {onnxruntime.__version__}; {args.rounds} rounds, medians."]
    lines += [" ".join((__doc__ or "").split("\n\n")[2].split()), "", HEAD, "|---" * 12 + "|"]
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            made = files(name, Path(folder))
            rounds = track(range(args.rounds + 1), name, transient=True)
            runs = [[opened(made[form]) for form in FORMS] for _ in rounds][1:]
        lines.append(line(name, runs))
        print(lines[-1], flush=True)
    if args.output:
        args.output.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
