"""`normswap export --precision int8`: from end to end on the demo's network, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from lived import distance
from onnx_operators import operators_once  # noqa: F401 (a fixture)
from torch import Tensor, nn

import normswap
from normswap.cli.app import main
from normswap.errors import NormswapError, OptionError, VerificationError
from normswap.exporting import formats, quantizing
from normswap.exporting.equalization import AS_FOLDED
from normswap.images import datasets, parting
from normswap.storage.checkpoint import open_model

DATA = Path(normswap.__file__).parent / "reporting/demo_data"
TAR = str(DATA / "images.tar")


def small() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU6()]
    head = [nn.Conv2d(8, 6, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)]
    return nn.Sequential(*layers, *head).eval()


def pictures(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def made(file: Path, **options: Any) -> Any:
    given = {"calibrate": pictures(32), "images": pictures(64, 1), "dynamic_batch": True, **options}
    return normswap.export(small(), file, dtype="int8", input_size=(3, 16, 16), **given)


def test_a_small_network_in_onnx(tmp_path: Path) -> None:
    """The file, run by ONNX Runtime alone, against the network in float64; its weights are integers of 7 bits."""
    file = tmp_path / "net.onnx"
    done = made(file, sensitive=1)
    x = pictures(64, 2)
    session = formats.get("onnx").open(file)
    with torch.no_grad():
        assert distance(small().double()(x.double()), session(x).double()) < 0.1
    weights = [t for t in onnx.load(file).graph.initializer if t.data_type == onnx.TensorProto.INT8 and len(t.dims) > 1]
    assert len(weights) == 3  # of four layers, one is left as it is
    assert all(abs(onnx.numpy_helper.to_array(t)).max() == 64 for t in weights)
    assert len(done.quantized.fp32) == 1
    assert done.quantized.calibrated_on == 32
    body = json.loads(done.sidecar.read_text())
    assert body["precision"] == {"weights": "int8", "arithmetic": "int8"}
    assert body["quantization"]["measured"]["count"] == 64
    assert body["quantization"]["measured"]["agreement"] == done.figures.agreement
    assert {prop.key for prop in onnx.load(file).metadata_props} >= {"source", "preprocess"}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"dynamic_batch": False}, {"normalize": True}, {"softmax": True}])
def test_it_goes_with_other_options(options: dict[str, Any], tmp_path: Path) -> None:
    done = made(tmp_path / "net.onnx", per_channel=False, **options)
    assert done.figures.relative_l2 < 0.2


@pytest.mark.slow
def test_openvino(tmp_path: Path) -> None:
    pytest.importorskip("nncf")
    done = made(tmp_path / "net.xml", sensitive=1)
    assert done.figures.relative_l2 < 0.1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.bin", "net.xml", "net.xml.preprocess.json"]
    assert done.nodes["FakeQuantize"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_openvino_without_int8(dtype: str, tmp_path: Path) -> None:
    done = normswap.export(small(), tmp_path / "net.xml", dtype=dtype, input_size=(3, 16, 16), images=pictures(8))
    assert done.figures.agreement == 1
    assert done.bytes > 2000


def test_what_loses_too_much_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizing, "gauges", lambda **_: [AS_FOLDED])  # one trial is enough to be refused
    monkeypatch.setattr(formats.quantizer("onnx"), "RANGES", ("minmax",))
    with pytest.raises(VerificationError, match=r"int8 loses .* points of agreement on 64 images, allowed -1"):
        made(tmp_path / "net.onnx", max_drop=-1.0)
    assert list(tmp_path.iterdir()) == []


BAD: list[tuple[str, dict[str, Any], type[NormswapError], str]] = [
    ("net.onnx", {"calibrate": None}, OptionError, "int8 needs images to calibrate on"),
    ("net.onnx", {"images": None}, OptionError, "int8 needs other images to measure on"),
    ("net.onnx", {"calibrate": []}, OptionError, "no images to calibrate on"),
    ("net.ts", {}, OptionError, "torchscript is not written in int8: there are onnx, openvino"),
    ("net.onnx", {"dtype": "fp16"}, OptionError, "fp16 is not calibrated"),
]


@pytest.mark.parametrize(("name", "options", "kind", "match"), BAD)
def test_bad_input(name: str, options: dict[str, Any], kind: type[NormswapError], match: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"dtype": "int8", "calibrate": pictures(8), "images": pictures(8), **options}
    with pytest.raises(kind, match=match):
        normswap.export(small(), tmp_path / name, input_size=(3, 16, 16), **given)
    assert list(tmp_path.iterdir()) == []


COMMANDS = [
    (["--precision", "int8"], "--precision int8 needs --calibrate DATA"),
    (["--calibrate", TAR], "--calibrate is for --precision int8"),
    (["--precision", "int4"], "unknown dtype 'int4'"),
    (["--precision", "int8", "--calibrate", "nowhere"], "nowhere does not exist"),
    (["--precision", "int8", "--calibrate", TAR, "--samples", "500"], "leave none to measure on"),
]


@pytest.mark.parametrize(("words", "said"), COMMANDS)
def test_bad_commands(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(DATA), "-o", str(tmp_path / "net.onnx"), *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nncf", None)
    with pytest.raises(OptionError, match=r"openvino in int8 needs the package nncf.*'normswap\[quantize\]'"):
        made(tmp_path / "net.xml")


def test_the_two_parts_share_no_image() -> None:
    loader = datasets.make_loader(open_model(str(DATA)), TAR, batch_size=64, workers=0)
    one, two = parting.part(loader, 100)
    assert (one.count, two.count) == (100, 400)
    rows = [images.flatten(1) for part in (one, two) for images, _ in part]
    assert len(torch.cat(rows).unique(dim=0)) == len(torch.cat([x for x, _ in loader]).flatten(1).unique(dim=0))
    assert len({int(label) for _, labels in one for label in labels}) == 10


@pytest.mark.long
def test_bench_takes_int8_beside_fp32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours, and a file that nobody wrote a sidecar for."""
    options = ["--calibrate", TAR, "--samples", "100", "--precision", "int8"]
    names = [str(tmp_path / name) for name in ("ours.onnx", "ours.xml", "foreign.onnx")]
    for name in names[:2]:
        assert main(["export", str(DATA), "-o", name, *options]) == 0
    Path(names[2]).write_bytes(Path(names[0]).read_bytes())
    capsys.readouterr()
    words = ["--batch", "1", "--runtime", "eager,onnxruntime,openvino", "--seconds", "0.2", "--json"]
    assert main(["bench", str(DATA), *names, *words]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    found = {(row["form"], row["runtime"]): row["status"] for row in rows}
    assert {key: status for key, status in found.items() if key[0].startswith(("ours", "foreign"))} == {
        ("ours.onnx", "onnxruntime"): "ok", ("ours.onnx", "openvino"): "ok", ("ours.xml", "openvino"): "ok",
        ("foreign.onnx", "onnxruntime"): "ok", ("foreign.onnx", "openvino"): "ok"}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["onnx", "xml"])
def test_the_demo_network_from_end_to_end(ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed is what the file does on the images that were left, counted by hand."""
    file = tmp_path / f"net.{ending}"
    words = ["--precision", "int8", "--calibrate", TAR, "--samples", "200", "--dynamic-batch", "--max-drop", "2"]
    assert main(["export", str(DATA), "-o", str(file), *words, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    source = open_model(str(DATA))
    loader = datasets.make_loader(source, TAR, batch_size=64, workers=0, split="train")
    runs = formats.get(body["format"]).open(file)
    right = count = 0
    for x, labels in parting.part(loader, 200)[1]:
        right += int((runs(x).argmax(1) == labels).sum())
        count += len(x)
    assert (body["figures"]["count"], count) == (300, 300)
    assert body["figures"]["top1"] == pytest.approx(100 * right / count)
    assert body["figures"]["top1"] > body["figures"]["source_top1"] - 2
