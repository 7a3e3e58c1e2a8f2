"""LiteRT: a folded network runs in a process that has its interpreter alone; what it cannot hold is
said in a line.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from support import needs
from support.hand_written_networks import Anchored, Spectrum
from support.lived_in_networks import calm, distance, living, run
from support.runtime_process import run_alone
from torch import Tensor, nn

import normswap
from normswap.errors import NormswapError, VerificationError
from normswap.exporting import formats, litert_file
from normswap.exporting.exported_file import ExportedFile
from normswap.images.datasets import make_loader
from normswap.storage import checkpoint

needs.need("litert_torch")
SMALL = {"channels": [8, 16, 32, 64], "stem_width": 4, "num_classes": 10}
ARITHMETIC = ("ADD", "SUB", "MUL", "DIV")  # what a norm that stays becomes


class UNet(nn.Module):
    """Transposed convolutions whose norms come after them, and one after the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.BatchNorm2d(8))
        self.deep = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.up = nn.Sequential(nn.ConvTranspose2d(16, 8, 2, 2), nn.BatchNorm2d(8), nn.ReLU())
        self.out = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        down = self.down(x)
        return self.out(torch.cat([down, self.up(self.deep(down))], 1))


class Two(nn.Module):
    """Two inputs, two outputs, in an order that is not the alphabet's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, view: Tensor, other: Tensor) -> dict[str, Tensor]:
        x = self.norm(self.conv(view))
        return {"wide": x, "narrow": (x * other).mean((2, 3))}


def arithmetic(nodes: dict[str, int]) -> dict[str, int]:
    return {kind: count for kind, count in nodes.items() if kind in ARITHMETIC}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize(
    ("name", "args"), [("resnet10t", SMALL), ("mobilenetv2_035", {"num_classes": 10})]
)
def test_a_network_alone(name: str, args: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 64, 64)
    model = calm(timm.create_model(name, **args), x).float()
    done = normswap.export(
        model, tmp_path / "net.tflite", dtype=dtype, images=x, input_size=(3, 64, 64)
    )

    assert (done.format, set(arithmetic(done.nodes))) == ("litert", {"ADD"})  # of the branches

    weights = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert done.bytes < weights * {"fp32": 4, "fp16": 2}[dtype] + 150_000
    assert (
        distance(run(model, x), run_alone(done.file, "litert", x))
        <= {"fp32": 1e-5, "fp16": done.figures.tolerance}[dtype]
    )


@pytest.mark.slow
def test_a_unet_keeps_the_scale_and_shift_behind_its_activation_alone(tmp_path: Path) -> None:
    model, x = living(UNet(), 3, 16, 16)
    done = normswap.export(model, tmp_path / "net.tflite", images=x, input_size=(3, 16, 16))
    assert arithmetic(done.nodes) == {"MUL": 1, "ADD": 1}
    assert distance(run(model, x), run_alone(done.file, "litert", x)) <= 1e-5


@pytest.mark.slow
def test_three_dimensions(tmp_path: Path) -> None:
    layers = (
        nn.Conv3d(1, 4, 3, padding=1),
        nn.BatchNorm3d(4),
        nn.ReLU(),
        nn.Conv3d(4, 6, 3),
        nn.BatchNorm3d(6),
    )
    model, x = living(nn.Sequential(*layers), 1, 6, 8, 7)
    done = normswap.export(model, tmp_path / "net.tflite", inputs=x)

    assert (done.figures.passed, done.figures.count) == (True, 3)
    assert arithmetic(done.nodes) == {"ADD": 2}  # its 3-D convolution has no bias


def test_inputs_and_outputs_have_their_names(tmp_path: Path) -> None:
    model = Two().eval()
    inputs = (torch.randn(1, 3, 8, 8), torch.randn(1, 4, 6, 6))
    done = normswap.export(model, tmp_path / "net.tflite", inputs=inputs)
    from ai_edge_litert.interpreter import Interpreter

    runner = Interpreter(str(done.file), num_threads=1).get_signature_runner()
    found = runner(view=inputs[0].numpy(), other=inputs[1].numpy())
    wanted = run(model, *inputs)
    assert set(found) == {"wide", "narrow"}
    for name, value in found.items():
        assert np.abs(value - wanted[name].numpy()).max() < 1e-5


def test_no_run_computes_what_depends_on_no_input(tmp_path: Path) -> None:
    model, x = living(Anchored(), 3, 16, 12)
    done = normswap.export(model, tmp_path / "net.tflite", input_size=(3, 16, 12))
    assert not set(done.nodes) & {"BROADCAST_TO", "RANGE", "CONCATENATION", "PACK"}
    assert distance(run(model, x), run_alone(done.file, "litert", x)) <= 1e-6


def test_weights_begin_where_processors_want_them(tmp_path: Path) -> None:
    model, x = living(nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5)), 3, 8, 8)
    done = normswap.export(model, tmp_path / "net.tflite", images=x, input_size=(3, 8, 8))
    from ai_edge_litert import schema_py_generated as schema

    content = np.fromfile(done.file, np.uint8)
    held = schema.Model.GetRootAs(content)
    buffers = [
        held.Buffers(i).DataAsNumpy()
        for i in range(held.BuffersLength())
        if held.Buffers(i).DataLength()
    ]
    assert len(buffers) > 3
    assert {(one.ctypes.data - content.ctypes.data) % 16 for one in buffers} == {0}


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (nn.Conv2d(3, 4, 3), {"dynamic_batch": True}, "one image at a time"),
        (nn.Conv2d(3, 4, 3), {"dtype": "bf16"}, "not written in bf16"),
        (nn.Conv2d(3, 4, 3), {"dtype": "int8", "weight_bits": 7}, "litert has them of 8"),
        (Spectrum(nn.Conv2d(3, 4, 3)), {}, "LiteRT cannot express the network: torch.complex64"),
    ],
    ids=["any number", "bf16", "7 bits", "complex"],
)
def test_what_it_cannot_hold_is_said(
    model: nn.Module, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(NormswapError, match=reason):
        normswap.export(model.eval(), tmp_path / "net.tflite", input_size=(3, 8, 8), **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_int8_computes_on_bytes_and_keeps_the_answers(tmp_path: Path) -> None:
    demo = checkpoint.open_model("demo")
    images = make_loader(demo, "demo", samples=100, workers=0)
    calibrate = make_loader(demo, "demo", samples=64, seed=1, workers=0)
    file = tmp_path / "demo.tflite"
    done = normswap.export(demo, file, dtype="int8", images=images, calibrate=calibrate)

    assert done.quantized is not None
    assert (done.quantized["weight_bits"], done.nodes["QUANTIZE"], done.nodes["DEQUANTIZE"]) == (
        8,
        1,
        1,
    )
    assert done.bytes < 4 * 0.3 * sum(p.numel() for p in demo.parameters())

    x = torch.cat([batch[0] for batch in images])
    found = run_alone(file, "litert", x)
    wanted = run(demo, x)

    assert int((found.argmax(1) == wanted.argmax(1)).sum()) >= 97
    assert 1e-3 < distance(wanted, found) < 0.04  # ranges that the tool averages: 0.11

    exported = ExportedFile.find(str(file))
    assert exported is not None
    assert exported.precision == "int8"


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "net.tflite"
    file.write_bytes(b"\0\0\0\0nothing at all")
    with pytest.raises(
        NormswapError, match="no readable litert file: it does not begin as such files do"
    ):
        ExportedFile.find(str(file))
    with pytest.raises(VerificationError, match="LiteRT cannot run it"):
        formats.get("litert").open(file)


def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    normswap.export(nn.Conv2d(3, 4, 3).eval(), tmp_path / "net.tflite", input_size=(3, 8, 8))
    assert capfd.readouterr() == ("", "")


def test_ranges_are_those_of_all_images() -> None:
    class Tool:
        def calibrate(self, given: dict[str, Sequence[dict[str, np.ndarray]]]) -> Any:
            (one,) = given["serving_default"]
            return {
                "x": {
                    "min": one["args_0"].min(keepdims=True),
                    "max": one["args_0"].max(keepdims=True),
                }
            }

    images: list[Tensor] = [
        torch.tensor(values) for values in ([-1.0, 2.0], [-5.0, 1.0], [0.0, 7.0], [0.5, 0.6])
    ]
    extremes = litert_file._extremes(Tool(), images)  # type: ignore[arg-type]
    assert (extremes["x"]["min"].tolist(), extremes["x"]["max"].tolist()) == ([-5], [7])
