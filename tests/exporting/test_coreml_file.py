"""Core ML: a package is written whole, with names and metadata; nothing runs it on Linux."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import needs
from torch import Tensor, nn

import normswap
from normswap.errors import NormswapError, OptionError, RefusedError
from normswap.exporting import coreml_file, exported_file, formats
from normswap.exporting.exported_file import ExportedFile

needs.need("coremltools")
away = pytest.mark.needs("no Core ML", sys.platform != "darwin")
SIZE: dict[str, Any] = {"input_size": (3, 8, 8)}


class Two(nn.Module):
    """Two inputs, two outputs, in an order that is not the alphabet's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, view: Tensor, other: Tensor) -> dict[str, Tensor]:
        x = self.conv(view)
        return {"wide": x, "narrow": (x * other).mean((2, 3))}


class Twice(Two):
    """One tensor comes out under two names."""

    def forward(self, view: Tensor, other: Tensor) -> dict[str, Tensor]:
        return {"one": (x := self.conv(view)), "same": x, "sum": x + other}


def content(package: Path) -> dict[str, bytes]:
    return {
        str(one.relative_to(package)): one.read_bytes()
        for one in package.rglob("*")
        if one.is_file()
    }


@away
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_package_holds_the_folded_network_and_is_not_called_verified(
    dtype: str, tmp_path: Path
) -> None:
    conv = nn.Conv2d(3, 8, 3)
    file = tmp_path / "net.mlpackage"
    model = nn.Sequential(conv, nn.BatchNorm2d(8), nn.ReLU()).eval()
    nn.init.constant_(model[1].running_var, 1 - model[1].eps)  # so that folding changes no digit
    done = normswap.export(model, file, dtype=dtype, **SIZE)

    assert (done.format, done.figures, done.dtype) == ("coreml", None, dtype)
    assert done.nodes == {"conv": 1, "relu": 1, **({"cast": 2} if dtype == "fp16" else {})}

    weights = (
        conv.weight.detach()
        .to(torch.float32 if dtype == "fp32" else torch.float16)
        .numpy()
        .tobytes()
    )

    assert weights in content(file)["Data/com.apple.CoreML/weights/weight.bin"]
    assert done.bytes == sum(map(len, content(file).values()))

    body = json.loads(done.sidecar.read_text(encoding="utf-8"))
    assert body["checked"] == formats.NOT_RUN

    exported = ExportedFile.find(str(file))
    assert exported is not None
    assert (exported.precision, exported.described()["bytes"]) == (dtype, done.bytes)
    assert set(exported.metadata) == {
        "source",
        "sha256",
        "architecture",
        "dtype",
        "labels",
        "preprocess",
        "versions",
    }
    assert json.loads(exported.metadata["preprocess"])["input"] == body["input"]

    for run in (exported.network, lambda: exported_file.verify(exported, model)):
        with pytest.raises(
            OptionError, match=r"net\.mlpackage does not run here: coreml has no runtime on linux"
        ):
            run()


def test_a_package_has_the_usual_permissions(tmp_path: Path) -> None:
    file = normswap.export(nn.Conv2d(3, 8, 3).eval(), tmp_path / "a.mlpackage", **SIZE).file
    modes = {one.is_dir(): one.stat().st_mode & 0o777 for one in (file, *file.rglob("*"))}
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    assert modes == {
        place.is_dir(): place.stat().st_mode & 0o777
        for place in (tmp_path / "folder", tmp_path / "file")
    }


def test_inputs_and_outputs_have_their_names(tmp_path: Path) -> None:
    inputs = (torch.randn(1, 3, 8, 8), torch.randn(1, 4, 6, 6))
    done = normswap.export(Two().eval(), tmp_path / "net.mlpackage", inputs=inputs)
    described = coreml_file._spec(done.file).description
    found = [
        [(one.name, list(one.type.multiArrayType.shape)) for one in side]
        for side in (described.input, described.output)
    ]

    assert found == [
        [("view", [1, 3, 8, 8]), ("other", [1, 4, 6, 6])],
        [("wide", [1, 4, 6, 6]), ("narrow", [1, 4])],
    ]
    with pytest.raises(RefusedError, match="cannot express the network: one gets another name"):
        normswap.export(Twice().eval(), tmp_path / "other.mlpackage", inputs=inputs)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("net.mlpackage", {"dynamic_batch": True}, "one image at a time"),
        ("net.mlpackage", {"dtype": "bf16"}, "not written in bf16"),
        ("net", {"format": "coreml"}, r"has to end in \.mlpackage"),
    ],
    ids=["any number", "bf16", "no ending"],
)
def test_what_it_cannot_hold_is_said(
    name: str, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(NormswapError, match=reason):
        normswap.export(nn.Conv2d(3, 4, 3).eval(), tmp_path / name, **SIZE, **options)
    assert not list(tmp_path.iterdir())


def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = normswap.export(nn.Conv2d(3, 4, 3).eval(), tmp_path / "net.mlpackage", **SIZE)
    assert coreml_file.nodes(done.file) == {"conv": 1}
    assert capfd.readouterr() == ("", "")
