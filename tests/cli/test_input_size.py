"""`--input-size`, by command from end to end.

The network runs at one size only, and says nowhere which.
"""

import json
from pathlib import Path

import pytest
import timm
import torch
from support.lived_in_networks import distance, run

from normswap import load, provenance
from normswap.cli.app import main
from normswap.errors import OptionError
from normswap.models import network_input, zoo

FACTORY = """
import torch
from torch import nn

def fixed():
    torch.manual_seed(0)
    convolution = [nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*convolution, nn.Flatten(), nn.Linear(8 * 20 * 10, 4)).eval()
"""
SIZE = ["--input-size", "3,40,20"]


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "one_size.py").write_text(FACTORY, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "one_size:fixed"


def test_without_it_the_error_names_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", name, "--to", "folded", "-o", "out"]) == 2
    said = capsys.readouterr().err
    assert "does not run on an input of size 1x3x224x224" in said
    assert "--input-size C,H,W" in said
    assert not Path("out").exists()


@pytest.mark.slow
def test_it_is_said_once(name: str, capsys: pytest.CaptureFixture[str], undrawn: None) -> None:
    """What is written knows the size: nobody has to say it again."""
    assert main(["convert", name, *SIZE, "--to", "folded", "-o", "out"]) == 0

    capsys.readouterr()

    assert main(["inspect", "out", "--trust-factory", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["input_size"] == [3, 40, 20]
    assert main(["verify", "out", "--trust-factory"]) == 0
    assert main(["report", "out", "--trust-factory", "-o", "out.html"]) == 0
    assert main(["export", "out", "--trust-factory", "-o", "out.onnx"]) == 0
    assert json.loads(Path("out.onnx.preprocess.json").read_text(encoding="utf-8"))["input"][
        "size"
    ] == [3, 40, 20]

    source = zoo.open_source(name)
    x = torch.randn(2, 3, 40, 20)

    assert distance(run(source, x), run(load("out", trust_factory=True), x)) < 1e-5


def test_it_goes_into_the_record_and_leaves_the_rest() -> None:
    model = zoo.open_source("resnet18", weights="random")
    before = zoo.data_config(model)

    assert zoo.for_size(model, (3, 96, 64)) is model
    assert network_input.size(model) == (3, 96, 64)
    assert zoo.data_config(model) == before | {"input_size": (3, 96, 64)}

    record = provenance.of(model)

    assert record is not None
    assert record.arch is not None

    bare = zoo.for_size(timm.create_model("resnet18"), (3, 96, 64))

    assert zoo.data_config(bare)["input_size"] == (3, 96, 64)
    assert list(zoo.data_config(bare)["mean"]) == before["mean"]


def test_what_is_built_for_another_size_says_so() -> None:
    model = zoo.open_source("vit_tiny_patch16_224", weights="random")
    with pytest.raises(
        OptionError, match=r"input size 3,96,96: the network is built for 3,224,224\. .*img_size"
    ):
        zoo.for_size(model, (3, 96, 96))


@pytest.mark.parametrize("text", ["3,40,x", "3,0,40", "3,-1,40", ""])
def test_what_is_no_size_is_said_before_anything_is_opened(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "no-such-network", f"--input-size={text}"]) == 2
    assert f"--input-size {text}: it is C,H,W" in capsys.readouterr().err


def test_advice_repeats_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", name, *SIZE]) == 0
    assert f"normswap convert {name} {' '.join(SIZE)}" in capsys.readouterr().out
