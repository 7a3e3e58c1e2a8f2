"""ExecuTorch: a folded network runs in XNNPACK, in a process without normswap; what it cannot hold
is said.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from support import needs
from support.hand_written_networks import Anchored
from support.lived_in_networks import calm, distance, lived_in, living, run
from support.runtime_process import run_alone
from torch import nn

import normswap
from normswap.errors import NormswapError
from normswap.exporting.exported_file import ExportedFile
from normswap.images.datasets import make_loader
from normswap.storage import checkpoint

needs.need("executorch")
IMAGES = torch.zeros(2, 3, 8, 8)


@pytest.mark.parametrize(
    ("name", "rest"), [("resnet10t", {"avg_pool2d"}), ("mobilenetv2_035", set())]
)
def test_a_network_alone(name: str, rest: set[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 64, 64)
    model = calm(timm.create_model(name, num_classes=10), x).float()
    done = normswap.export(model, tmp_path / "net.pte", input_size=(3, 64, 64))
    assert (done.format, set(done.nodes)) == ("executorch", {"XnnpackBackend", *rest})
    weights = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert done.bytes < weights * 4.4
    assert distance(run(model, x), run_alone(done.file, "executorch", x)) <= 1e-5


def test_norms_after_activations(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 3, 16, 16)
    convs = [nn.Sequential(nn.Conv2d(c, 8, 3), nn.ReLU(), nn.BatchNorm2d(8)) for c in (3, 8)]
    model = lived_in(
        nn.Sequential(*convs, nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), x
    ).float()
    done = normswap.export(model, tmp_path / "net.pte", input_size=(3, 16, 16))
    assert done.nodes == {"XnnpackBackend": 1}
    assert distance(run(model, x), run_alone(done.file, "executorch", x)) <= 1e-5


def test_no_run_computes_what_depends_on_no_input(tmp_path: Path) -> None:
    model, x = living(Anchored(), 3, 16, 12)
    done = normswap.export(model, tmp_path / "net.pte", input_size=(3, 16, 12))
    assert done.nodes == {"XnnpackBackend": 1}
    assert distance(run(model, x), run_alone(done.file, "executorch", x)) <= 1e-6


def test_nothing_is_printed(tmp_path: Path) -> None:
    """ExecuTorch prints what it finds of the processor, at its first run in a process."""
    program = "import sys, torch, normswap; from normswap.exporting import executorch_file\n"
    program += "from pathlib import Path; file = Path(sys.argv[1]) / 'net.pte'\n"
    program += "normswap.export(torch.nn.Conv2d(3, 4, 3).eval(), file, input_size=(3, 8, 8))\n"
    program += "executorch_file.nodes(file)"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dynamic_batch": True}, "one image at a time"),
        ({"dtype": "bf16"}, "Its files are fp32 or int8"),
        ({"dtype": "fp16"}, "Its files are fp32 or int8"),
        (
            {"dtype": "int8", "calibrate": IMAGES, "images": IMAGES, "weight_bits": 7},
            "executorch has them of 8",
        ),
    ],
    ids=["any number", "bf16", "fp16", "7 bits"],
)
def test_what_it_cannot_hold_is_said(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).eval()
    with pytest.raises(NormswapError, match=reason):
        normswap.export(model, tmp_path / "net.pte", input_size=(3, 8, 8), **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_int8_computes_on_bytes_and_keeps_the_answers(tmp_path: Path) -> None:
    demo = checkpoint.open_model("demo")
    file = tmp_path / "demo.pte"
    images = make_loader(demo, "demo", samples=100, workers=0)
    calibrate = make_loader(demo, "demo", samples=64, seed=1, workers=0)
    done = normswap.export(demo, file, dtype="int8", images=images, calibrate=calibrate)

    assert done.nodes["XnnpackBackend"] == 1
    assert done.bytes < 4 * 0.3 * sum(p.numel() for p in demo.parameters())

    x = torch.cat([batch[0] for batch in images])
    found = run_alone(file, "executorch", x)
    wanted = run(demo, x)

    assert int((found.argmax(1) == wanted.argmax(1)).sum()) >= 97
    assert 1e-3 < distance(wanted, found) < 0.1

    exported = ExportedFile.find(str(file))
    assert exported is not None
    assert exported.precision == "int8"
