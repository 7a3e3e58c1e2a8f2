"""An exported file is a MODEL: it answers as the checkpoint does, on images that its sidecar says
how to prepare.
"""

import copy
import functools
import importlib.util
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import as_documented
from support.hand_written_networks import Answers
from support.runtime_process import skip_without
from support.sampled_tables import quick
from torch import Tensor, nn

import normswap
from normswap.cli.app import main
from normswap.errors import OptionError, SourceError
from normswap.exporting import exported_file, exporter, formats
from normswap.exporting.exported_file import ExportedFile
from normswap.images.accuracy import Evaluation, evaluate
from normswap.images.datasets import make_loader
from normswap.models import kinds
from normswap.storage import checkpoint
from normswap.surgery.network import Network

FILES = {
    "onnx": ("a.onnx", {}),
    "openvino": ("a.xml", {}),
    "pt2": ("a.pt2", {}),
    "ncnn": ("a.param", {}),
    "executorch": ("a.pte", {}),
    "litert": ("a.tflite", {}),
    "pixels": ("a.pt2", {"normalize": True, "softmax": True}),
    "any number": ("a.onnx", {"dynamic_batch": True}),
    "bf16": ("a.onnx", {"dtype": "bf16"}),
}
IMAGES = 60


@functools.cache
def demo() -> nn.Module:
    return checkpoint.open_model("demo")


@functools.cache
def of_checkpoint() -> Evaluation:
    return evaluate(demo(), make_loader(demo(), "demo", samples=IMAGES, workers=0))


def opened(file: Path) -> nn.Module:
    exported = ExportedFile.find(str(file))
    return exported.network() if exported else checkpoint.open_model(str(file))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", quick(FILES, ("onnx", "pixels")))
def test_a_file_classifies_images_as_the_checkpoint_does(name: str, tmp_path: Path) -> None:
    ending, options = FILES[name]
    file = tmp_path / ending
    settings = dict[str, Any](options)
    skip_without(
        next(name for name in formats.names() if formats._FORMATS[name].ending == file.suffix)
    )
    done = normswap.export(demo(), file, **settings)
    network = opened(file)
    result = evaluate(network, make_loader(network, "demo", samples=IMAGES, workers=0))

    assert (result.top1, result.top5, result.count) == (
        of_checkpoint().top1,
        of_checkpoint().top5,
        IMAGES,
    )
    assert result.loss == pytest.approx(
        of_checkpoint().loss, rel=2e-2 if "dtype" in options else 1e-4
    )

    exported = ExportedFile.find(str(file))
    assert exported is not None
    assert (exported.form.name, exported.metadata["source"], exported.precision) == (
        done.format,
        "demo",
        done.dtype,
    )
    assert exported.described()["nodes"] == done.nodes

    figures = exported_file.verify(
        exported, demo(), make_loader(demo(), "demo", samples=8, workers=0)
    )

    assert (figures.passed, figures.agreement, figures.count) == (True, 1, 8)

    other = nn.Sequential(nn.Conv2d(3, 10, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert not exported_file.verify(exported, other).passed


def test_every_format_with_a_graph_is_found_by_its_ending() -> None:
    assert {form.ending: name for name, form in formats._FORMATS.items()} == kinds.EXPORTED


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["onnx", "xml", "pt2"])
def test_a_file_in_int8_says_what_it_measured(ending: str, tmp_path: Path) -> None:
    file = tmp_path / f"a.{ending}"
    images = make_loader(demo(), "demo", samples=200, workers=0)
    done = normswap.export(
        demo(),
        file,
        dtype="int8",
        images=images,
        calibrate=make_loader(demo(), "demo", samples=64, seed=1, workers=0),
    )
    network = opened(file)
    again = evaluate(network, make_loader(network, "demo", samples=200, workers=0))

    assert (again.top1, None) == (done.figures.top1, done.figures.apart)

    exported = ExportedFile.find(str(file))
    assert exported is not None
    assert exported.described()["sidecar"]["quantization"]["measured"]["top1"] == again.top1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "dtype", "fault"),
    [
        ("onnx", "fp32", "weight"),
        ("onnx", "fp32", "bias"),
        ("onnx", "int8", "weight"),
        ("xml", "fp32", "weight"),
        ("param", "fp32", "weight"),
        ("param", "fp32", "bias"),
        ("tflite", "fp32", "weight"),
        ("tflite", "int8", "weight"),
        ("pte", "fp32", "weight"),
        ("pte", "fp32", "bias"),
    ],
)
def test_verify_names_the_layer_of_a_file_that_is_off(
    ending: str, dtype: str, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"a.{ending}"
    layer = "layer2.1.conv1"
    skip_without(formats._name_of(file, None))
    images, others = (
        make_loader(demo(), "demo", samples=32, seed=seed, workers=0) for seed in (0, 1)
    )
    data: dict[str, Any] = {"images": images, "calibrate": others} if dtype == "int8" else {}

    assert normswap.export(demo(), file, dtype=dtype, **data).figures.apart is None

    before = exporter.fold_for_export(Network(demo())).get_parameter(f"{layer}.{fault}").detach()
    if dtype == "int8":
        before = before.flatten(1).abs().amax(1) / {"onnx": 64, "tflite": 127}[ending]
    elif ending in ("tflite", "pte") and fault == "weight":
        before = before.permute(0, 2, 3, 1).contiguous()

    after = before * (0 if fault == "bias" else 1.5)
    stored = file.with_suffix(".bin") if ending in ("xml", "param") else file
    content = stored.read_bytes()
    (old, new) = (tensor.numpy().tobytes() for tensor in (before, after))

    assert content.count(old) == 1

    stored.write_bytes(content.replace(old, new))
    command = [
        "verify",
        str(file),
        "--against",
        "demo",
        "--data",
        "demo",
        "--samples",
        "32",
        "--workers",
        "0",
    ]

    assert main(command) == int(dtype == "fp32")

    # Where ncnn and LiteRT fuse it with its ReLU, the numbers are those behind that. ExecuTorch's
    # runtime gives none.
    named = (
        f"{layer}.{fault} is nowhere in the file"
        if ending == "pte"
        else f"first at {layer} (Conv2d): relative L2 "
    )

    assert f", {named}" in capsys.readouterr().out


@pytest.mark.slow
def test_where_a_runtime_gives_no_inner_values_verify_looks_for_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = replace(formats.get("pt2"), inside=False)
    monkeypatch.setitem(formats._FORMATS, "pt2", form)
    exported = ExportedFile.find(str(normswap.export(demo(), tmp_path / "a.pt2").file))

    assert exported is not None
    assert exported_file.verify(exported, demo()).missing == ""

    for path in ("layer2.1.bn1.weight", "layer2.1.bn1.bias"):
        other = copy.deepcopy(demo())
        other.get_parameter(path).data[3] += 0.1
        missing = exported_file.verify(exported, other).missing
        assert missing == path.replace("bn1", "conv1")

    runs = form.open(exported.file)
    monkeypatch.setattr(form.functions, "open", lambda file: lambda x: 1.01 * runs(x))
    figures = exported_file.verify(exported, demo())

    assert (figures.passed, figures.place) == (False, "")


@pytest.mark.slow
def test_the_commands_take_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def printed(*arguments: str, code: int = 0) -> str:
        assert main(arguments) == code
        out, err = capfd.readouterr()
        return out if code == 0 else err

    file = tmp_path / "a.pt2"
    normswap.export(demo(), file)
    formats.sidecar_of(file).unlink()  # the same stands inside
    shown = as_documented(printed("inspect", str(file), "--json"), "inspect")
    assert (shown["format"], shown["metadata"]["source"], shown["nodes"]["conv2d.default"]) == (
        "pt2",
        "demo",
        22,
    )
    assert shown["sidecar"]["input"]["size"] == [3, 64, 64]
    assert "name images, dtype float32" in printed("inspect", str(file))
    images = ("--data", "demo", "--samples", str(IMAGES), "--workers", "0")
    measured = json.loads(printed("evaluate", str(file), *images, "--json"))
    assert measured["top1"] == of_checkpoint().top1
    proof = json.loads(printed("verify", str(file), "--against", "demo", *images, "--json"))
    assert (proof["passed"], proof["figures"]["top1"]) == (True, of_checkpoint().top1)
    assert "PROVED" in printed("verify", str(file), "--against", "demo")
    assert "Name it: '--against MODEL'" in printed("verify", str(file), code=2)
    assert "Drop --arch" in printed("evaluate", str(file), "--arch", "resnet18", *images, code=2)


def test_a_file_of_somebody_else_is_looked_at_but_not_run(tmp_path: Path) -> None:
    file = tmp_path / "theirs.pt2"
    torch.export.save(torch.export.export(nn.Conv2d(3, 4, 3), (torch.zeros(1, 3, 8, 8),)), file)
    exported = ExportedFile.find(str(file))
    assert exported is not None
    assert exported.described()["nodes"] == {"conv2d.default": 1}
    with pytest.raises(
        SourceError, match=r"theirs.pt2 does not say how images are prepared for it"
    ):
        exported.network()


def test_a_file_that_takes_more_than_images_is_not_fed_any(tmp_path: Path) -> None:
    class Pair(nn.Module):
        def forward(self, one: Tensor, two: Tensor) -> Tensor:
            return one + two

    file = tmp_path / "pair.pt2"
    normswap.export(Pair(), file, inputs=(torch.ones(1, 3), torch.ones(1, 3)))
    exported = ExportedFile.find(str(file))
    assert exported is not None
    assert [each["name"] for each in exported.described()["sidecar"]["inputs"]] == ["one", "two"]
    with pytest.raises(SourceError, match=r"pair.pt2 takes more than images"):
        exported.network()
    with pytest.raises(OptionError, match="unexpected keyword argument 'one'"):
        exported_file.verify(exported, demo())
    assert exported_file.verify(exported, Pair()).passed


def test_a_network_beside_a_file_stays_as_it_is(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(1), nn.LazyLinear(2)).eval()
    network(torch.zeros(1, 3, 8, 8))
    file = tmp_path / "small.pt2"
    normswap.export(network, file, input_size=(3, 8, 8))
    exported = ExportedFile.find(str(file))
    assert exported is not None

    before = dict(vars(network))
    assert exported_file.verify(exported, network).passed
    assert vars(network) == before


def test_a_missing_runtime_and_a_damaged_file_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.pt2"
    file.write_bytes(b"nothing")
    with pytest.raises(SourceError, match=r"a.pt2 is no readable pt2 file"):
        ExportedFile.find(str(file))

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "openvino" else find(name)
    )
    (tmp_path / "a.xml").write_bytes(b"")

    with pytest.raises(
        OptionError, match=r"openvino needs the package openvino: .* pip install -e '\.\[export\]'"
    ):
        ExportedFile.find(str(tmp_path / "a.xml"))


NETWORKS = """
import timm, torch
from torch import nn

def classifier():
    return timm.create_model("resnet18", num_classes=10, channels=(4, 4, 4, 4), layers=(1, 1, 1, 1))

def encoder():
    # Of some seeds all features are 0 for every image, and nothing can be proved.
    torch.manual_seed(1)
    return timm.create_model("resnet18", num_classes=0, channels=(4, 4, 4, 4), layers=(1, 1, 1, 1))

def maps():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4))
"""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "command"), [("classifier", "evaluate"), ("encoder", "verify"), ("maps", "verify")]
)
def test_the_next_step_that_is_named_can_be_done(
    name: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Features, maps of them too, have no accuracy, and the largest is no answer; `verify` compares
    them.
    """
    (tmp_path / "backbones.py").write_text(NETWORKS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "backbones", raising=False)
    monkeypatch.chdir(tmp_path)
    some = ["--data", "demo", "--samples", "4"]

    assert (
        main(["export", f"backbones:{name}", "-o", "net.pt2", "--input-size", "3,32,32", *some])
        == 0
    )

    *said, last = capsys.readouterr().out.splitlines()
    assert any("same answer" in each for each in said) is (name == "classifier")
    assert last.startswith(f"next: normswap {command} net.pt2 ")
    assert last.endswith(" --data IMAGES")
    assert main([*shlex.split(last)[2:-2], *some]) == 0
    assert "same answer" not in capsys.readouterr().out


ANSWERS: dict[str, Callable[[Tensor], Any]] = {
    "labels": lambda y: y.argmax(1),
    "mask": lambda y: y[:, 0] > 0,
    "places": lambda y: y.flatten(2).topk(2).indices,
    "a dict": lambda y: {"labels": y.argmax(1), "scores": y.softmax(1)},
    "boxes": lambda y: [
        {"boxes": maps.flatten(1)[:, :4], "scores": maps.mean((1, 2))} for maps in y
    ],
}


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.one_in(2)
def test_a_file_of_another_network_never_passes(name: str, dtype: str, tmp_path: Path) -> None:
    """Its last weights have the other sign."""
    torch.manual_seed(0)
    network = Answers(ANSWERS[name]).eval()
    other = copy.deepcopy(network)
    other.body[3].weight.data.neg_()
    images = torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    file = tmp_path / "a.onnx"
    options: dict[str, Any] = {"input_size": (3, 16, 16)}

    if dtype == "int8":
        options |= {"dtype": dtype, "calibrate": images[:32], "images": images[32:]}
    if dtype == "int8" and name in ("a dict", "boxes"):
        with pytest.raises(OptionError, match="does not give one tensor"):
            normswap.export(network, file, **options)
        return

    normswap.export(network, file, **options)
    exported = ExportedFile.find(str(file))
    assert exported is not None
    assert exported_file.verify(exported, network, images[:16]).passed
    assert not exported_file.verify(exported, other, images[:16]).passed
