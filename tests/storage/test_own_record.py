"""A network's record is its own: nothing of timm's default weights stands beside it.

timm notes the record of its default weights on each network that it builds: test size, repository,
license, papers.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
from safetensors.torch import save_file
from timm.data import resolve_model_data_config
from torch import nn

import normswap
from normswap.exporting import sidecar
from normswap.images.datasets import image_record
from normswap.models import zoo
from normswap.storage import checkpoint
from normswap.storage.header import read_header

FOREIGN = ("hf_hub_id", "license", "paper_ids", "tag", "url", "origin_url")
# Small networks whose default weights, resnet18.a1_in1k, are tested at 288 pixels.
SMALL: dict[str, Any] = {"channels": (8, 8, 8, 8), "num_classes": 10}


def size_of(model: nn.Module, *, tested: bool = True) -> list[int]:
    """The input size by which timm's validate.py, or its train.py, prepares images."""
    return list(resolve_model_data_config(model, use_test_size=tested)["input_size"])


def foreign_keys(model: nn.Module) -> list[str]:
    record: Any = model.pretrained_cfg
    return [key for key in FOREIGN if record.get(key)]


def converted_and_loaded(model: nn.Module, folder: Path, size: tuple[int, ...]) -> nn.Module:
    conversion = normswap.convert(model, to="skipinit", input_size=size)
    return normswap.load(checkpoint.save(conversion, folder))


@pytest.fixture
def of_64_pixels(tmp_path: Path) -> Path:
    """A directory in timm's layout of a network that somebody trained at 64 pixels."""
    folder = tmp_path / "small"
    folder.mkdir()
    save_file(timm.create_model("resnet18", **SMALL).state_dict(), folder / "model.safetensors")
    stated = {"input_size": [3, 64, 64], "mean": [0.5] * 3, "std": [0.25] * 3, "crop_pct": 1.0}
    config = {
        "architecture": "resnet18",
        "num_classes": 10,
        "model_args": {"channels": SMALL["channels"]},
        "pretrained_cfg": {**stated, "num_classes": 10},
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_a_directory_of_timms_is_tested_as_timm_says(of_64_pixels: Path, tmp_path: Path) -> None:
    opened = normswap.open(str(of_64_pixels))
    loaded = converted_and_loaded(opened, tmp_path / "out", (3, 64, 64))

    for model in (opened, loaded):
        assert size_of(model) == size_of(model, tested=False) == [3, 64, 64]
        assert foreign_keys(model) == []
        # These are facts of the architecture.
        record: Any = model.pretrained_cfg
        assert record["architecture"] == "resnet18"
        assert record["first_conv"] == "conv1"
        assert record["classifier"] == "fc"


@pytest.mark.slow
def test_a_test_size_that_is_stated_is_kept(of_64_pixels: Path, tmp_path: Path) -> None:
    config = json.loads((of_64_pixels / "config.json").read_text(encoding="utf-8"))
    config["pretrained_cfg"] |= {"test_input_size": [3, 96, 96], "test_crop_pct": 0.5}
    (of_64_pixels / "config.json").write_text(json.dumps(config), encoding="utf-8")

    opened = normswap.open(str(of_64_pixels))
    loaded = converted_and_loaded(opened, tmp_path / "out", (3, 64, 64))

    for model in (opened, loaded):
        assert size_of(model) == [3, 96, 96]
        assert resolve_model_data_config(model, use_test_size=True)["crop_pct"] == 0.5
    assert size_of(timm.create_model(f"local-dir:{of_64_pixels}")) == [3, 96, 96]

    # Another size than the record's has no test size of its own.
    resized = normswap.open(str(of_64_pixels), input_size=(3, 48, 48))
    assert size_of(converted_and_loaded(resized, tmp_path / "48", (3, 48, 48))) == [3, 48, 48]
    grey = normswap.open(str(of_64_pixels), in_chans=1)
    assert size_of(converted_and_loaded(grey, tmp_path / "grey", (1, 64, 64))) == [1, 96, 96]


def test_a_weights_file_is_not_the_default_weights(of_64_pixels: Path, tmp_path: Path) -> None:
    file = str(of_64_pixels / "model.safetensors")
    arguments = {"channels": SMALL["channels"]}
    opened = normswap.open(file, arch="resnet18", num_classes=10, arch_args=arguments)
    loaded = converted_and_loaded(opened, tmp_path / "out", (3, 64, 64))

    for model in (opened, loaded):
        assert foreign_keys(model) == []
        assert size_of(model) == size_of(model, tested=False)


def test_a_network_built_by_timm_keeps_what_it_states(tmp_path: Path) -> None:
    """The default weights are tested at 288 pixels, these at 224."""
    source = timm.create_model("resnet18.tv_in1k", **SMALL).eval()
    loaded = converted_and_loaded(source, tmp_path / "out", (3, 64, 64))

    assert size_of(loaded) == size_of(source) == [3, 224, 224]
    assert size_of(timm.create_model("resnet18", **SMALL)) == [3, 288, 288]
    assert foreign_keys(loaded) == []
    assert loaded.pretrained_cfg["num_classes"] == 10


@pytest.mark.parametrize("classes", [10, 3])
@pytest.mark.parametrize("is_saved", [False, True])
def test_names_of_classes_are_those_of_as_many_outputs(
    is_saved: bool, classes: int, tmp_path: Path
) -> None:
    """A network that somebody built with timm has them in an exported file, too; and with a new
    head it has none, where timm's record still has those of the weights.
    """
    names = [f"class{number}" for number in range(10)]
    model = timm.create_model("resnet18", **SMALL).eval()
    model.pretrained_cfg = {**model.pretrained_cfg, "num_classes": 10, "label_names": names}
    model.reset_classifier(classes)
    if is_saved:
        model = normswap.load(checkpoint.save(model, tmp_path / "net"))

    body = sidecar.body(model, (3, 64, 64), "logits", normalize=False, dynamic=False)

    expected = names if classes == 10 else None
    assert image_record(model)["num_classes"] == classes
    assert image_record(model)["label_names"] == expected
    assert body["output"]["labels"] == expected


@pytest.mark.parametrize(
    "unreadable", [{"interpolation": "by hand"}, {"mean": np.zeros(3)}, {"crop_pct": math.nan}]
)
def test_a_record_that_json_cannot_hold_is_no_obstacle(
    unreadable: dict[str, object], tmp_path: Path
) -> None:
    model = timm.create_model("resnet18", **SMALL).eval()
    model.pretrained_cfg = {**model.pretrained_cfg, **unreadable, "label_names": ["a"] * 10}

    loaded = normswap.load(checkpoint.save(model, tmp_path / "net"))

    assert normswap.verify(model, loaded).verdict == "PROVED"


def test_a_record_that_cannot_be_read_back_is_left_out(tmp_path: Path) -> None:
    source = timm.create_model("resnet18", **SMALL).eval()
    source.pretrained_cfg = {**source.pretrained_cfg, "interpolation": "by hand"}
    loaded = converted_and_loaded(source, tmp_path / "out", (3, 64, 64))

    assert read_header(tmp_path / "out").images == {}
    assert size_of(loaded, tested=False) == [3, 224, 224]


def test_named_weights_keep_their_record() -> None:
    opened = zoo.open_source("resnet18.a1_in1k", weights="random")

    assert opened.pretrained_cfg["tag"] == "a1_in1k"
    assert size_of(opened) == [3, 288, 288]
