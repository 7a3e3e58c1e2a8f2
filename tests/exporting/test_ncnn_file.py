"""ncnn: files of folded networks, in a process that has ncnn alone; what they cannot hold is said in a line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from alone import run_alone
from lived import calm, distance, living, run
from own_networks import Spectrum
from torch import Tensor, nn

import normswap
from normswap import demo_files
from normswap.errors import NormswapError, RefusedError
from normswap.exporting import ncnn_file
from normswap.exporting.exported_file import ExportedFile

ncnn = pytest.importorskip("ncnn")
pytest.importorskip("pnnx")


class UNet(nn.Module):
    """Transposed convolutions whose norms come after them, and one after the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.BatchNorm2d(8))
        self.deep = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.up = nn.Sequential(nn.ConvTranspose2d(16, 8, 2, 2), nn.BatchNorm2d(8), nn.ReLU())
        self.out = nn.Sequential(nn.ConvTranspose2d(16, 8, 2, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        down = self.down(x)
        return self.out(torch.cat([down, self.up(self.deep(down))], 1))


class Solid(nn.Sequential):
    """Convolutions in three dimensions."""

    def __init__(self) -> None:
        first, second = nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, 6, 3, 2, 1)
        super().__init__(first, nn.BatchNorm3d(4), nn.ReLU(), second, nn.BatchNorm3d(6), nn.ReLU())


def unfolded(nodes: dict[str, int]) -> list[str]:
    return [kind for kind in nodes if "Norm" in kind or kind == "Scale"]


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["resnet10t", "mobilenetv2_035"])
def test_a_network_alone(name: str, dtype: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 64, 64)
    model = calm(timm.create_model(name, num_classes=10), x).float()
    file = tmp_path / "net.ncnn.param"
    done = normswap.export(model, file, dtype=dtype, input_size=(3, 64, 64))
    assert (done.format, unfolded(done.nodes)) == ("ncnn", [])
    assert {p.name for p in tmp_path.iterdir()} == {"net.ncnn.param", "net.ncnn.bin", "net.ncnn.param.preprocess.json"}
    weights = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert file.with_suffix(".bin").stat().st_size < weights * {"fp32": 4.4, "fp16": 2.4}[dtype]
    assert distance(run(model, x), run_alone(file, "ncnn", x)) <= {"fp32": 1e-5, "fp16": done.figures.tolerance}[dtype]


def test_a_unet_has_no_norm_left_where_plain_pnnx_leaves_one(tmp_path: Path) -> None:
    model, x = living(UNet(), 3, 32, 32)
    done = normswap.export(model, tmp_path / "net.param", images=x, input_size=(3, 32, 32), count_plain=True)
    assert done.plain_nodes is not None
    assert (unfolded(done.nodes), unfolded(done.plain_nodes)) == ([], ["BatchNorm"])
    assert distance(run(model, x), run_alone(done.file, "ncnn", x)) <= 1e-5


def test_three_dimensions(tmp_path: Path) -> None:
    model, x = living(Solid(), 1, 8, 12, 10)
    done = normswap.export(model, tmp_path / "net.param", inputs=x)
    assert unfolded(done.nodes) == []
    assert (done.figures.passed, done.figures.count) == (True, 3)


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), {"dynamic_batch": True}, "one image at a time"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), {"dtype": "bf16"}, "not written in bf16"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), {"dtype": "int8"}, "not written in int8"),
        (Spectrum(nn.Conv2d(3, 4, 3)), {}, "no layer torch.fft.fft2"),
    ],
    ids=["any number", "bf16", "int8", "a layer"],
)
def test_what_it_cannot_hold_is_said(model: nn.Module, options: dict[str, bool], reason: str, tmp_path: Path) -> None:
    with pytest.raises(NormswapError, match=reason):
        normswap.export(model.eval(), tmp_path / "net.param", input_size=(3, 8, 8), **options)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


class Killed:
    """Ends the process at the n-th of the calls that change files."""

    def __init__(self, at: int) -> None:
        self.left = at

    def around(self, call: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            if self.left == 0:
                os._exit(9)
            self.left -= 1
            return call(*args, **options)

        return counted


@pytest.mark.slow
@pytest.mark.parametrize("at", range(10))
def test_a_process_killed_at_any_write_leaves_no_graph_with_other_weights(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, x = tmp_path / "net.param", torch.randn(1, 3, 8, 8)
    old, new = (nn.Conv2d(3, 4, 3).eval() for _ in range(2))
    normswap.export(old, file, input_size=(3, 8, 8))
    kill = Killed(at)
    monkeypatch.setattr(os, "replace", kill.around(os.replace))
    monkeypatch.setattr("normswap.exporting.ncnn_file.shutil.copyfile", kill.around(shutil.copyfile))
    monkeypatch.setattr(Path, "write_text", kill.around(Path.write_text))
    child = os.fork()
    if not child:
        normswap.export(new, file, input_size=(3, 8, 8), force=True)
        os._exit(0)
    died = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    monkeypatch.undo()
    assert died is (at < 9)  # the weights, the graph and its sidecar are written; three names go, three come
    if file.exists():
        assert distance(run(new if not died else old, x), ncnn_file.open(file)(x)) <= 1e-5
    assert ExportedFile.find(str(file)) is not None, "which carries on what the process began"
    made = run(new if at > 2 else old, x)
    assert distance(made, ncnn_file.open(file)(x)) <= 1e-5
    assert {path.name for path in tmp_path.iterdir()} >= {"net.param", "net.bin", "net.param.preprocess.json"}


@pytest.mark.slow
def test_a_full_disk_is_said_in_a_line(tmp_path: Path) -> None:
    program = "import resource, sys; from normswap.cli.app import main\n"
    program += "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)); sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "export", str(demo_files.FOLDER), "-o", "net.param"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "cannot write net.param: " in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_pnnx_says_reaches_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pnnx.EXEC_PATH", "/bin/false")
    with pytest.raises(RefusedError, match="pnnx cannot express the network: it ends with 1"):
        normswap.export(nn.Conv2d(3, 4, 3).eval(), tmp_path / "net.param", input_size=(3, 8, 8))
