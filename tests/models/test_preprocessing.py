"""What a network's record states of its images, what is assumed, and what the user says instead."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from normswap.cli.app import main
from normswap.diagnosis import normalization
from normswap.errors import OptionError
from normswap.models import zoo
from normswap.models.preprocessing import assumed, assumption, data_config, state
from normswap.models.stated_images import Preprocessing


def silent() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)]
    return nn.Sequential(*layers).eval()


def test_stated_and_assumed() -> None:
    model = zoo.open_source("resnet18", weights="random")
    assert not assumed(model)
    assert not assumption(model)
    bare = silent()
    assert assumed(bare) == ("mean", "std", "crop_pct", "interpolation")
    assert "mean 0.485,0.456,0.406" in assumption(bare)
    assert "crop-pct 0.875, interpolation bicubic" in assumption(bare)
    assert assumed(zoo.for_size(bare, (3, 40, 40))) == assumed(bare)  # a size says nothing of the rest


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
    return "test_preprocessing:silent"


SIZE = ("--input-size", "3,16,16")
STATED = ("--image-mean", "0.5", "--image-std", "0.25,0.25,0.25", "--crop-pct", "1", "--interpolation", "bilinear")


@pytest.mark.parametrize(
    "command",
    [("evaluate", "--data", "photos", "--workers", "0"), ("export", "-o", "net.onnx", "--data", "photos")],
    ids=lambda command: command[0],
)
def test_commands_say_what_they_assume(command: tuple[str, ...], name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([command[0], name, *command[1:], *SIZE]) == 0
    said = capfd.readouterr().err
    assert "note: assumed, as the network does not say: mean 0.485,0.456,0.406" in said
    assert "--image-mean, --image-std, --crop-pct and --interpolation" in said
    assert main([command[0], name, *command[1:], *SIZE, *STATED, *(["--force"] if "-o" in command else [])]) == 0
    assert "assumed" not in capfd.readouterr().err


def test_what_is_stated_stays_with_the_network(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", name, "--to", "folded", "-o", "out", *SIZE, *STATED]) == 0
    assert main(["export", "out", "--trust-factory", "-o", "out.onnx"]) == 0
    said = json.loads(Path("out.onnx.preprocess.json").read_text())
    assert said["normalize"] == {"mean": [0.5] * 3, "std": [0.25] * 3}
    assert said["resize"]["interpolation"] == "bilinear"
    assert said["assumed"] == []
    assert main(["export", name, *SIZE, "-o", "bare.onnx"]) == 0
    assert json.loads(Path("bare.onnx.preprocess.json").read_text())["assumed"] == list(assumed(silent()))
    assert "assumed, as the network does not say" in capfd.readouterr().out
    assert (
        main(["verify", "out", "--trust-factory", "--data", "photos", "--workers", "0", "--image-mean", "0.1,0.2"]) == 2
    )
    assert "mean has 2 numbers" in capfd.readouterr().err


class ByName(nn.Module):
    """Its first norm is called by the name of its argument, which a hook does not see; its second is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(input=x))


def test_the_first_norm_is_the_first_whose_input_is_seen() -> None:
    model = ByName().eval()
    seen = normalization.at_first_norm(model, torch.randn(2, 3, 4, 4))
    assert seen is not None
    assert seen[0] is model.second
