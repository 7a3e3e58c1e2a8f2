"""Exported files: they compute what the source computes, alone, without a norm; and a wrong one
never gets its name.

The oracle is the unfused source in PyTorch, and a process that has nothing but the file's own
runtime (`alone`).
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from support.lived_in_networks import distance, lived_in, run
from support.runtime_process import run_alone, skip_without
from support.sampled_tables import quick
from torch import Tensor, nn

import normswap
from normswap import shipped
from normswap.errors import NormswapError, OptionError, OutputError, RefusedError, VerificationError
from normswap.exporting import formats, sidecar
from normswap.exporting.exported_module import FileContents
from normswap.storage import checkpoint

OTHERS = ("coreml", "executorch", "litert", "ncnn")  # they have tests of their own
FORMATS = [name for name in formats.names() if name not in OTHERS]
ENDINGS = {"onnx": "onnx", "openvino": "xml", "pt2": "pt2"}
FIGURES = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 5e-2}
V1 = {"channels": [8, 16, 32, 64], "stem_width": 4, "num_classes": 10}
V2 = {"channels": [8, 16, 32, 64], "stem_chs": 8, "num_classes": 10}
NORMS = ("batch", "norm")
SLOW = ("pt2",)  # a process of their own takes seconds to import torch


def forms(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in names]


def network(name: str = "resnet10t", **args: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = timm.create_model(name, **(args or (V2 if "v2" in name else V1)))
    x = torch.randn(5, 3, 64, 64)
    return lived_in(model, x).float(), x


def weights(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.ndim > 1)


def on_disk(file: Path) -> int:
    parts = [file, file.with_suffix(".bin")]
    return sum(part.stat().st_size for part in parts if part.exists())


def check(model: nn.Module, file: Path, x: Tensor, dtype: str = "fp32", batch: int = 1) -> None:
    form = next(form for form, ending in ENDINGS.items() if file.suffix == f".{ending}")
    assert distance(run(model, x), run_alone(file, form, x, batch=batch)) <= FIGURES[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("form", forms(*FORMATS))
def test_a_file_computes_what_the_source_computes_alone(form: str, tmp_path: Path) -> None:
    model, x = network()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    file = tmp_path / f"net.{ENDINGS[form]}"
    done = normswap.export(model, file, input_size=(3, 64, 64), format=form)

    assert done.file == file
    assert (done.format, done.dtype, done.figures.count, done.bytes) == (
        form,
        "fp32",
        16,
        on_disk(file),
    )
    assert done.figures.relative_l2 <= 1e-5
    assert done.figures.agreement == 1
    assert not [kind for kind in done.nodes if any(word in kind.lower() for word in NORMS)]
    assert sum("conv" in kind.lower() for kind in done.nodes)

    parts = {"openvino": ["net.bin"]}.get(form, [])
    assert [each.name for each in done.parts] == parts
    assert {p.name for p in tmp_path.iterdir()} == {
        *parts,
        file.name,
        f"{file.name}.preprocess.json",
    }
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())

    check(model, file, x)
    if form in ("onnx", "pt2"):  # made for one image
        with pytest.raises(
            Exception, match=r"Expected input at .*shape\[0\] to be equal to 1|INVALID_ARGUMENT"
        ):  # each runtime has its own
            formats.get(form).open(file)(x[:2])


@functools.cache
def plain_nodes() -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        return normswap.export(network()[0], Path(folder) / "b.pt2", input_size=(3, 64, 64)).nodes


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "scheme",
    quick(["nf", "tune", "weightnorm", "groupnorm", "fixup", "skipinit"], ["nf", "groupnorm"]),
)
def test_every_scheme_is_folded_first(scheme: str, tmp_path: Path) -> None:
    model, _ = network()
    options: dict[str, Any] = {"nf": {"mean": "keep"}, "groupnorm": {"relative_eps": 0}}.get(
        scheme, {}
    )
    converted = normswap.convert(model, scheme, input_size=(3, 64, 64), **options)
    done = normswap.export(converted, tmp_path / "a.pt2", input_size=(3, 64, 64))
    plain = plain_nodes()
    per_sample = {"group_norm.default": 14} if scheme == "groupnorm" else {}

    assert {kind: n for kind, n in done.nodes.items() if kind not in plain} == per_sample

    if not per_sample:
        assert done.nodes == plain


@pytest.mark.slow
def test_what_has_nothing_to_fold_is_exported_as_it_is(tmp_path: Path) -> None:
    model, _ = network()
    folded = normswap.convert(model, "folded", input_size=(3, 64, 64)).model
    assert (
        normswap.export(folded, tmp_path / "a.pt2", input_size=(3, 64, 64)).figures.relative_l2
        <= 1e-6
    )

    other = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    assert (
        normswap.export(other, tmp_path / "b.pt2", input_size=(3, 8, 8)).figures.relative_l2 <= 1e-6
    )

    notes = normswap.export(other.half(), tmp_path / "c.pt2", input_size=(3, 8, 8)).notes
    assert notes[0] == "the network is in float16, and the file computes in fp32"
    assert "float16" not in str(
        normswap.export(other, tmp_path / "d.onnx", input_size=(3, 8, 8), dtype="fp16").notes
    )


@pytest.mark.slow
def test_onnx_holds_what_a_caller_needs(tmp_path: Path) -> None:
    import onnx

    model = checkpoint.open_model(str(shipped.FOLDER))
    file = tmp_path / "demo.onnx"
    images = torch.randn(3, *sidecar.config(model)["input_size"])
    done = normswap.export(model, file, dynamic_batch=True, images=images)
    assert done.figures.count == 3
    assert done.nodes["Conv"] == sum(isinstance(module, nn.Conv2d) for module in model.modules())
    proto = onnx.load(file)
    told = {entry.key: entry.value for entry in proto.metadata_props}
    record = json.loads(told["preprocess"])
    beside = json.loads((tmp_path / "demo.onnx.preprocess.json").read_text(encoding="utf-8"))
    assert (
        beside.pop("checked")["inputs"] == "given images"
    )  # the file is whole before it is checked
    assert record == beside
    assert json.loads(told["labels"])[3] == "cat"
    assert len(told["sha256"]) == 64
    assert {"torch", "timm", "normswap"} == set(json.loads(told["versions"]))
    assert [put.name for put in (*proto.graph.input, *proto.graph.output)] == ["images", "logits"]
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    assert (
        b".py" not in file.read_bytes()
    )  # torch notes on each node where in the user's files it comes from
    assert record["input"]["batch"] is None
    assert distance(run(model, images), formats.get("onnx").open(file)(images)) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("form", quick(FORMATS, ["onnx", "pt2"]))
def test_fp16(form: str, tmp_path: Path) -> None:
    model, x = network()
    file = tmp_path / f"net.{ENDINGS[form]}"
    done = normswap.export(model, file, input_size=(3, 64, 64), format=form, dtype="fp16")
    assert done.bytes < 2 * weights(model) + 150_000  # the graph and the metadata
    assert 1e-5 < done.figures.relative_l2 <= FIGURES["fp16"]
    runs = formats.get(form).open(file)  # here, as starting a process takes longest
    assert distance(run(model, x), torch.cat([runs(one) for one in x.split(1)])) <= FIGURES["fp16"]


@pytest.mark.slow
def test_bf16_is_of_weights_only(tmp_path: Path) -> None:
    """Whatever the format, the arithmetic is float32, on weights that each format rounds alike."""
    model, x = network()
    answers = []
    for form in (form for form in FORMATS if form != "openvino"):  # which refuses it
        file = tmp_path / f"{form}.{ENDINGS[form]}"
        done = normswap.export(model, file, input_size=(3, 64, 64), format=form, dtype="bf16")
        assert done.bytes < 2.3 * weights(model) + 150_000
        assert "weights are stored in bf16" in done.notes[0]
        assert 1e-5 < done.figures.relative_l2 <= FIGURES["bf16"]
        told = json.loads(done.sidecar.read_text(encoding="utf-8"))
        assert told["precision"] == {"weights": "bf16", "arithmetic": "fp32"}
        answers.append(torch.cat([formats.get(form).open(file)(one) for one in x.split(1)]))

    assert distance(run(model, x), answers[0]) <= FIGURES["bf16"]
    assert all(distance(answers[0], other) <= 1e-5 for other in answers[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=pytest.mark.slow) if form == "openvino" else form
        for form in FORMATS
    ],
)  # OpenVINO's is made from ONNX's
def test_a_file_with_one_wrong_tensor_gets_no_name(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tensor is changed after the network was folded and verified, before it is written."""
    model, _ = network()
    module = formats.get(form).functions
    write: Callable[..., None] = module.write

    def corrupt(contents: FileContents, place: Path) -> None:
        with torch.no_grad():
            next(p for p in contents.network.parameters() if p.ndim == 4).mul_(1.001)
        write(contents, place)

    monkeypatch.setattr(module, "write", corrupt)
    with pytest.raises(VerificationError, match="computes something else"):
        normswap.export(
            model, tmp_path / f"net.{ENDINGS[form]}", input_size=(3, 64, 64), format=form
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_old_file_survives_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = network()
    file = tmp_path / "net.pt2"
    normswap.export(model, file, input_size=(3, 64, 64))
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    with pytest.raises(OutputError, match="exists"):
        normswap.export(model, file, input_size=(3, 64, 64))

    monkeypatch.setattr(
        formats.get("pt2").functions, "open", lambda file: lambda x: torch.zeros(len(x), 10)
    )

    with pytest.raises(VerificationError, match=r"relative L2 error 1.0e\+00, allowed 1.0e-05"):
        normswap.export(model, file, input_size=(3, 64, 64), force=True)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


class Sorted(nn.Module):
    """Ends in an operator that ONNX has no word for."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.eigvalsh(self.conv(x).flatten(2) @ self.conv(x).flatten(2).mT)


class Branching(nn.Module):
    """What it does depends on values: no graph holds that."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) if float(x.sum()) > 1e9 else x.flatten(1) * 2


def _v1() -> nn.Module:
    return network()[0]


BAD: list[tuple[str, Callable[[], nn.Module], dict[str, Any], type[NormswapError], str]] = [
    (
        "net.onnx",
        Sorted,
        {"input_size": (3, 8, 8)},
        RefusedError,
        "ONNX cannot express the network: .*eigh",
    ),
    (
        "net.pt2",
        Branching,
        {"input_size": (3, 8, 8)},
        RefusedError,
        "torch.export cannot express the network: .+",
    ),
    (
        "net.pt2",
        _v1,
        {"input_size": (1, 64, 64)},
        OptionError,
        "does not run on an input of size 1,64,64: .*channels",
    ),
    ("net.pt2", _v1, {"input_size": (64, 64)}, OptionError, "input size 64,64: it is C,H,W"),
    (
        "net.foo",
        _v1,
        {},
        OptionError,
        r"the ending '.foo' .* says no format. Known: .onnx \(onnx\)",
    ),
    ("net", _v1, {}, OptionError, "says no format"),
    ("net.pt2", _v1, {"format": "onnx"}, OptionError, "ends as pt2 files do, not as onnx ones"),
    (
        "net.pt2",
        _v1,
        {"format": "tflite"},
        OptionError,
        "unknown format 'tflite': there are onnx, openvino",
    ),
    ("net.pt2", _v1, {"dtype": "int4"}, OptionError, "unknown dtype 'int4'"),
    (
        "net.xml",
        _v1,
        {"dtype": "bf16"},
        OptionError,
        "openvino is not written in bf16: there are onnx, pt2",
    ),
    ("no/net.pt2", _v1, {}, OutputError, "there is no directory"),
    (
        "net.pt2",
        lambda: timm.create_model("resnet18", features_only=True, channels=[8, 8, 8, 8]).eval(),
        {"input_size": (3, 64, 64), "softmax": True},
        OptionError,
        "does not give one tensor.* Without int8, norm",
    ),
    (
        "net.pt2",
        lambda: timm.create_model("resnet18", num_classes=0, channels=[8, 8, 8, 8]).eval(),
        {"softmax": True},
        OptionError,
        "no classifier",
    ),
    ("net.pt2", _v1, {"input_size": (3, 64, 64), "images": []}, OptionError, "no images"),
    (
        "net.pt2",
        _v1,
        {"input_size": (3, 64, 64), "images": [torch.zeros(0, 3, 64, 64)]},
        OptionError,
        "no images",
    ),
    (
        "net.pt2",
        _v1,
        {"input_size": (3, 64, 64), "images": torch.randn(2, 3, 4)},
        OptionError,
        "does not run on",
    ),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "make", "options", "kind", "match"),
    BAD,
    ids=[f"{c[0]}-{i}" for i, c in enumerate(BAD)],
)
def test_bad_input_is_said_in_a_line_and_leaves_nothing(
    name: str,
    make: Callable[[], nn.Module],
    options: dict[str, Any],
    kind: type[NormswapError],
    match: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(kind, match=match) as caught:
        normswap.export(make().eval(), tmp_path / name, **options)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(
        OptionError, match=r"onnx needs the package onnxruntime.*pip install -e '\.\[export\]'"
    ):
        normswap.export(_v1(), tmp_path / "net.onnx")


def test_an_onnx_file_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from normswap.exporting import onnx_file

    monkeypatch.setattr(onnx_file, "_LIMIT", 100_000)
    with pytest.raises(RefusedError, match=r"an ONNX file holds.*Try pt2"):
        normswap.export(_v1(), tmp_path / "net.onnx", input_size=(3, 64, 64))


@pytest.mark.parametrize("force", [False, True])
def test_weights_that_belong_to_a_file_of_another_format_stay(force: bool, tmp_path: Path) -> None:
    """OpenVINO and ncnn both put weights into FILE.bin."""
    for name in ("net.param", "net.bin"):
        (tmp_path / name).write_text("ncnn's", encoding="utf-8")
    with pytest.raises(
        OutputError, match=r"net\.bin belongs to .*net\.param\. Give net\.xml another name"
    ):
        normswap.export(
            nn.Conv2d(3, 4, 3).eval(), tmp_path / "net.xml", input_size=(3, 8, 8), force=force
        )

    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()} == {
        "net.param": "ncnn's",
        "net.bin": "ncnn's",
    }


def test_what_cannot_be_folded_is_not_exported(tmp_path: Path) -> None:
    model = _v1()
    model.bn1.running_mean = model.bn1.running_var = None  # type: ignore[assignment]
    with pytest.raises(RefusedError, match="bn1: it has no running statistics"):
        normswap.export(model, tmp_path / "net.pt2", input_size=(3, 64, 64))


@pytest.mark.slow
@pytest.mark.parametrize("data", [None, "demo"])
def test_a_check_on_noise_only_is_said(
    data: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from normswap.cli.app import main

    file = tmp_path / "net.pt2"
    options = ["--data", data, "--samples", "5"] if data else []
    assert main(["export", "demo", "-o", str(file), *options]) == 0
    assert main(["export", "demo", "-o", str(file)]) == 2, "it exists"
    assert main(["inspect", str(file)]) == 0
    exported, inspected = re.split(rf"\nfile +{re.escape(str(file))} ", capsys.readouterr().out)
    assert ("on noise only; give --data" in exported) is (data is None)
    inspected = " ".join(inspected.split())
    assert ("; 16 samples, smooth noise" in inspected) is (data is None)
    assert ("; 5 samples, given images" in inspected) is (data is not None)
    record = json.loads((tmp_path / "net.pt2.preprocess.json").read_text(encoding="utf-8"))[
        "checked"
    ]
    assert (record["noise_only"], record["count"]) == (data is None, 5 if data else 16)


FILES = {
    "onnx": "net.onnx",
    "openvino": "net.xml",
    "pt2": "net.pt2",
    "ncnn": "net.param",
    "executorch": "net.pte",
    "litert": "net.tflite",
    "coreml": "net.mlpackage",
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FILES)
def test_a_full_disk_is_said_in_a_line(form: str, tmp_path: Path) -> None:
    """A file may not grow large; torch's own writers end the process then, so that it takes one of
    its own to see.
    """
    skip_without(form)
    file = FILES[form]
    program = "import resource, sys; from normswap.cli.app import main\n"
    program += (
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)); sys.exit(main(sys.argv[1:]))"
    )
    command = [
        sys.executable,
        "-c",
        program,
        "export",
        str(shipped.FOLDER),
        "-o",
        file,
        "--format",
        form,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert f"cannot write {file}: " in done.stderr
    assert list(tmp_path.iterdir()) == []
