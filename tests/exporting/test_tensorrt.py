"""The command that builds a TensorRT engine names file, inputs and precision, and is not said to have run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

import normswap
from normswap.cli.app import main
from normswap.exporting import tensorrt
from normswap.exporting.exported_module import FileContents, Shipped

MODEL = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()


def test_the_sidecar_of_an_onnx_file_holds_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = normswap.export(MODEL, tmp_path / "my net.onnx", input_size=(3, 8, 8), dynamic_batch=True)
    said = json.loads(done.sidecar.read_text())["tensorrt"]
    assert said["checked"] == "not run here"
    assert shlex.split(said["command"]) == [
        "trtexec", "--onnx=my net.onnx", "--saveEngine=my net.engine", "--stronglyTyped", "--noTF32",
        "--minShapes=images:1x3x8x8", "--optShapes=images:8x3x8x8", "--maxShapes=images:32x3x8x8",
    ]  # fmt: skip
    assert main(["inspect", str(done.file)]) == 0
    assert "TensorRT   trtexec '--onnx=my net.onnx'" in capsys.readouterr().out


def test_one_image_needs_no_shapes_and_other_formats_no_command(tmp_path: Path) -> None:
    done = normswap.export(MODEL, tmp_path / "net.onnx", input_size=(3, 8, 8), format="onnx-data", dtype="fp16")
    command = json.loads(done.sidecar.read_text())["tensorrt"]["command"]
    assert command == "trtexec --onnx=net.onnx --saveEngine=net.engine --stronglyTyped --noTF32"
    done = normswap.export(MODEL, tmp_path / "net.ts", input_size=(3, 8, 8))
    assert "tensorrt" not in json.loads(done.sidecar.read_text())


def test_int8_of_onnx_runtime_has_none() -> None:
    contents = FileContents(Shipped(MODEL), (torch.zeros(1, 3, 8, 8),))
    said = tensorrt.build(Path("net.onnx"), contents, "int8")
    assert said["command"] is None
    assert "zero points" in said["reason"]
