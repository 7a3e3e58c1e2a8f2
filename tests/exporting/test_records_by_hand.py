"""Laws of the records of an export: every field against an account that is made here by hand."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normswap
from normswap import provenance
from normswap.errors import OutputError, VerificationError
from normswap.exporting import checks, exported_file, formats, openvino_file, pt2_file, sidecar
from normswap.exporting.exported_file import ExportedFile
from normswap.exporting.exported_module import FileContents, Shipped
from normswap.exporting.request import ExportRequest
from normswap.exporting.settings import FileSettings, Quantization
from normswap.exporting.signature import Signature
from normswap.models import preprocessing
from normswap.models.calling import Example
from normswap.provenance import Provenance

SIZE = (3, 8, 8)
# None of these is timm's default.
STATED: dict[str, Any] = {
    "mean": (0.3, 0.4, 0.5),
    "std": (0.2, 0.25, 0.4),
    "crop_pct": 0.8,
    "interpolation": "bilinear",
}


def small(**record: Any) -> Any:
    """A network of three classes, with this record of its images."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)]
    model: Any = nn.Sequential(*layers).eval()
    model.__dict__["pretrained_cfg"] = {"input_size": SIZE, **record}
    return model


class Labels(nn.Module):
    """Gives the class of each image, not its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).argmax(1)


# Notes.


def test_no_note_of_a_file_takes_the_place_of_another(tmp_path: Path) -> None:
    """Each of the five sources of notes has something to say of this file."""
    done = normswap.export(
        Labels().eval().half(),
        tmp_path / "a.pt2",
        dtype="bf16",
        input_size=SIZE,
        dynamic_batch=True,
        images=torch.randn(24, *SIZE),
    )

    beginnings = [
        "the network is in float16, and the file computes in fp32",
        "weights are stored in bf16",
        "each run casts the weights to fp32",
        "assumed, as the network does not say: mean",
        "only labels were compared",
    ]
    assert len(done.notes) == len(beginnings)
    for note, beginning in zip(done.notes, beginnings, strict=True):
        assert note.startswith(beginning)


# Figures.

SCORES = torch.tensor([[3.0, 1, 0], [0, 2, 1], [1, 0, 5], [4, 3, 0]])
# The file takes the last image for another class.
OF_FILE = torch.tensor([[3.5, 1, 0], [0, 2, 1.5], [1, 0, 5], [2, 3, 0]])
# The labels of the four images, in batches of two; None is a batch without labels.
LABELS: dict[str, tuple[list[int] | None, list[int] | None]] = {
    "all": ([0, 1], [2, 0]),
    "some wrong": ([1, 1], [2, 1]),
    "one of no class": ([0, -1], [2, 0]),
    "one of a class too many": ([0, 1], [3, 0]),
    "a batch of no class": ([-1, -1], [2, 0]),
    "a batch without labels": ([0, 1], None),
    "none": (None, None),
}


@pytest.mark.parametrize("name", LABELS)
def test_the_figures_of_a_file_are_those_by_hand(name: str) -> None:
    """A top-1 is shown only where every image has a label that is a class of the network."""
    source = nn.Flatten()
    reference = checks.Reference(source, Signature.of_images(source, "logits"))
    answer_of = {tuple(s.tolist()): t for s, t in zip(SCORES, OF_FILE, strict=True)}

    def runs(images: Tensor) -> Tensor:
        return torch.stack([answer_of[tuple(row.tolist())] for row in images.flatten(1)])

    batches = [
        (images[..., None, None], None if labels is None else torch.tensor(labels))
        for images, labels in zip(SCORES.split(2), LABELS[name], strict=True)
    ]

    found = checks.check(reference, runs, batches, dtype="int8", described="four")

    right, given = SCORES.double().numpy(), OF_FILE.double().numpy()
    labels = [label for batch in LABELS[name] for label in (batch or [-1, -1])]
    top1 = source_top1 = None
    lost = 25.0
    if min(labels) >= 0 and max(labels) < 3:
        top1 = 100 * float((given.argmax(1) == labels).mean())
        source_top1 = 100 * float((right.argmax(1) == labels).mean())
        lost = source_top1 - top1
    assert found.relative_l2 == pytest.approx(
        np.linalg.norm(given - right) / np.linalg.norm(right), rel=1e-6
    )
    assert found == checks.Figures(
        relative_l2=found.relative_l2,
        agreement=0.75,
        count=4,
        tolerance=1.0,
        inputs="four",
        answers=4,
        unit="images",
        source_top1=source_top1,
        top1=top1,
        exact=False,
    )
    assert found.points_lost == lost


class Writes(nn.Module):
    """Writes into all of its inputs."""

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        result = x.sub_(0.5).flatten(1)
        for other in others:
            result = result + other.mul_(2).flatten(1)
        return result


@pytest.mark.parametrize("count", [1, 2])
def test_neither_a_file_nor_its_network_writes_into_the_users_tensors(count: int) -> None:
    network = Writes()
    given = tuple(torch.rand(4, *SIZE) for _ in range(count))
    before = [tensor.clone() for tensor in given]
    signature = Signature.of(network, Example(tuple(tensor.clone() for tensor in given)))
    reference = checks.Reference(network, signature)

    found = checks.check(reference, Writes(), [(given, None)] * 2)

    assert found.passed
    for tensor, as_before in zip(given, before, strict=True):
        assert torch.equal(tensor, as_before)


class Picky(nn.Module):
    """Runs on one image alone, and raises for any other."""

    def __init__(self, image: Tensor) -> None:
        super().__init__()
        self.image = image

    def forward(self, x: Tensor) -> Tensor:
        if not torch.equal(x, self.image):
            raise ValueError("another image")
        return x.flatten(1)


def test_a_network_that_runs_on_no_other_numbers_can_be_compared() -> None:
    """That it raises shows that it depends on its input."""
    image = torch.rand(1, *SIZE)
    network = Picky(image)
    reference = checks.Reference(network, Signature.of_images(network, "logits"))

    found = checks.check(reference, nn.Flatten(), [(image, None)])

    assert (found.verdict, found.relative_l2, found.count) == ("PROVED", 0.0, 1)


# What a file adds to its network.


class Chosen(nn.Module):
    """Takes images and the numbers of some of them, and gives these images and numbers."""

    def forward(self, images: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        return images[numbers], numbers


def test_in_half_precision_integers_stay_as_they_are() -> None:
    images = torch.rand(3, *SIZE)
    numbers = torch.tensor([2, 0])
    network = Chosen()
    shipped = Shipped(network, Signature.of(network, Example((images, numbers))))

    chosen, same = shipped.in_half(torch.float16)(images, numbers)

    assert torch.equal(chosen, images[numbers].half().float())
    assert torch.equal(same, numbers)
    assert same.dtype == torch.int64


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_every_copy_of_the_network_in_a_file_normalizes_and_has_a_softmax_if_it_has(
    normalize: bool, softmax: bool
) -> None:
    mean, std = torch.tensor([[0.3, 0.4, 0.5], [0.2, 0.25, 0.4]]).reshape(2, 3, 1, 1)
    pixels = torch.rand(4, *SIZE)

    def shipped() -> Shipped:
        normalization = (mean, std) if normalize else None
        return Shipped(small(), normalization=normalization, softmax=softmax)

    halved = shipped().in_half(torch.float16)
    copies = {
        "itself": shipped(),
        "around": shipped().around(small()),
        "rounded to float16": shipped().rounded(torch.float16),
        "rounded to bfloat16": shipped().rounded(torch.bfloat16),
        "in float16": shipped().in_half(torch.float16),
        "in bfloat16": shipped().in_half(torch.bfloat16),
        "in float32 again": FileContents(halved, (pixels,)).in_float32.network,
        "in float16 as before": halved,
    }

    images = pixels.double()
    if normalize:
        images = (images - mean) / std
    wanted = small().double()(images)
    if softmax:
        wanted = wanted.softmax(-1)
    for name, network in copies.items():
        answers = network(pixels)
        assert answers.dtype == torch.float32, name
        assert (answers - wanted).norm() < 2e-2 * wanted.norm(), name


class Padded(nn.Module):
    """Puts a number around its images, as timm's pooling does with -inf."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (1, 1, 1, 1), value=self.value)


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan, -3.4e38, 1e-45, 0.5])
def test_any_number_stands_in_a_pt2_file_and_is_read_again(value: float, tmp_path: Path) -> None:
    x = torch.rand(1, *SIZE)
    file = tmp_path / "a.pt2"
    form = formats.get("pt2")
    form.write(FileContents(Shipped(Padded(value)), (x,)), file)

    answers = form.open(file)(x)

    assert answers.shape == (1, 3, 10, 10)
    torch.testing.assert_close(answers, Padded(value)(x), rtol=0, atol=0, equal_nan=True)


FEATURES = {"inputs": {"input": [[3, 8, 8], "float32"]}}


@pytest.mark.parametrize(
    ("record", "inputs", "sizes"),
    [
        ({}, None, [1, 15]),
        (FEATURES, None, [2, 1]),
        ({}, torch.rand(5, *SIZE), [4, 1]),
        ({}, [torch.rand(4, *SIZE), torch.rand(4, *SIZE)], [3, 1, 4]),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_file_of_any_batch_is_checked_at_two_sizes(
    dynamic: bool, record: Any, inputs: Any, sizes: list[int]
) -> None:
    settings = FileSettings("onnx", "fp32", dynamic_batch=dynamic)
    model = small(**record)
    provenance.attach(model, Provenance(source="net", pretrained_cfg={**STATED, **record}))
    request = ExportRequest.of(model, Path("a.onnx"), formats.get("onnx"), inputs, settings)

    batches, _ = request.batches()

    found: list[int] = []
    for given, _ in batches:
        tensor = given[0] if isinstance(given, tuple) else given
        found.append(len(tensor))
    assert found == (sizes if dynamic else [1] * sum(sizes))


def test_a_file_that_answers_the_first_image_of_a_batch_alone_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the images that it is checked on come one by one."""
    opened = pt2_file.open

    def of_first_images(file: Path, **options: Any) -> Any:
        runs = opened(file, **options)
        return lambda images: runs(images)[:1].expand(len(images), -1)

    monkeypatch.setattr(pt2_file, "open", of_first_images)
    images = torch.rand(4, *SIZE).split(1)
    model = small(**STATED)

    alone = normswap.export(model, tmp_path / "one.pt2", images=images)
    with pytest.raises(VerificationError, match="computes something else"):
        normswap.export(model, tmp_path / "any.pt2", images=images, dynamic_batch=True)

    assert alone.figures is not None
    assert (alone.figures.verdict, alone.figures.count) == ("PROVED", 4)
    assert not (tmp_path / "any.pt2").exists()


# Quantization.


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_quantized_file_says_on_how_many_images_it_was_calibrated(
    dynamic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on how many batches. A stand-in writes the file in float32."""

    def write(contents: FileContents, file: Path, _how: Quantization) -> None:
        pt2_file.write(contents, file)

    monkeypatch.setattr(pt2_file, "write_int8", write)
    images = torch.rand(9, *SIZE)

    done = normswap.export(
        small(**STATED),
        tmp_path / "a.pt2",
        dtype="int8",
        dynamic_batch=dynamic,
        calibrate=images[:6].split(4),
        images=images[6:],
    )

    assert done.quantized == {"calibrated_on": 6, "weight_bits": 7}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("asked", "bits"), [(None, 7), (8, 8)])
def test_the_quantizer_gets_every_image_as_the_file_takes_it(
    asked: int | None, bits: int, normalize: bool, dynamic: bool
) -> None:
    pixels = torch.rand(70, *SIZE)
    mean, std = (torch.tensor(STATED[name]).reshape(3, 1, 1) for name in ("mean", "std"))
    images = (pixels - mean) / std
    settings = FileSettings(
        "onnx", "int8", dynamic, input_size=SIZE, normalize=normalize, weight_bits=asked
    )
    request = ExportRequest.of(small(**STATED), Path("a.onnx"), formats.get("onnx"), None, settings)

    how = request.quantization([images[:64], (images[64:], torch.zeros(6))], images[:2])

    assert how is not None
    torch.testing.assert_close(torch.cat([*how.images]), pixels if normalize else images)
    assert {len(batch) for batch in how.images} == {35 if dynamic else 1}
    assert how.weight_bits == bits


def test_nncf_is_told_to_take_every_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 300 unless it is told otherwise. A stand-in saves its import, of several seconds."""
    asked: dict[str, Any] = {}

    def quantize(model: object, dataset: list[Any], **options: Any) -> object:
        asked.update(options, dataset=dataset)
        return model

    anything: Any = SimpleNamespace
    nncf: Any = ModuleType("nncf")
    nncf.quantize = quantize
    nncf.Dataset = list
    nncf.AdvancedQuantizationParameters = anything
    nncf.QuantizationPreset = anything(MIXED="mixed")
    parameters: Any = ModuleType("nncf.quantization.advanced_parameters")
    parameters.OverflowFix = anything(ENABLE="enable", DISABLE="disable")
    parameters.QuantizationParameters = anything
    estimators: Any = ModuleType("nncf.quantization.range_estimator")
    estimators.RangeEstimatorParametersSet = anything(MINMAX="least and largest")
    for module in (nncf, ModuleType("nncf.quantization"), parameters, estimators):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(openvino_file, "_model", lambda *_: "model")
    monkeypatch.setattr(openvino_file, "_save", lambda *_: None)
    images = torch.rand(310, 3, 4, 4)
    contents = FileContents(Shipped(small()), (images[:1],))

    for bits, fix in ((7, "enable"), (8, "disable")):
        openvino_file.write_int8(contents, tmp_path / "a.xml", Quantization(images.split(1), bits))

        assert asked["subset_size"] == len(asked["dataset"]) == 310
        assert np.array_equal(np.concatenate(asked["dataset"]), images.numpy())
        advanced = asked["advanced_parameters"]
        assert advanced.overflow_fix == fix
        assert advanced.weights_quantization_params.per_channel
        assert advanced.activations_range_estimator_params == "least and largest"


# Sidecars.

SUBSETS: list[tuple[str, ...]] = [
    subset for size in range(5) for subset in itertools.combinations(STATED, size)
]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("stated", SUBSETS, ids="+".join)
def test_a_file_states_what_its_network_states_and_assumes_the_rest(
    stated: tuple[str, ...], normalize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small(**{name: STATED[name] for name in stated})
    body = sidecar.body(model, SIZE, "logits", normalize=normalize, dynamic=False)
    body = json.loads(json.dumps(body))
    monkeypatch.setattr(ExportedFile, "opened", lambda _file: model)

    network = ExportedFile(Path("a.pt2"), formats.get("pt2"), {}, body).network()

    wanted = preprocessing.data_config(model)
    missing = {name for name in STATED if name not in stated}
    if normalize:
        # The file takes pixels, whatever is known of the mean and deviation inside of it.
        wanted |= {"mean": [0.0] * 3, "std": [1.0] * 3}
        missing -= {"mean", "std"}
    found = preprocessing.data_config(network)
    assert {*preprocessing.assumed(network)} == missing
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert _plain(found[name]) == _plain(value), name


@pytest.mark.parametrize(
    "names",
    [
        None,
        ["cow", "ant", "bee"],
        {"0": "cow", "1": "ant", "2": "bee"},
        {"2": "bee", "0": "cow", "1": "ant"},
    ],
)
@pytest.mark.parametrize("output", ["logits", "probabilities"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_answers_of_a_file_have_the_names_and_the_scale_that_it_states(
    names: Any, output: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = {"input_size": SIZE, **STATED, **({} if names is None else {"label_names": names})}
    model = provenance.attach(small(), Provenance(source="net", pretrained_cfg=record))
    body = sidecar.body(model, SIZE, output, normalize=False, dynamic=dynamic)
    scores = torch.tensor([[2.0, 0.5, -1.0]])
    taken: list[int] = []

    def runs(images: Tensor) -> Tensor:
        taken.append(len(images))
        answers = scores.expand(len(images), -1)
        return answers.softmax(1) if output == "probabilities" else answers

    monkeypatch.setattr(ExportedFile, "opened", lambda _file: runs)

    network: Any = ExportedFile(Path("a.pt2"), formats.get("pt2"), {}, body).network()

    answers = network(torch.rand(4, *SIZE))
    assert taken == ([4] if dynamic else [1] * 4)
    torch.testing.assert_close(answers.softmax(1), scores.softmax(1).expand(4, -1))
    record = preprocessing.stated(network)
    assert record.get("label_names") == (["cow", "ant", "bee"] if names else None)
    assert record.get("num_classes") == (3 if names else None)
    assert tuple(record["input_size"]) == SIZE


def test_the_record_of_an_export_is_that_by_hand(tmp_path: Path) -> None:
    model = small(**STATED)
    images = torch.randn(5, *SIZE)
    labels = model(images).argmax(1)
    labels[0] = (labels[0] + 1) % 3

    done = normswap.export(
        model, tmp_path / "a.pt2", images=[(images[:3], labels[:3]), (images[3:], labels[3:])]
    )

    file = tmp_path / "a.pt2"
    beside = tmp_path / "a.pt2.preprocess.json"
    assert {*tmp_path.iterdir()} == {file, beside}
    assert (done.file, done.parts, done.sidecar) == (file, (), beside)
    assert (done.format, done.dtype, done.input_size) == ("pt2", "fp32", SIZE)
    assert (done.dynamic_batch, done.noise_only, done.quantized) == (False, False, None)
    assert (done.bytes, done.notes, done.inputs) == (file.stat().st_size, (), ())
    # The norm is folded. What is left are the layers of the network.
    assert {
        "conv2d.default": 1,
        "relu.default": 1,
        "linear.default": 1,
    }.items() <= done.nodes.items()
    assert not [kind for kind in done.nodes if "norm" in kind]
    assert done.seconds > 0
    figures = done.figures
    assert figures is not None
    assert (figures.count, figures.answers, figures.agreement) == (5, 5, 1.0)
    assert figures.top1 == figures.source_top1 == pytest.approx(80.0)
    assert (figures.verdict, figures.points_lost, figures.remark) == ("PROVED", 0.0, "")
    told = json.loads(beside.read_text(encoding="utf-8"))
    assert told.pop("checked") == {
        **json.loads(json.dumps(asdict(figures))),
        "noise_only": False,
    }
    assert told == {
        "input": {
            "name": "images",
            "dtype": "float32",
            "layout": "NCHW",
            "batch": 1,
            "size": [3, 8, 8],
            "channels": "RGB",
            "range": [0.0, 1.0],
        },
        "resize": {
            "to": [10, 10],
            "crop_pct": 0.8,
            "crop_mode": "center",
            "interpolation": "bilinear",
        },
        "normalize": {"mean": [0.3, 0.4, 0.5], "std": [0.2, 0.25, 0.4]},
        "assumed": [],
        "output": {"name": "logits", "dtype": "float32", "labels": None},
        "precision": {"weights": "fp32", "arithmetic": "fp32"},
    }


@pytest.mark.parametrize(
    "dtype", ["fp32", "fp16", "bf16", pytest.param("int8", marks=pytest.mark.slow)]
)
def test_verify_measures_what_export_measured(dtype: str, tmp_path: Path) -> None:
    """All that is known of the file is in the file itself, and its ending may be of capitals."""
    file = tmp_path / "NET.PT2"
    model = small(**STATED)
    images = torch.randn(5, *SIZE)
    labels = model(images).argmax(1)
    labels[0] = (labels[0] + 1) % 3
    batches = [(images[:3], labels[:3]), (images[3:], labels[3:])]
    calibrate = torch.randn(4, *SIZE) if dtype == "int8" else None
    done = normswap.export(model, file, dtype=dtype, images=batches, calibrate=calibrate)
    beside = json.loads(done.sidecar.read_text(encoding="utf-8"))

    for told in (beside, {name: beside[name] for name in beside if name not in MEASURED}):
        found = ExportedFile.find(str(file))

        assert found is not None
        assert found.precision == dtype
        assert found.body == told
        assert exported_file.verify(found, model, batches) == done.figures
        done.sidecar.unlink(missing_ok=True)


# What a sidecar has more than its copy in the file, which is written before it is measured.
MEASURED = ("checked", "quantization")


def _plain(value: object) -> object:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


# What is replaced.

EVERY_FILE = [
    pytest.param(name, beside, id=f"{name}-{beside.name}")
    for name in formats.names()
    for file in [Path(f"net{formats._FORMATS[name].ending}")]
    for beside in (*formats._FORMATS[name].files(file), formats.sidecar_of(file))
]


@pytest.mark.parametrize(("name", "beside"), EVERY_FILE)
def test_no_file_of_a_format_is_replaced_without_force(
    name: str, beside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "require_packages", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    beside.write_bytes(b"somebody's")
    file = Path(f"net{formats._FORMATS[name].ending}")

    with pytest.raises(OutputError, match=beside.name):
        formats.check(file, FileSettings(name))

    if file.suffix != ".mlpackage":
        # A package is a directory, so that a file is none, and force does not replace it.
        formats.check(file, FileSettings(name, force=True))
    assert beside.read_bytes() == b"somebody's"
