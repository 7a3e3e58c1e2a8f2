"""Law: every option of `export` arrives where a file is written, alone and beside each other one.

The rows are the fields of `FileSettings`, so that a new option that does nothing fails by itself.
A stand-in takes the place of each format's functions. From what arrives there, all settings are
read back: those that were asked for, and the defaults of all others.
"""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import normswap
from normswap.errors import NormswapError
from normswap.exporting import exporter, formats
from normswap.exporting.exported_module import FileContents
from normswap.exporting.settings import DTYPES, FileSettings, Quantization
from normswap.surgery.network import Network

# None of these is a default of timm's or of the library's.
STATED: dict[str, Any] = {
    "input_size": (3, 8, 6),
    "mean": (0.3, 0.4, 0.5),
    "std": (0.2, 0.25, 0.4),
    "crop_pct": 0.8,
    "interpolation": "bilinear",
}
# Values of each option; none of them is its default.
VALUES: dict[str, tuple[Any, ...]] = {
    "format": tuple(formats.names()),
    "dtype": DTYPES[1:],
    "dynamic_batch": (True,),
    "input_size": ((3, 6, 9), (3, 9, 6)),
    "normalize": (True,),
    "softmax": (True,),
    "weight_bits": (7, 8),
    "force": (True,),
}
PAIRS = list(itertools.combinations(VALUES, 2))
STORED = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class Arrived(NamedTuple):
    """What a format is given to write a file.

    Args:
        format: The name of the format.
        contents: The network and what is written beside it.
        quantization: How to quantize the network. None for a file that is not in int8.
    """

    format: str
    contents: FileContents
    quantization: Quantization | None


@functools.cache
def network() -> nn.Module:
    """The network, of three classes for images of any size."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    norm.running_mean = torch.randn(4) / 4
    norm.running_var = torch.rand(4) + 0.5
    layers = [nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model: Any = nn.Sequential(*layers, nn.Linear(4, 3)).eval()
    model.__dict__["pretrained_cfg"] = STATED
    # The answers depend on the images, so that a lost normalization shows.
    model[-1].weight.data.mul_(6)
    return model


@functools.cache
def in_float64() -> nn.Module:
    return copy.deepcopy(network()).double()


@functools.cache
def folded() -> nn.Module:
    return exporter.fold_for_export(Network(network()))


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> list[Arrived]:
    """All that the formats are given to write, with a stand-in for the functions of each format."""
    given: list[Arrived] = []
    made = folded()

    def stand_in(name: str) -> None:
        form = formats._FORMATS[name]
        module = importlib.import_module(f"normswap.exporting.{name}_file")

        def write(contents: FileContents, file: Path, how: Quantization | None = None) -> None:
            given.append(Arrived(name, contents, how))
            for part in form.files(file):
                part.write_bytes(b"written")

        def runs(_file: Path, **_inside: bool) -> Callable[..., Any]:
            return given[-1].contents.network

        monkeypatch.setattr(module, "write", write)
        if hasattr(module, "write_int8"):
            monkeypatch.setattr(module, "write_int8", write)
        monkeypatch.setattr(module, "open", runs)
        monkeypatch.setattr(module, "nodes", lambda _file: {})

    for name in formats.names():
        stand_in(name)
    monkeypatch.setattr(formats, "require_packages", lambda *_: None)
    # The network is folded once for all files, as this takes a third of the time.
    monkeypatch.setattr(exporter, "fold_for_export", lambda _network: copy.deepcopy(made))
    return given


def is_possible(settings: FileSettings) -> bool:
    """Whether the format of a file has what is asked for, by the format's own record."""
    form = formats._FORMATS[str(settings.format)]
    if settings.dtype not in form.dtypes or (settings.dynamic_batch and not form.any_count):
        return False
    if settings.weight_bits is None:
        return True
    return settings.dtype == "int8" and settings.weight_bits in form.weight_bits


def pictures(size: Sequence[int]) -> Tensor:
    """Six images: the first two to check the file on, the others to calibrate on."""
    return torch.randn(6, *size, generator=torch.Generator().manual_seed(1))


def export(settings: FileSettings, file: Path) -> None:
    """Export the network with these settings. With `force`, all its files are there before."""
    images = pictures(settings.input_size or STATED["input_size"])
    if settings.force:
        beside = formats._FORMATS[str(settings.format)].files(file)
        for each in (*beside, formats.sidecar_of(file)):
            each.write_bytes(b"of before")
    calibrate = images[2:] if settings.dtype == "int8" else None
    normswap.export(network(), file, images=images[:2], calibrate=calibrate, **asdict(settings))


def answers(pixels: Tensor, *, normalize: bool, softmax: bool) -> Tensor:
    """What a file must answer, in float64."""
    mean, std = (torch.tensor(STATED[name]).double().reshape(3, 1, 1) for name in ("mean", "std"))
    images = pixels.double()
    if normalize:
        images = (images - mean) / std
    scores = in_float64()(images).detach()
    return scores.softmax(1) if softmax else scores


def behaviour(contents: FileContents) -> tuple[bool, bool]:
    """Whether a file normalizes, and whether it gives probabilities, by running its network."""
    pixels = torch.rand(5, *contents.example[0].shape[1:])
    found = contents.network(pixels).double()
    fitting = []
    for normalize, softmax in itertools.product((False, True), repeat=2):
        wanted = answers(pixels, normalize=normalize, softmax=softmax)
        if (found - wanted).norm() < 0.05 * wanted.norm():
            fitting.append((normalize, softmax))
    (only,) = fitting
    return only


def read_back(given: Arrived, *, force: bool) -> FileSettings:
    """The settings of a file, from what its format was given to write.

    Args:
        given: What the format was given.
        force: Whether a file was replaced.
    """
    contents = given.contents
    quantization = given.quantization
    (example,) = contents.example
    normalize, softmax = behaviour(contents)
    return FileSettings(
        format=given.format,
        dtype="int8" if quantization else STORED[contents.network.stored],
        dynamic_batch=contents.dynamic,
        input_size=tuple(example.shape[1:]),
        normalize=normalize,
        softmax=softmax,
        weight_bits=quantization.weight_bits if quantization else None,
        force=force,
    )


def completed(settings: FileSettings) -> FileSettings:
    """The settings with the defaults that hang on the network and the format."""
    bits = settings.weight_bits
    if settings.dtype == "int8" and bits is None:
        bits = formats._FORMATS[str(settings.format)].weight_bits[0]
    size = settings.input_size or STATED["input_size"]
    return replace(settings, input_size=size, weight_bits=bits)


def require_the_rest_says_the_same(given: Arrived, settings: FileSettings) -> None:
    """Whatever else is given to the format must tell of the same settings."""
    contents = given.contents
    size = list(settings.input_size or ())
    weights = [p for p in contents.network.network.parameters() if p.ndim > 1]
    are_rounded = [torch.equal(weight, weight.bfloat16().to(weight.dtype)) for weight in weights]
    dtype = torch.float16 if settings.dtype == "fp16" else torch.float32
    assert {weight.dtype for weight in weights} == {dtype}
    assert are_rounded == [settings.dtype == "bf16"] * len(weights)

    assert len(contents.example[0]) == (2 if settings.dynamic_batch else 1)
    assert (contents.dynamic_shapes is not None) is settings.dynamic_batch
    output = "probabilities" if settings.softmax else "logits"
    assert contents.network.signature.outputs == (output,)

    told = json.loads(contents.metadata["preprocess"])
    assert contents.metadata["dtype"] == told["precision"]["weights"] == settings.dtype
    assert (told["input"]["size"], told["output"]["name"]) == (size, output)
    assert told["input"]["batch"] == (None if settings.dynamic_batch else 1)
    assert (told["normalize"] is None) is settings.normalize


def require_the_images(given: Quantization, settings: FileSettings) -> None:
    """A quantizer must get all images to calibrate on, as the file takes them."""
    images = pictures(settings.input_size or ())[2:]
    if settings.normalize:
        std, mean = (torch.tensor(STATED[name]).reshape(3, 1, 1) for name in ("std", "mean"))
        images = images * std + mean
    assert [len(batch) for batch in given.images] == ([4] if settings.dynamic_batch else [1] * 4)
    torch.testing.assert_close(torch.cat([*given.images]), images)


def test_every_option_has_a_row() -> None:
    assert [each.name for each in fields(FileSettings)] == [*VALUES]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_two_options_arrive_beside_one_another(
    one: str, other: str, arrived: list[Arrived], tmp_path: Path
) -> None:
    for number, values in enumerate(itertools.product(VALUES[one], VALUES[other])):
        asked = {"format": "pt2", one: values[0], other: values[1]}
        if "weight_bits" in asked and "dtype" not in asked:
            asked["dtype"] = "int8"
        settings = FileSettings(**asked)
        file = tmp_path / str(number) / "net.file"
        file.parent.mkdir()
        arrived.clear()

        if not is_possible(settings):
            with pytest.raises(NormswapError):
                export(settings, file)
            assert not arrived
            continue

        export(settings, file)
        (given,) = arrived
        wanted = completed(settings)
        assert read_back(given, force=settings.force) == wanted
        require_the_rest_says_the_same(given, wanted)
        if given.quantization:
            require_the_images(given.quantization, wanted)
        assert file.read_bytes() == b"written"
