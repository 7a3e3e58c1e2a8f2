"""What a network takes: what it says, else its first layer; what its record says of images, or the
user instead.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from support.lived_in_networks import batchnorms, distance, lived_in, run
from support.tiny_modules import C, bn, conv
from torch import Tensor, nn

import normswap
from normswap.cli.app import main
from normswap.diagnosis import normalization
from normswap.errors import OptionError, SourceError, TraceError, VerificationError
from normswap.models import network_input, zoo
from normswap.models.calling import Example
from normswap.models.preprocessing import assumed, assumption, data_config, state
from normswap.models.stated_images import Preprocessing


def test_channels_that_were_given_when_it_was_made() -> None:
    torch.manual_seed(0)
    model = lived_in(
        timm.create_model("resnet18", in_chans=4, channels=(8, 16, 24, 32)),
        torch.randn(4, 4, 64, 64),
    )

    assert network_input.size(model) == (4, 224, 224)

    done = normswap.convert(model, "folded")
    assert batchnorms(done.model) == []
    assert done.report.logits[0].size[1] == 4


def test_a_vision_transformer_of_another_size() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=96, depth=2).eval()
    assert network_input.size(model) == (3, 96, 96)
    assert normswap.convert(model, "folded").report.passed


def test_a_network_that_begins_with_a_transposed_convolution() -> None:
    torch.manual_seed(0)
    begin = nn.ConvTranspose2d(5, C, 2, stride=2)
    model = lived_in(nn.Sequential(begin, bn(), nn.ReLU(), conv(), bn()), torch.randn(4, 5, 9, 9))

    assert network_input.size(model) == (5, 224, 224)
    assert batchnorms(normswap.convert(model, "folded").model) == []


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.Conv1d(6, 4, 3), (6, 224)),
        (nn.Conv3d(2, 4, 3), (2, 16, 64, 64)),
        (nn.Linear(7, 4), (7,)),
        (nn.BatchNorm2d(5), (5, 224, 224)),
        (nn.Sequential(nn.BatchNorm1d(7), nn.Linear(7, 4)), (7,)),
        (nn.Sequential(nn.BatchNorm1d(6), nn.Conv1d(6, 4, 3)), (6, 224)),
        (nn.Sequential(nn.BatchNorm3d(2), nn.Conv3d(2, 4, 3)), (2, 16, 64, 64)),
    ],
)
def test_the_first_layer_tells(layer: nn.Module, expected: tuple[int, ...]) -> None:
    assert network_input.size(nn.Sequential(layer)) == expected
    assert normswap.graph.inspection.inspect(nn.Sequential(layer)).traced.recorded  # type: ignore[attr-defined]


def test_a_config_tells() -> None:
    class Config:
        image_size = 48
        num_channels = 2

    model: Any = nn.Sequential(nn.Flatten(), nn.Linear(2 * 48 * 48, 3))
    model.config = Config()

    assert network_input.size(model) == (2, 48, 48)


class Rearranges(nn.Module):
    """Puts each square of pixels into the channels before its first convolution."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side
        self.conv = nn.Conv2d(12, 4, 1)
        self.pretrained_cfg = {"input_size": (3, 20, 24)}

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(nn.functional.pixel_unshuffle(x, self.side))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Rearranges(2), (3, 20, 24)),
        (Rearranges(1), (12, 20, 24)),
        # It runs on neither size, so what it states is all that is known.
        (Rearranges(7), (3, 20, 24)),
    ],
    ids=["as it states", "as its first layer has it", "neither"],
)
def test_a_run_decides_between_two_numbers_of_channels(
    model: nn.Module, expected: tuple[int, ...]
) -> None:
    assert network_input.size(model) == expected


class Both(nn.Module):
    """Takes two arguments, gives everything one can give."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv()
        self.bn = bn()
        self.other = conv()
        self.bn2 = bn()

    def forward(self, x: Tensor, y: Tensor, *, gain: float = 1.0) -> dict[str, Any]:
        a = self.bn(self.conv(x))
        b = self.bn2(self.other(y))
        found = [{"boxes": row.flatten()[:4] * gain, "labels": torch.ones(1).long()} for row in a]
        return {
            "sum": a + b,
            "parts": (a, [b, None]),
            "found": found,
            "none": torch.zeros(0, 4).to(a),
        }


def both() -> nn.Module:
    torch.manual_seed(0)
    model: Any = Both().double().eval()
    with torch.no_grad():
        for norm in (model.bn, model.bn2):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            norm.weight.normal_()
    return model


def pair() -> tuple[Tensor, Tensor]:
    return torch.randn(2, C, 8, 8, dtype=torch.float64), torch.randn(
        2, C, 8, 8, dtype=torch.float64
    )


FORMS: dict[str, Any] = {
    "a tuple": pair(),
    "keywords": dict(zip(("x", "y"), pair(), strict=True)),
    "a list of tuples": [pair(), pair()],
    "a list of keywords": [{"y": pair()[0], "x": pair()[1], "gain": 2.0}],
    "an example": Example(pair()[:1], {"y": pair()[1]}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_input(form: str) -> None:
    model = both()
    done = normswap.convert(model, "folded", inputs=FORMS[form])

    assert batchnorms(done.model) == []
    assert done.report.passed

    x, y = pair()
    for key in ("sum", "none"):
        assert torch.allclose(model(x, y)[key], done.model(x, y)[key], atol=1e-12)
    assert normswap.verify(model, done.model, inputs=FORMS[form]).passed


class Twofold(nn.Module):
    """Its way depends on an argument that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv()
        self.bn = bn()
        self.deep = conv()
        self.bn2 = bn()

    def forward(self, x: Tensor, deep: bool) -> Tensor:
        x = self.bn(self.conv(x))
        if deep:
            x = self.bn2(self.deep(x))
        return x


@pytest.mark.parametrize("first", [True, False])
def test_every_batch_of_the_users_is_followed(first: bool) -> None:
    model = Twofold().double().eval()
    x = pair()[0]

    done = normswap.convert(model, "folded", inputs=[(x, first), (x, not first)])

    assert batchnorms(done.model) == []
    for deep in (True, False):
        assert distance(run(model, x, deep), run(done.model, x, deep)) < 1e-12


@pytest.mark.parametrize("place", ["bn", "bn2"])
def test_an_error_in_any_output_is_seen(place: str) -> None:
    model = both()
    wrong = both()
    wrong.get_submodule(place).get_parameter("bias").data += 1e-3
    report = normswap.verify(model, wrong, inputs=pair())

    assert not report.passed
    assert report.worst.output


def test_what_is_no_input_is_said() -> None:
    with pytest.raises(OptionError, match="no tensor in the inputs"):
        normswap.convert(both(), "folded", inputs=[])
    with pytest.raises(TraceError, match="takes more than images: it takes 2 tensors"):
        normswap.convert(both(), "folded")
    with pytest.raises(TraceError, match="does not run on an input of size 2x3x8x8"):
        normswap.convert(nn.Sequential(conv()), "folded", inputs=torch.randn(2, 3, 8, 8))
    with pytest.raises(VerificationError, match="does not run"):
        normswap.verify(both(), both(), inputs=torch.randn(2, C, 8, 8))


def test_a_default_device_is_refused_in_a_line_that_says_what_to_do() -> None:
    model = lived_in(nn.Sequential(conv(), bn()), torch.randn(2, C, 8, 8))
    inputs = torch.randn(2, C, 8, 8).double()
    with torch.device("meta"):
        with pytest.raises(
            SourceError, match=r"default device is meta.*with torch.device\('cpu'\)"
        ):
            normswap.convert(model, "folded", inputs=inputs)
        with torch.device("cpu"):
            assert normswap.convert(model, "folded", inputs=inputs).report.passed


def test_one_output_is_called_nothing() -> None:
    model = lived_in(nn.Sequential(conv(), bn()), torch.randn(2, C, 8, 8))
    done = normswap.convert(model, "folded", inputs=torch.randn(2, C, 8, 8).double())

    assert done.report.worst.output == ""

    x = torch.randn(1, C, 5, 5).double()
    assert distance(run(model, x), run(done.model, x)) < 1e-12


@pytest.mark.parametrize(
    ("name", "value"),
    [("running_mean", float("nan")), ("running_var", float("inf")), ("running_var", -1.0)],
)
def test_one_broken_number_is_enough(name: str, value: float) -> None:
    norm = nn.BatchNorm2d(3)
    assert not network_input.has_broken_statistics(norm)
    getattr(norm, name)[1] = value
    assert network_input.has_broken_statistics(norm)

    with pytest.raises(SourceError, match="statistics of the network "):
        network_input.check_values(norm)
    with pytest.raises(SourceError, match=r"statistics of 1\.0 "):
        network_input.check_values(nn.Sequential(nn.ReLU(), nn.Sequential(norm)))


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "float32"])
def test_inputs_of_every_floating_point_type_are_no_whole_numbers(dtype: str) -> None:
    network = zoo.for_inputs(nn.Linear(5, 2), {"input": [(5,), dtype]})

    drawn = network_input.drawn_calls(network)

    assert drawn is not None
    (values,) = drawn[0].tensors()
    assert values.shape == (2, 5)
    assert not torch.equal(values, values.round())
    assert bool((values < 0).any())


class TwoTables(nn.Module):
    """Token numbers look up two tables of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 4)
        self.types = nn.Embedding(3, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids) + self.types(ids)


def test_drawn_indices_are_rows_of_every_table() -> None:
    network = zoo.for_inputs(TwoTables(), {"ids": [(40,), "int64"]})

    drawn = network_input.drawn_calls(network)

    assert drawn is not None
    (ids,) = drawn[0].tensors()
    assert set(ids.flatten().tolist()) == {0, 1, 2}


def silent() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 2),
    ]
    return nn.Sequential(*layers).eval()


def test_stated_and_assumed() -> None:
    model = zoo.open_source("resnet18", weights="random")

    assert not assumed(model)
    assert not assumption(model)

    bare = silent()
    assert assumed(bare) == ("mean", "std", "crop_pct", "interpolation")
    assert "mean 0.485,0.456,0.406" in assumption(bare)
    assert "crop-pct 0.875, interpolation bicubic" in assumption(bare)
    assert assumed(zoo.for_size(bare, (3, 40, 40))) == assumed(
        bare
    )  # a size says nothing of the rest


def test_the_user_states() -> None:
    model = silent()
    state(model, Preprocessing(mean=(0.5,), crop_pct=1.0))

    assert assumed(model) == ("std", "interpolation")
    assert list(data_config(model)["mean"]) == [0.5] * 3

    state(model, Preprocessing(std=(0.1, 0.2, 0.3), interpolation="bilinear"))
    assert not assumed(model)
    assert list(data_config(model)["std"]) == [0.1, 0.2, 0.3]

    trained = zoo.open_source("resnet18", weights="random")
    before = data_config(trained)
    assert data_config(state(trained, Preprocessing(crop_pct=1.0))) == before | {"crop_pct": 1.0}


@pytest.mark.parametrize(
    "values",
    [
        Preprocessing(mean=(0.5, 0.5)),
        Preprocessing(std=(0.0,)),
        Preprocessing(crop_pct=1.5),
        Preprocessing(interpolation="cubic"),
    ],
)
def test_impossible(values: Preprocessing) -> None:
    with pytest.raises(OptionError):
        state(silent(), values)


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    draw = np.random.default_rng(0)
    for i in range(8):
        file = tmp_path / "photos" / "ab"[i % 2] / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 255, (20, 20, 3), dtype=np.uint8)).save(file)
    monkeypatch.chdir(tmp_path)
    return "test_network_input:silent"


SIZE = ("--input-size", "3,16,16")
STATED = (
    "--image-mean",
    "0.5",
    "--image-std",
    "0.25,0.25,0.25",
    "--crop-pct",
    "1",
    "--interpolation",
    "bilinear",
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "command",
    [
        ("evaluate", "--data", "photos", "--workers", "0"),
        ("export", "-o", "net.onnx", "--data", "photos"),
    ],
    ids=lambda command: command[0],
)
def test_commands_say_what_they_assume(
    command: tuple[str, ...], name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([command[0], name, *command[1:], *SIZE]) == 0

    said = capfd.readouterr().err

    assert "note: assumed, as the network does not say: mean 0.485,0.456,0.406" in said
    assert "--image-mean, --image-std, --crop-pct and --interpolation" in said
    assert (
        main(
            [
                command[0],
                name,
                *command[1:],
                *SIZE,
                *STATED,
                *(["--force"] if "-o" in command else []),
            ]
        )
        == 0
    )
    assert "assumed" not in capfd.readouterr().err


@pytest.mark.slow
def test_what_is_stated_stays_with_the_network(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", name, "--to", "folded", "-o", "out", *SIZE, *STATED]) == 0
    assert main(["export", "out", "--trust-factory", "-o", "out.onnx"]) == 0

    said = json.loads(Path("out.onnx.preprocess.json").read_text(encoding="utf-8"))

    assert said["normalize"] == {"mean": [0.5] * 3, "std": [0.25] * 3}
    assert said["resize"]["interpolation"] == "bilinear"
    assert said["assumed"] == []
    assert main(["export", name, *SIZE, "-o", "bare.onnx"]) == 0
    assert json.loads(Path("bare.onnx.preprocess.json").read_text(encoding="utf-8"))[
        "assumed"
    ] == list(assumed(silent()))
    assert "assumed, as the network does not say" in capfd.readouterr().out
    assert (
        main(
            [
                "verify",
                "out",
                "--trust-factory",
                "--data",
                "photos",
                "--workers",
                "0",
                "--image-mean",
                "0.1,0.2",
            ]
        )
        == 2
    )
    assert "mean has 2 numbers" in capfd.readouterr().err


class ByName(nn.Module):
    """Its first norm is called by the name of its argument, which a hook does not see; its second
    is not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm2d(3)
        self.second = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(input=x))


def test_the_first_norm_is_the_first_whose_input_is_seen() -> None:
    model = ByName().eval()
    seen = normalization.input_of_first_norm(model, torch.randn(2, 3, 4, 4))
    assert seen is not None
    assert seen[0] is model.second
