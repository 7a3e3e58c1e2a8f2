"""`normswap export --precision int8`, end to end on the demo's network, and its refusals."""

import copy
import json
import os
import shutil
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from support.lived_in_networks import distance
from support.runtime_process import run_alone
from support.sampled_tables import quick
from timm.layers import Conv2dSame
from torch import Tensor, nn

import normswap
from normswap.cli.app import main
from normswap.cli.commands import export_command
from normswap.errors import NormswapError, OptionError, RefusedError, VerificationError
from normswap.exporting import exporter, formats, pt2_file
from normswap.exporting.exported_module import Shipped, correct_biases
from normswap.exporting.settings import Quantization
from normswap.images import datasets
from normswap.storage.checkpoint import open_model

DATA = Path(normswap.__file__).parent / "demo_data"
TAR = str(DATA / "images.tar")


def small() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.ReLU6(),
    ]
    head = [nn.Conv2d(8, 6, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)]
    return nn.Sequential(*layers, *head).eval()


def pictures(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def made(file: Path, **options: Any) -> Any:
    given = {"calibrate": pictures(32), "images": pictures(64, 1), "dynamic_batch": True, **options}
    return normswap.export(small(), file, dtype="int8", input_size=(3, 16, 16), **given)


@pytest.mark.slow
def test_a_small_network_in_onnx(tmp_path: Path) -> None:
    """The file, run by ONNX Runtime alone, against the network in float64; its weights are integers
    of 7 bits.
    """
    file = tmp_path / "net.onnx"
    done = made(file)
    x = pictures(64, 2)
    session = formats.get("onnx").open(file)
    with torch.no_grad():
        assert distance(small().double()(x.double()), session(x).double()) < 0.1
    weights = [
        t
        for t in onnx.load(file).graph.initializer
        if t.data_type == onnx.TensorProto.INT8 and len(t.dims) > 1
    ]

    assert len(weights) == 4
    assert all(abs(onnx.numpy_helper.to_array(t)).max() == 64 for t in weights)
    assert done.quantized["calibrated_on"] == 32

    body = json.loads(done.sidecar.read_text(encoding="utf-8"))
    assert body["precision"] == {"weights": "int8", "arithmetic": "int8"}
    assert body["quantization"]["measured"]["count"] == 64
    assert body["quantization"]["measured"]["agreement"] == done.figures.agreement
    assert {prop.key for prop in onnx.load(file).metadata_props} >= {"source", "preprocess"}


@pytest.mark.slow
def test_scores_are_not_rounded(tmp_path: Path) -> None:
    """Bytes with one step have 256 values at most."""
    made(tmp_path / "net.onnx")
    assert len(formats.get("onnx").open(tmp_path / "net.onnx")(pictures(512, 2)).unique()) > 512


def largest(file: Path) -> set[int]:
    """The largest whole number in each tensor of int8 weights."""
    if file.suffix == ".pt2":
        return {int(value.int().abs().max()) for value in held(file).values()}
    if file.suffix == ".onnx":
        found = [
            onnx.numpy_helper.to_array(t)
            for t in onnx.load(file).graph.initializer
            if t.data_type == onnx.TensorProto.INT8 and len(t.dims) > 1
        ]
    else:
        import openvino as ov

        constants = (
            op for op in ov.Core().read_model(file).get_ops() if op.get_type_name() == "Constant"
        )
        found = [
            op.data for op in constants if op.get_element_type() == ov.Type.i8 and op.data.ndim < 5
        ]  # not by groups
    return {int(abs(values.astype(int)).max()) for values in found}


@pytest.mark.slow
@pytest.mark.parametrize("ending", quick(["onnx", "xml", "pt2"], ["onnx"]))
@pytest.mark.parametrize(("bits", "levels"), [(7, {63, 64}), (8, {127})])
def test_weights_have_the_bits_that_are_asked_for(
    ending: str, bits: int, levels: set[int], tmp_path: Path
) -> None:
    done = made(tmp_path / f"net.{ending}", weight_bits=bits)
    assert largest(done.file) <= levels
    assert done.quantized["weight_bits"] == bits


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weight_bits": 9}, "weights of 9 bits: onnx has them of 7 or 8"),
        ({"weight_bits": 8, "dtype": "fp32", "calibrate": None}, "weight_bits=8 is for int8"),
    ],
)
def test_bits_that_cannot_be(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    given = {"calibrate": pictures(32), "images": pictures(64, 1), "dtype": "int8", **options}
    with pytest.raises(OptionError, match=said):
        normswap.export(small(), tmp_path / "net.onnx", input_size=(3, 16, 16), **given)
    assert not any(tmp_path.iterdir())


def held(file: Path) -> dict[str, Tensor]:
    """Tensors of more than one dimension in a pt2 file."""
    return {name: value for name, value in pt2_file.load(file).state_dict.items() if value.ndim > 1}


@pytest.mark.slow
@pytest.mark.parametrize("batch", [7, 64])
def test_a_small_network_in_pt2(batch: int, once: Path) -> None:
    """The file, run by torch alone in a process without torchao, against the network in float64."""
    x = pictures(64, 2)
    with torch.no_grad():
        expected = small().double()(x.double())
    assert 1e-4 < distance(expected, run_alone(once, "pt2 in int8", x, batch=batch).double()) < 0.02


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("int8") / "net.pt2"
    made(file)
    return file


@pytest.mark.slow
def test_weights_in_pt2(once: Path) -> None:
    """Integers of 7 bits, of every layer and each of its channels, and nothing of them in fp32
    beside that.
    """
    weights = held(once)
    assert sorted(tuple(value.shape) for value in weights.values()) == [
        (5, 6),
        (6, 8, 1, 1),
        (8, 1, 3, 3),
        (8, 3, 3, 3),
    ]
    assert {value.dtype for value in weights.values()} == {torch.int8}
    assert all((value.int().abs().flatten(1).amax(1) == 64).all() for value in weights.values())


@pytest.mark.slow
def test_what_is_written_with_pt2(once: Path) -> None:
    extra = {"dtype": "", "source": "", "preprocess": ""}
    torch.ao.quantization.fx._decomposed  # noqa: B018 (`held` has imported it)
    torch.export.load(once, extra_files=extra)
    assert extra["dtype"] == "int8"
    assert json.loads(extra["preprocess"])["input"]["batch"] is None
    body = json.loads(once.with_name("net.pt2.preprocess.json").read_text(encoding="utf-8"))[
        "quantization"
    ]
    of_format, of_images = body["notes"]
    assert "import torch.ao.quantization.fx._decomposed before" in of_format
    assert of_images.startswith("assumed, as the network does not say: mean")
    assert (body["calibrated_on"], body["weight_bits"], body["measured"]["count"]) == (32, 7, 64)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("normalize", [False, True])
def test_ranges_in_pt2(normalize: bool, tmp_path: Path) -> None:
    """255 steps from the least to the largest number of all images; and weights as small as they
    like have 64.
    """
    network = small()
    file = tmp_path / "net.pt2"
    x = pictures(8)
    network[3].weight.data *= 1e-6
    # Without biases the answers still move with the input, so that they can be proved.
    for index in (3, 5, 8):
        network[index].bias.data.zero_()
    given: dict[str, Any] = {
        "calibrate": x,
        "images": x,
        "input_size": (3, 16, 16),
        "normalize": normalize,
    }
    normswap.export(network, file, dtype="int8", **given)
    found = [
        node.args[1:]
        for node in pt2_file.load(file).graph.nodes
        if "quantize_per_tensor" in node.name
    ]

    assert all(args[2:] == (0, 255, torch.uint8) for args in found)

    step, zero = found[0][:2]
    assert step == pytest.approx(float(x.max() - x.min()) / 255, rel=1e-5)
    assert zero == round(float(-x.min()) / step)

    weights = [value for value in held(file).values() if value.dtype == torch.int8]
    assert all((value.int().abs().flatten(1).amax(1) == 64).all() for value in weights)


def input_step(file: Path) -> float:
    """By which the images are rounded."""
    if file.suffix == ".onnx":
        graph = onnx.load(file).graph
        first = next(
            node
            for node in graph.node
            if node.op_type == "QuantizeLinear" and node.input[0] == "images"
        )
        held = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
        return float(held[first.input[1]])
    import openvino as ov

    first = next(
        op
        for op in ov.Core().read_model(file).get_ordered_ops()
        if op.get_type_name() == "FakeQuantize"
    )
    low, high = (float(first.input_value(i).get_node().data) for i in (1, 2))
    return (high - low) / 255


@pytest.mark.slow
@pytest.mark.parametrize("ending", quick(["onnx", "xml"], ["onnx"]))
def test_ranges_go_from_the_least_number_to_the_largest(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However rare they are: to cut two numbers of a million off would cost less here."""
    file = tmp_path / f"net.{ending}"
    x = pictures(2048)
    x[3, 0, 0, 0] = -20.0
    x[1111, 1, 2, 3] = 20.0
    options: dict[str, Any] = {"calibrate": x.split(256), "images": x[:8], "dynamic_batch": True}
    normswap.export(small(), file, dtype="int8", input_size=(3, 16, 16), **options)

    assert input_step(file) == pytest.approx(40 / 255, rel=0.02)


class Unusual(nn.Module):
    """A convolution of a class of its own, and layers that are called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = Conv2dSame(3, 6, 3, stride=2)
        self.twice = nn.Conv2d(6, 6, 3, padding=1)
        self.again = nn.Linear(6, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(self.stem(x).relu()).relu()).mean((2, 3))
        head: Tensor = self.head(self.again(self.again(x).relu()))
        return head


@pytest.mark.slow
def test_every_layer_is_quantized_in_pt2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {
        "calibrate": pictures(32),
        "images": pictures(32, 1),
        "input_size": (3, 16, 16),
    }
    done = normswap.export(Unusual().eval(), tmp_path / "net.pt2", dtype="int8", **options)
    assert {value.dtype for value in held(tmp_path / "net.pt2").values()} == {torch.int8}
    assert done.nodes["quantized_decomposed.dequantize_per_channel.default"] in (4, 6)
    assert done.figures.relative_l2 < 0.02


@pytest.mark.parametrize(("halves", "levels"), [(False, {}), (True, {"stem": 63.5, "twice": 127})])
def test_rounding_shifts_the_mean_of_no_channel(halves: bool, levels: dict[str, float]) -> None:
    """Each layer, its weight rounded by torch's own function, has the mean that it had; without the
    correction not.

    NNCF rounds weights of 7 bits to steps of a 63.5th of the largest, and leaves depthwise layers 8
    bits.
    """
    network: Any = Unusual().eval()
    if halves:
        network.twice = nn.Conv2d(6, 6, 3, padding=1, groups=6)
    corrected: Any = Shipped(copy.deepcopy(network))
    batches = pictures(64).split(16)
    correct_biases(corrected, Quantization(batches, 7), halves=halves)

    for path in levels or ("stem", "twice", "again", "head"):
        layer = network.get_submodule(path)
        inputs = []
        with layer.register_forward_pre_hook(
            lambda _layer, args, inputs=inputs: inputs.append(args[0])
        ):
            for batch in batches:
                network(batch)

        rounded = copy.deepcopy(corrected.network.get_submodule(path))
        scale = rounded.weight.abs().flatten(1).amax(1) / levels.get(path, 64)
        zeros = torch.zeros(len(scale), dtype=torch.int32)
        rounded.weight.data = torch.fake_quantize_per_channel_affine(
            rounded.weight, scale, zeros, 0, -127, 127
        )
        places = [0, *range(2, inputs[0].ndim)]
        uncorrected = copy.deepcopy(rounded)
        uncorrected.bias = layer.bias
        before, after, without = (
            torch.cat([candidate(x) for x in inputs]).double().mean(places)
            for candidate in (layer, rounded, uncorrected)
        )
        shift = (before - after).abs()

        # A channel's largest weight lies between two steps of a 63.5th, and may be rounded to
        # either.
        assert (shift.median() if levels.get(path) == 63.5 else shift.max()) < 1e-6
        assert (before - without).abs().max() > 1e-5


def test_what_torchao_cannot_do_is_refused(tmp_path: Path) -> None:
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding="same"), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ).eval()

    with pytest.raises(RefusedError, match=r"^torchao cannot quantize it: .*conv2d"):
        normswap.export(
            network,
            tmp_path / "net.pt2",
            dtype="int8",
            input_size=(3, 16, 16),
            calibrate=pictures(8),
            images=pictures(8),
        )

    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_openvino(tmp_path: Path) -> None:
    done = made(tmp_path / "net.xml")
    assert done.figures.relative_l2 < 0.1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "net.bin",
        "net.xml",
        "net.xml.preprocess.json",
    ]
    assert done.nodes["FakeQuantize"] > 0


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precision_hides_no_wrong_network(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fold_for_export = exporter.fold_for_export

    def wrong(*args: Any, **kwargs: Any) -> nn.Module:
        network = fold_for_export(*args, **kwargs)
        with torch.no_grad():
            network[0].weight.mul_(1.0005)
        return network

    monkeypatch.setattr(exporter, "fold_for_export", wrong)
    with pytest.raises(VerificationError, match="the folded network computes something else"):
        normswap.export(small(), tmp_path / "net.pt2", dtype=dtype, input_size=(3, 16, 16))


BAD: list[tuple[str, dict[str, Any], type[NormswapError], str]] = [
    ("net.onnx", {"calibrate": None}, OptionError, "int8 needs images to calibrate on"),
    ("net.onnx", {"images": None}, OptionError, "int8 needs other images to measure on"),
    ("net.onnx", {"calibrate": []}, OptionError, "no images to calibrate on"),
    (
        "net.onnx",
        {"calibrate": [pictures(8), torch.zeros(8, 3, 8, 16)]},
        OptionError,
        "images to calibrate on are 3,8,16: the file takes 3,16,16",
    ),
    ("net.param", {}, OptionError, "ncnn is not written in int8: there are onnx, openvino, pt2"),
    ("net.pt2", {"calibrate": None}, OptionError, "int8 needs images to calibrate on"),
    ("net.onnx", {"dtype": "fp16"}, OptionError, "fp16 is not calibrated"),
]


@pytest.mark.parametrize(("name", "options", "kind", "match"), BAD)
def test_bad_input(
    name: str, options: dict[str, Any], kind: type[NormswapError], match: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {
        "dtype": "int8",
        "calibrate": pictures(8),
        "images": pictures(8),
        **options,
    }

    with pytest.raises(kind, match=match):
        normswap.export(small(), tmp_path / name, input_size=(3, 16, 16), **given)
    assert list(tmp_path.iterdir()) == []


COMMANDS = [
    (["--precision", "int8"], "--precision int8 needs --calibrate DATA"),
    (["--calibrate", TAR], "--calibrate is for --precision int8"),
    (["--precision", "int4"], "unknown precision 'int4'"),
    (["--precision", "int8", "--calibrate", "nowhere"], "nowhere does not exist"),
    (
        ["--precision", "int8", "--calibrate", TAR, "--calibrate-samples", "500"],
        "leave none to measure on",
    ),
]


@pytest.mark.parametrize("ending", ["onnx", "pt2"])
@pytest.mark.parametrize(("words", "said"), COMMANDS)
def test_bad_commands(
    words: list[str], said: str, ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(DATA), "-o", str(tmp_path / f"net.{ending}"), *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "package", "form"), [("a.xml", "nncf", "openvino"), ("a.pt2", "torchao", "pt2")]
)
def test_a_missing_package_names_its_extra(
    name: str, package: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        OptionError, match=rf"{form} in int8 needs the package {package}.*'\.\[quantize\]'"
    ):
        made(tmp_path / name)


def test_images_beyond_the_most_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = datasets.make_loader(open_model(str(DATA)), TAR, batch_size=64, workers=0)
    read: list[int] = []
    item = type(loader.batches.dataset).__getitem__
    monkeypatch.setattr(
        type(loader.batches.dataset),
        "__getitem__",
        lambda self, index: read.append(index) or item(self, index),
    )
    one, two = datasets.split_for_calibration(loader, 100, most=50)

    assert (one.count, two.count) == (100, 50)

    for part in (one, two):
        assert sum(len(images) for images, _ in part) == part.count
    assert len(set(read)) == len(read) == 150


@pytest.mark.parametrize(
    ("calibrate", "samples", "counts"),
    [(30, 20, (30, 20)), (30, None, (30, 470)), (None, 30, (250, 30)), (None, None, (250, 250))],
)
def test_images_to_calibrate_on_and_to_measure_on_are_counted_apart(
    calibrate: int | None, samples: int | None, counts: tuple[int, int]
) -> None:
    images = export_command.Checked(samples=samples)
    parts = export_command.Int8(TAR, calibrate_samples=calibrate).parts(
        images, open_model(str(DATA))
    )
    assert tuple(part.count for part in parts) == counts


def test_images_of_another_place_leave_all_images_to_calibrate_on(tmp_path: Path) -> None:
    other = tmp_path / "images.tar"
    shutil.copy(TAR, other)
    model = open_model(str(DATA))

    images = export_command.Checked(data=str(other), samples=40)
    calibrate, measured = export_command.Int8(TAR).parts(images, model)
    few, _ = export_command.Int8(TAR, calibrate_samples=300).parts(images, model)
    assert (calibrate.count, measured.count, few.count) == (500, 40, 300)

    # The same place is split, so that no image is measured on that set the ranges, however it is
    # named.
    (tmp_path / "link.tar").symlink_to(TAR)
    (tmp_path / "root" / "val").mkdir(parents=True)
    with tarfile.open(TAR) as tar:
        tar.extractall(tmp_path / "root" / "val", filter="data")
    root = str(tmp_path / "root")
    for first, second in (
        (TAR, TAR),
        (TAR, str(tmp_path / "link.tar")),
        (TAR, os.path.relpath(TAR)),
        (f"{root}/val", root),
        (f"{root}/val/", f"{root}/val"),
    ):
        same = export_command.Int8(first).parts(replace(images, data=second), model)
        assert [part.count for part in same] == [250, 40], (first, second)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["onnx", "xml", "pt2"])
def test_the_demo_network_from_end_to_end(
    ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is printed is what the file does on the images that were left, counted by hand."""
    file = tmp_path / f"net.{ending}"
    words = [
        "--precision",
        "int8",
        "--calibrate",
        TAR,
        "--calibrate-samples",
        "200",
        "--dynamic-batch",
    ]

    assert main(["export", str(DATA), "-o", str(file), *words, "--json"]) == 0

    body = json.loads(capsys.readouterr().out)
    source = open_model(str(DATA))
    loader = datasets.make_loader(source, TAR, batch_size=64, workers=0, split="train")
    runs = formats.get(body["format"]).open(file)

    right = count = 0
    for x, labels in datasets.split_for_calibration(loader, 200)[1]:
        right += int((runs(x).argmax(1) == labels).sum())
        count += len(x)

    assert (body["figures"]["count"], count) == (300, 300)
    assert body["figures"]["top1"] == pytest.approx(100 * right / count)
    assert body["figures"]["top1"] > body["figures"]["source_top1"] - 2
