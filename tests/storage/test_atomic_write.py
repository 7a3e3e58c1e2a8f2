"""What is on the disk is whole, whatever happens when; and what files say is done as timm does it."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from small import small
from timm.data import create_transform
from torch import nn

from normswap import convert
from normswap.errors import OutputError
from normswap.exporting import sidecar
from normswap.images.datasets import make_loader
from normswap.models import weight_files
from normswap.storage import atomic_write, checkpoint

FILES = {"one": "1", "two": "2"}


def folder(place: Path, version: str) -> Path:
    place.mkdir()
    for name, text in FILES.items():
        (place / name).write_text(f"{version} {text}")
    return place


def holds(place: Path, version: str) -> bool:
    return {p.name: p.read_text() for p in place.iterdir()} == {n: f"{version} {t}" for n, t in FILES.items()}


class Killed(BaseException):
    """As by a signal: nothing that cleans up after errors sees it."""


@pytest.mark.parametrize("at", [0, 1])
def test_a_process_killed_in_the_swap_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Before each of the renames, the old directory and the new one are there, whole."""
    place, aside = folder(tmp_path / "out", "old"), folder(tmp_path / ".new", "new")
    rename, calls = os.replace, []

    def killed(*paths: Any) -> None:
        if len(calls) == at:
            raise Killed
        calls.append(paths)
        rename(*paths)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(Killed):
        atomic_write.swap(aside, place)
    for version in ("old", "new"):
        assert sum(holds(one, version) for one in tmp_path.iterdir()) == 1


def test_where_the_new_directory_cannot_come_the_old_one_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, rename = tmp_path / "out", os.replace
    checkpoint.save(small(), place)
    before = {path.name: path.read_bytes() for path in place.iterdir()}

    def fails(source: Any, target: Any) -> None:
        if Path(target) == place and ".old-" not in str(source):
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OutputError, match="No space left"):
        checkpoint.save(convert(small(), "folded").model, place, force=True)
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_swap_leaves_the_new_directory_alone(tmp_path: Path) -> None:
    place = folder(tmp_path / "out", "old")
    atomic_write.swap(folder(tmp_path / ".new", "new"), place)
    assert holds(place, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_comes_after_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process killed between the two leaves no graph without its weights; and a full disk neither of them."""
    file, rename = tmp_path / "net.xml", Path.replace

    def write(aside: Path) -> None:
        assert aside.name == file.name, "a graph may name its weights' file"
        for one in (aside, aside.with_suffix(".bin")):
            one.touch(mode=0o600)

    def killed(source: Path, target: Path) -> None:
        if target == file:
            raise Killed
        rename(source, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(Killed):
        atomic_write.whole(file, write, (".bin",))
    assert [path.name for path in tmp_path.iterdir()] == ["net.bin"]
    monkeypatch.setattr(Path, "replace", rename)
    assert atomic_write.whole(file, write, (".bin",)) == file
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == dict.fromkeys(
        ("net.bin", "net.xml"), 0o666 & ~atomic_write.umask()
    )
    with pytest.raises(OutputError, match=r"cannot write .*net\.xml: No such file"):
        atomic_write.whole(file, write, (".other",))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.bin", "net.xml"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_force_replaces_no_folder_with_one_of_the_two_files(tmp_path: Path, name: str) -> None:
    """Somebody's folder may have a config.json, or a model.safetensors, and whatever else."""
    place = tmp_path / "mine"
    place.mkdir()
    (place / name).write_text("mine")
    (place / "thesis.tex").write_text("years")
    with pytest.raises(OutputError, match="not a model directory"):
        checkpoint.save(small(), place, force=True)
    assert sorted(path.name for path in place.iterdir()) == sorted([name, "thesis.tex"])
    assert (place / name).read_text() == "mine"


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_label_offset_drops_the_first_classes(offset: int) -> None:
    """Weights from TensorFlow have a background class 0; timm's `load_pretrained` drops `label_offset` rows."""
    source: Any = timm.create_model("resnet18", num_classes=5 + offset, channels=(4, 4, 4, 4))
    model: Any = timm.create_model("resnet18", num_classes=5, channels=(4, 4, 4, 4))
    cfg = {"classifier": "fc", "num_classes": 5, "label_offset": offset, "input_size": (3, 224, 224)}
    weight_files.load_into(model, source.state_dict(), "file", cfg)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(model.eval()(x), source.eval()(x)[:, offset:], atol=1e-6)


SIZE, PLAIN = 16, {"mean": [0.0] * 3, "std": [1.0] * 3, "interpolation": "bilinear", "crop_mode": "center"}


@pytest.mark.parametrize("share", [0.5, 0.875, 0.95, 1.0])
def test_crop_pct_is_timms(tmp_path: Path, share: float) -> None:
    """Resized to floor(16 / crop_pct), by Pillow; of that the centre."""
    (tmp_path / "a").mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a" / "0.png")
    config: dict[str, Any] = {**PLAIN, "input_size": [3, SIZE, SIZE], "crop_pct": share, "num_classes": 1}
    ((found, _),) = make_loader(config, str(tmp_path), batch_size=1, workers=0)
    side = math.floor(SIZE / share)
    resized = np.asarray(Image.fromarray(pixels).resize((side, side), Image.Resampling.BILINEAR))
    first = round((side - SIZE) / 2)
    crop = torch.from_numpy(resized[first : first + SIZE, first : first + SIZE].copy()).permute(2, 0, 1) / 255
    assert torch.allclose(found[0], crop, atol=1e-6)


@pytest.mark.parametrize("share", [0.5, 0.875, 0.9, 0.95, 0.965, 1.0])
def test_sidecars_say_the_size_that_timm_resizes_to(share: float) -> None:
    model: Any = nn.Conv2d(3, 1, 1)
    model.pretrained_cfg = {**PLAIN, "input_size": (3, 224, 224), "crop_pct": share}
    said = sidecar.body(model, (3, 224, 224), "logits", normalize=True, dynamic=False)["resize"]
    first = create_transform((3, 224, 224), crop_pct=share).transforms[0]
    assert said["to"] == [first.size, first.size]
    assert said["crop_pct"] == share
