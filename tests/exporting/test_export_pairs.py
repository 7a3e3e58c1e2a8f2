"""Every option of `export` beside every other: the file answers as float64 says it should, or a
line says why not.

The reference is the network that the command was given, in float64, on images that are prepared
here.
"""

import itertools
import json
from pathlib import Path
from typing import NamedTuple

import pytest
import timm
import torch
from support.command_line import MODEL, here, made_or_refused, options_of
from support.sampled_tables import sampled

from normswap import shipped
from normswap.exporting import formats

__all__ = ["here"]  # a fixture


class Option(NamedTuple):
    """One option with a value.

    Args:
        words: as they are typed.
        int8: whether it is of int8.
        changes: whether the network is another than MODEL.
    """

    words: tuple[str, ...]
    int8: bool = False
    changes: bool = False

    def __str__(self) -> str:
        return " ".join(self.words).lstrip("-").replace(" ", "=")


INT8 = (
    "--precision",
    "int8",
    "--calibrate",
    "demo",
    "--calibrate-samples",
    "16",
    "--samples",
    "100",
)
OPTIONS = (
    *(Option(("--format", name)) for name in ("onnx", "openvino", "pt2")),
    Option(("--precision", "fp16")),
    Option(("--precision", "bf16")),
    Option(INT8, int8=True),
    Option(("--weight-bits", "8"), int8=True),
    Option(("--calibrate-samples", "8"), int8=True),
    Option(("--dynamic-batch",)),
    Option(("--normalize",)),
    Option(("--softmax",)),
    Option(("--force",)),
    Option(("--data", "demo")),
    Option(("--workers", "1")),
    Option(("--split", "test")),
    Option(("--device", "cpu")),
    Option(("--weights", "random"), changes=True),
    Option(("--arch", "resnet18")),
    Option(("--num-classes", "3"), changes=True),
    Option(("--in-chans", "1"), changes=True),
    Option(("--input-size", "3,48,48")),
    Option(("--image-mean", "0.4,0.4,0.4")),
    Option(("--image-std", "0.2,0.2,0.2")),
    Option(("--crop-pct", "1.0")),
    Option(("--interpolation", "bilinear")),
)
# what every pair has, and what other tests are for
APART = {
    "--output",
    "--json",
    "--calibrate",
    "--samples",
    "--arch-arg",
    "--trust-factory",
    "--input",
}
ENDINGS = {"onnx": "onnx", "openvino": "xml", "pt2": "pt2"}
PAIRS = [
    (one, two) for one, two in itertools.combinations(OPTIONS, 2) if one.words[0] != two.words[0]
]
ALLOWED = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 4e-2, "int8": 0.6}  # relative L2 of the answers


def test_every_option_is_among_them() -> None:
    assert {one.words[0] for one in OPTIONS} == options_of("export") - APART


def both(pair: tuple[Option, Option]) -> str:
    return f"{pair[0]} {pair[1]}"


SLOW, QUICK = (
    [pair for pair in PAIRS if any(one.int8 for one in pair) is slow] for slow in (True, False)
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair", sampled(SLOW, 96, ids=both) + sampled(QUICK, 29, ids=both), ids=both
)
def test_two_options_of_export(
    pair: tuple[Option, Option], here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [word for one in pair for word in one.words]
    if any(one.int8 for one in pair) and "--precision" not in words:
        words += INT8
    quantized = "int8" in words
    form = next(
        (one.words[1] for one in pair if one.words[0] == "--format"), "onnx" if quantized else "pt2"
    )
    if "--format" not in words:
        words += ["--format", form]
    file = here / f"out.{ENDINGS[form]}"
    told = made_or_refused(capfd, here, "export", MODEL, *words, "-o", file.name)
    if told is None:
        return

    precision = "int8" if quantized else next((w for w in ("fp16", "bf16") if w in words), "fp32")
    assert (told["format"], told["dtype"]) == (form, precision)
    assert told["dynamic_batch"] == ("--dynamic-batch" in words)
    assert told["noise_only"] == ("--data" not in words and not quantized)

    side = 48 if "3,48,48" in words else 64
    channels = 1 if "--in-chans" in words else 3
    count = 3 if "--dynamic-batch" in words else 1
    seed = torch.Generator().manual_seed(1)
    pixels = torch.rand(count, channels, side, side, generator=seed)
    config = json.loads((shipped.FOLDER / "config.json").read_text(encoding="utf-8"))[
        "pretrained_cfg"
    ]
    mean = torch.tensor([0.4] * 3 if "--image-mean" in words else config["mean"]).reshape(
        1, -1, 1, 1
    )
    std = torch.tensor([0.2] * 3 if "--image-std" in words else config["std"]).reshape(1, -1, 1, 1)
    images = (pixels - mean[:, :channels]) / std[:, :channels]
    got = formats.choose(file, None).open(file)(pixels if "--normalize" in words else images)

    assert got.shape == (len(pixels), 3 if "--num-classes" in words else 10)
    assert got.isfinite().all()

    if any(one.changes for one in pair):
        return

    wanted = (
        timm.create_model(f"local-dir:{MODEL}", pretrained=True)
        .double()
        .eval()(images.double())
        .detach()
    )
    if "--softmax" in words:
        wanted = wanted.softmax(-1)

    assert (got.double() - wanted).norm() < ALLOWED[precision] * wanted.norm()
