"""Each format beside its tool's plain way, for networks whose norms a tool folds, leaves or splits its graph at.

    python tests/lab/benchmarks/everywhere.py -o tests/lab/benchmarks/everywhere.md [--network NAME] [--format NAME]

Needs the packages of the formats (`normswap[export,bench,ncnn,executorch,litert,coreml]`); the others are left out, and
so is YOLO without `ultralytics`. Rows are kept in runs/everywhere.jsonl: another run adds those that are missing.

`plain` is the network as it is, through the same tool; `ours` is what `normswap export` writes. The answers are those
to the demo's photographs, in each file's own runtime. Errors are the largest of any number that comes out, against the
network in float64 as it is, over the largest such number; `same` counts answers (per pixel for the U-Nets). Operators
are those in the file, without constants; those of ExecuTorch are parts, each computed by XNNPACK as a whole, and what
is computed one by one beside them. Core ML's packages are written, not run. Milliseconds of the processor's time: one
image, one thread, all of a row in turns, the best of the rounds, so that others on the machine count little; `ORT` is
our ONNX file of the same network in ONNX Runtime. The resnet18 is the demo's; its weights are trained, and so
are those of `zoo_networks`: MobileNetV2, the VGG-like network with its norms after the activations, the U-Net, the 3-D
network and the ViT. The U-Net with transposed convolutions and YOLO (yolov8n at 160 px; `same` counts places with the
same class) have random ones, with statistics of the photographs. `nf` is the demo's network, converted to
Scaled Weight Standardization. The ViT's plain way has LayerNorms, ours RMSNorm. Ten minutes.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import zoo_networks
from kept import Kept
from lived import calm, lived_in
from rich.progress import track
from torch import Tensor, nn

import normswap
from normswap.errors import NormswapError, first_line
from normswap.exporting import formats
from normswap.exporting.exported_module import FileContents, Shipped
from normswap.images import datasets
from normswap.models.network_input import answer
from normswap.storage.checkpoint import open_model

KEPT = Path(__file__).resolve().parents[3] / "runs" / "everywhere.jsonl"
FORMATS = {
    "onnx": "onnx", "openvino": "xml", "executorch": "pte", "ncnn": "param", "litert": "tflite", "coreml": "mlpackage",
}  # fmt: skip
PACKAGES = (
    "onnxruntime", "openvino", "executorch", "ncnn", "pnnx", "litert-torch", "ai-edge-litert", "coremltools",
    "ultralytics",
)  # fmt: skip
IMAGES, ROUNDS, SECONDS = 100, 15, 0.02
HEAD = (
    "| network | format | plain operators | ours | plain alone | ours alone | plain error | our error | same, ours | "
    "KB plain | KB ours | plain ms | our ms | ORT ms |"
)


class UNet(nn.Module):
    """Transposed convolutions with a BatchNorm behind each; classes per pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU())
        self.up = nn.Sequential(nn.ConvTranspose2d(32, 16, 2, 2), nn.BatchNorm2d(16), nn.ReLU())
        self.out = nn.Sequential(nn.ConvTranspose2d(32, 16, 2, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        down = self.down(x)
        return self.out(torch.cat([down, self.up(self.deep(down))], 1))


@dataclass(frozen=True)
class Case:
    """A network, what is exported of it, and the photographs that it is asked about."""

    name: str
    source: nn.Module
    ours: nn.Module
    images: Tensor
    scores: int = 0  # of an answer's channels, the first that says of a class

    @functools.cached_property
    @torch.no_grad()
    def wanted(self) -> Tensor:
        """The answers of the network as it is, in float64."""
        twin = copy.deepcopy(self.source).double()
        return torch.cat([answer(twin(x)) for x in self.images.double().split(20)])

    def classes(self, answers: Tensor) -> Tensor:
        return answers[:, self.scores :].argmax(1)

    @property
    def asked(self) -> dict[str, Any]:
        """Options of `export`."""
        shape = tuple(self.images.shape[1:])
        return {"input_size": shape} if len(shape) == 3 else {"inputs": self.images[:2]}


def photographs(model: nn.Module, count: int = IMAGES) -> Tensor:
    return torch.cat([x for x, _ in datasets.make_loader(model, "demo", samples=count, workers=0, labelled=False)])


class Detector(nn.Module):
    """Boxes and their scores, of what Ultralytics' network gives."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        boxes: Tensor = self.network(x)[0]
        return boxes


def yolo(photos: Tensor) -> nn.Module | None:
    """yolov8n with random weights; None where Ultralytics' package is not there."""
    try:
        from ultralytics import YOLO
    except ImportError:
        return None
    torch.manual_seed(0)
    return calm(Detector(YOLO("yolov8n.yaml", verbose=False).model), photos[:16].double()).float()


def cases() -> Iterator[Case]:
    demo = open_model("demo").float()
    pictures = photographs(demo)
    yield Case("resnet18", demo, demo, pictures)
    plain = zoo_networks.trained("plain")
    small = photographs(plain)
    for name, kind in (("mobilenetv2", "depthwise"), ("conv, ReLU, BN", "plain_norm_after")):
        model = zoo_networks.trained(kind)
        yield Case(name, model, model, small)
    torch.manual_seed(0)
    unet = lived_in(UNet(), pictures[:64].double()).float()
    yield Case("U-Net, transposed", unet, unet, pictures)
    upsampled = zoo_networks.trained("unet")
    yield Case("U-Net", upsampled, upsampled, small)
    large = nn.functional.interpolate(pictures, 160, mode="bilinear")
    if detector := yolo(large):
        yield Case("YOLO", detector, detector, large, scores=4)
    solid = zoo_networks.trained("three_d")
    yield Case("3-D", solid, solid, zoo_networks.Clip()(small))
    nf = normswap.convert(demo, "nf", mean="keep").model.eval()
    yield Case("nf", nf, nf, pictures)
    vit = zoo_networks.trained("vit")
    yield Case("ViT, rmsnorm", vit, normswap.convert(vit, "rmsnorm").model.eval(), small)


@dataclass(frozen=True)
class Made:
    """A file and what came of it; `refused`: the tool's own words where there is none."""

    runs: formats.Runs | None = None
    nodes: dict[str, int] | None = None
    kilobytes: float = 0
    error: float = 0
    same: str = ""
    refused: str = ""

    @property
    def operators(self) -> str:
        if self.nodes is None:
            return "refused"
        delegated = self.nodes.get("XnnpackBackend")
        count = sum(self.nodes.values())
        return f"{delegated} + {count - delegated}" if delegated is not None else str(count)


@torch.no_grad()
def made(write: Callable[[Path], object], form: formats.Format, file: Path, case: Case) -> Made:
    """The file, measured on the photographs against the network in float64, where this system runs it."""
    file.parent.mkdir()
    try:
        write(file)
        if not form.runs_here:
            return Made(nodes=form.nodes(file), kilobytes=form.size(file) / 1e3)
        runs = form.open(file)
        found = torch.cat([answer(runs(x[None])) for x in case.images])
    except NormswapError as error:
        return Made(refused=f"{error.what}: {error.why}" if error.why else error.what)
    except Exception as error:  # each runtime has its own
        return Made(refused=first_line(error))
    off = float((found.double() - case.wanted).abs().max() / case.wanted.abs().max())
    same = case.classes(found) == case.classes(case.wanted)
    return Made(runs, form.nodes(file), form.size(file) / 1e3, off, f"{int(same.sum())} of {same.numel()}")


def more(one: Made, other: Made) -> str:
    """Operators that the other file has not."""
    if one.nodes is None or other.nodes is None:
        return ""
    more = {kind: count - other.nodes.get(kind, 0) for kind, count in one.nodes.items()}
    return ", ".join(f"{count} {kind}" for kind, count in more.items() if count > 0)


@torch.no_grad()
def milliseconds(contenders: dict[str, formats.Runs], image: Tensor) -> dict[str, float]:
    """Of a pass, the best of several rounds in which all take turns."""
    best = dict.fromkeys(contenders, float("inf"))
    for runs in contenders.values():
        runs(image)
    for _ in range(ROUNDS):
        for name, runs in contenders.items():
            start, count = time.process_time(), 0
            while time.process_time() - start < SECONDS:
                runs(image)
                count += 1
            best[name] = min(best[name], 1000 * (time.process_time() - start) / count)
    return best


def ours(case: Case, name: str, folder: Path) -> Made:
    return made(
        lambda file: normswap.export(case.ours, file, **case.asked),
        formats.get(name), folder / name / f"net.{FORMATS[name]}", case,
    )  # fmt: skip


def traced(case: Case) -> torch.jit.ScriptModule:
    network = Shipped(copy.deepcopy(case.source))
    return torch.jit.trace(network, case.images[:1], check_trace=False)  # type: ignore[no-any-return]


def plain(case: Case, name: str, file: Path) -> None:
    """The file that the tool makes of the network as it is."""
    if name == "executorch":
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        program = torch.export.export(case.source, (case.images[:1],))
        file.write_bytes(
            to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch().buffer
        )
    elif name == "ncnn":
        import pnnx

        traced(case).save(file.with_suffix(".pt"))
        subprocess.run(
            [pnnx.EXEC_PATH, file.with_suffix(".pt"), "fp16=0"], cwd=file.parent, check=True, capture_output=True
        )
        for ending in (".param", ".bin"):
            file.with_suffix(f".ncnn{ending}").rename(file.with_suffix(ending))
    elif name == "coreml":
        import coremltools as ct

        took = [ct.TensorType(shape=case.images[:1].shape)]
        ct.convert(traced(case), inputs=took, compute_precision=ct.precision.FLOAT32, skip_model_load=True).save(
            str(file)
        )
    else:
        formats.get(name).write(FileContents(Shipped(case.source), (case.images[:1],)), file)


def line(case: Case, name: str, folder: Path, beside: Made) -> tuple[str, list[str]]:
    form, ending = formats.get(name), FORMATS[name]
    tools = made(lambda file: plain(case, name, file), form, folder / "plain" / f"net.{ending}", case)
    own = ours(case, name, folder)
    known = {"plain": tools.runs, "ours": own.runs, "ORT": beside.runs}
    took = milliseconds({who: runs for who, runs in known.items() if runs}, case.images[:1])
    cells = [case.name, name, tools.operators, own.operators, more(tools, own), more(own, tools)]
    cells += [f"{one.error:.0e}" if one.runs else "" for one in (tools, own)]
    cells += [own.same, *(f"{one.kilobytes:.0f}" if one.kilobytes else "" for one in (tools, own))]
    cells += [f"{took[who]:.2f}" if who in took else "" for who in known]
    said = [f"- {case.name} in {name}, {who}: {one.refused}"
            for who, one in (("plain", tools), ("ours", own)) if one.refused]  # fmt: skip
    return f"| {' | '.join(cells)} |", said


def versions() -> str:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package).partition('-')[0]}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


def one_thread() -> None:
    torch.set_num_threads(1)
    try:
        from executorch.extension.pybindings import portable_lib
    except ImportError:
        return
    portable_lib._unsafe_reset_threadpool(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="append", help="of these alone")
    parser.add_argument("--fresh", action="store_true", help="measure again what was kept")
    parser.add_argument("--format", action="append", choices=FORMATS, help="in these alone")
    parser.add_argument("-o", "--output", type=Path, help="Markdown file")
    args = parser.parse_args()
    one_thread()
    kept = Kept(KEPT, fresh=args.fresh)
    wanted = [case for case in cases() if not args.network or case.name in args.network]
    for case in track(wanted, transient=True):
        missing = [name for name in args.format or FORMATS if (case.name, name) not in kept.rows]
        with tempfile.TemporaryDirectory() as folder:
            beside = ours(case, "onnx", Path(folder)) if missing else Made()
        for name in missing:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    row, said = line(case, name, Path(folder), beside)
                except NormswapError as error:  # a package is not there
                    print(f"- {name}: {error.what}")
                    continue
            kept.add((case.name, name), row=row, refused=said, load=os.getloadavg()[0])
            print(row, *said, sep="\n", flush=True)
    if args.output:
        rows = [kept.rows[key] for case in wanted for name in FORMATS if (key := (case.name, name)) in kept.rows]
        loads = [row["load"] for row in rows]
        made = f"{versions()}; {IMAGES} photographs; load {min(loads):.1f} to {max(loads):.1f} after each row"
        lines = [HEAD, "|---" * HEAD.count(" | ") + "|---|", *(row["row"] for row in rows)]
        refused = list(dict.fromkeys(reason for row in rows for reason in row["refused"]))
        if refused:
            lines += ["", "Refused, in the tools' own words:", "", *refused]
        kept.write(args.output, "Each format beside its tool's plain way", ["", about(), "", *lines], made)


def about() -> str:
    """The table's words on itself."""
    return " ".join((__doc__ or "").split("\n\n")[3].split())


if __name__ == "__main__":
    main()
