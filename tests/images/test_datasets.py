"""Labelled images: every container gives the same batches, every bad one a clear line."""

import multiprocessing
import os
import pickle
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from normswap.errors import NormswapError, OptionError, SourceError
from normswap.images import datasets, places
from normswap.images.datasets import make_loader
from normswap.models import zoo

CLASSES = ["ant", "bee", "cow"]
CONFIG: dict[str, Any] = {
    "input_size": [3, 16, 16],
    "mean": [0.5] * 3,
    "std": [0.25] * 3,
    "interpolation": "bilinear",
}
CONFIG |= {"crop_pct": 1.0, "crop_mode": "center", "num_classes": 3}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Three class folders of four images, 20 x 20."""
    generator = np.random.default_rng(0)
    for label in CLASSES:
        folder = tmp_path / "images" / label
        folder.mkdir(parents=True)
        for number in range(4):
            pixels = generator.integers(0, 255, (20, 20, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "images"


def pack(folder: Path, name: str) -> Path:
    file = folder.parent / name
    with tarfile.open(file, "w") as tar:
        tar.add(folder, "images")
    return file


def loaded(model: Any, source: Path | str, **options: Any) -> tuple[Tensor, list[int]]:
    """All images and labels of a source."""
    batches = list(make_loader(model, str(source), **{"batch_size": 5, "workers": 0, **options}))
    images = torch.cat([images for images, _ in batches])
    labels = torch.cat([labels for _, labels in batches])
    return images, labels.tolist()


def test_no_pickle_beside_a_large_tar_is_read_or_written(images: Path) -> None:
    """timm keeps the contents of a tar of more than 10 GB in a pickle."""
    file = pack(images, "large.tar")
    os.truncate(file, 11 * 1024**3)  # The zeros behind the tar's end take no space.
    assert len(loaded(CONFIG, file)[1]) == 12
    assert not [*file.parent.glob("*.pickle")]

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (file.parent / "evil was run",)

    (file.parent / "_large_tarinfos.pickle").write_bytes(pickle.dumps(Evil()))
    assert len(loaded(CONFIG, file)[1]) == 12
    assert not (file.parent / "evil was run").exists()


def test_a_tar_equals_the_folder(images: Path) -> None:
    pixels, labels = loaded(CONFIG, images)
    assert labels == [0] * 4 + [1] * 4 + [2] * 4
    assert pixels.shape == (12, 3, 16, 16)
    assert pixels.abs().max() <= 2

    packed, packed_labels = loaded(CONFIG, pack(images, "a.tar"))
    assert torch.equal(packed, pixels)
    assert packed_labels == labels


def test_an_image_that_cannot_be_read_is_named_among_some(images: Path) -> None:
    (images / "bee" / "2.png").write_bytes(b"")
    loader = make_loader(CONFIG, str(images), workers=0)

    good_images, _ = next(iter(loader.only([0, 11])))
    assert len(good_images) == 2
    with pytest.raises(SourceError, match=r"bee/2\.png"):
        next(iter(loader.only([0, 6])))

    (images / "bee" / "3.png").write_bytes(b"GIF")
    with pytest.raises(SourceError, match=r"bee/2\.png.*bee/3\.png"):
        list(make_loader(CONFIG, str(images), workers=0, batch_size=1))


def test_workers(images: Path) -> None:
    loader = make_loader(CONFIG, str(pack(images, "w.tar")), batch_size=5, workers=2)
    assert (len(loader), loader.count) == (3, 12)

    batches = list(loader)

    pixels, _ = loaded(CONFIG, images)
    assert torch.equal(torch.cat([images for images, _ in batches]), pixels)
    assert [len(labels) for _, labels in batches] == [5, 5, 2]


def test_a_temporary_folder_whose_path_is_too_long_for_sockets_is_refused(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch would drop each batch that a process has read, and wait for it for ever."""
    long_folder = tmp_path / ("x" * 100)
    long_folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long_folder))
    # multiprocessing remembers its own folder within that of tempfile.
    monkeypatch.delitem(multiprocessing.current_process()._config, "tempdir", raising=False)

    with pytest.raises(OptionError, match=f"no socket in {long_folder}.*TMPDIR"):
        make_loader(CONFIG, str(images), workers=1)

    assert len(make_loader(CONFIG, str(images), workers=0)) == 1


def test_a_package_that_is_missing_is_one_line_of_ours(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.delitem(sys.modules, "timm.data.readers.reader_hfds", raising=False)
    with pytest.raises(SourceError, match=r"hfds/a/b.*not installed.*datasets"):
        make_loader(CONFIG, "hfds/a/b", workers=0)
    assert capfd.readouterr() == ("", "")


def test_split_folder(images: Path) -> None:
    (images.parent / "root").mkdir()
    images.rename(images.parent / "root" / "val")
    assert len(loaded(CONFIG, images.parent / "root")[1]) == 12


def test_samples(images: Path) -> None:
    drawn = [loaded(CONFIG, images, samples=6, seed=seed)[1] for seed in range(9)]

    for labels in drawn:
        assert len(labels) == 6
        assert labels == sorted(labels)
    assert len({tuple(labels) for labels in drawn}) > 1
    assert drawn[3] == loaded(CONFIG, images, samples=6, seed=3)[1]
    assert len(loaded(CONFIG, images, samples=99)[1]) == 12
    assert make_loader(CONFIG, str(images), samples=6).count == 6


@pytest.mark.parametrize(
    ("names", "classes", "labels"),
    [
        (["cow", "ant", "bee"], 3, [1, 2, 0]),
        (["bee", "dog", "cow", "ant", "elk"], 5, [3, 0, 2]),
        ({"0": "cow", "1": "bee", "2": "ant"}, 3, [2, 1, 0]),
    ],
    ids=["by name, in the network's order", "a part of the network's classes", "names by number"],
)
def test_labels_follow_the_network(
    images: Path, names: Any, classes: int, labels: list[int]
) -> None:
    config = {**CONFIG, "label_names": names, "num_classes": classes}

    _, found = loaded(config, images)

    four_of_each = np.repeat(labels, 4).tolist()
    assert found == four_of_each


def test_model_instead_of_config(images: Path) -> None:
    args = {"channels": [8, 8, 8, 8]}
    model = zoo.open_source("resnet18", weights="random", arch_args=args, num_classes=3, in_chans=1)

    pixels, _ = loaded(model, images)

    assert pixels.shape == (12, 1, 224, 224)
    with torch.inference_mode():
        assert model(pixels[:2]).shape == (2, 3)


def test_gray_images_for_an_rgb_network(images: Path) -> None:
    for file in images.rglob("*.png"):
        Image.open(file).convert("L").save(file)
    assert loaded(CONFIG, images)[0].shape == (12, 3, 16, 16)


@pytest.mark.parametrize("mode", ["F", "I", "I;16"])
def test_pixels_of_more_bits_are_refused_not_cut_off(mode: str) -> None:
    with pytest.raises(ValueError, match="more than 8 bits"):
        datasets._converted(Image.new(mode, (2, 2)), "RGB")


def _without_images(folder: Path) -> Path:
    for file in folder.rglob("*.png"):
        file.unlink()
    return folder


def _spoilt(folder: Path, keep: int) -> Path:
    file = folder / "bee" / "2.png"
    file.write_bytes(file.read_bytes()[:keep])
    return folder


def _flat(folder: Path) -> Path:
    for file in folder.rglob("*.png"):
        file.rename(folder / f"{file.parent.name}{file.name}")
    return folder


def _garbage(file: Path) -> Path:
    file.write_bytes(b"\x07" * 2000)
    return file


BAD: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "missing": (lambda folder: folder / "none", ["none does not exist", "hfds"]),
    "misspelt family": (lambda _: "hdfs/cifar10", ["hdfs/cifar10 does not exist", "hfds"]),
    "no images": (_without_images, ["not a dataset of images", "class folders"]),
    "empty tar": (
        lambda folder: pack(_without_images(folder), "e.tar"),
        ["e.tar is not a dataset of images"],
    ),
    "garbage tar": (
        lambda folder: _garbage(folder.parent / "g.tar"),
        ["g.tar is not a dataset of images"],
    ),
    "packed tar": (
        lambda folder: _garbage(folder.parent / "g.tar.xz"),
        ["g.tar.xz is not a dataset of images"],
    ),
    "a file": (lambda folder: folder / "ant" / "1.png", ["not a dataset of images"]),
    "empty image": (lambda folder: _spoilt(folder, 0), ["bee/2.png cannot be read"]),
    "cut image": (lambda folder: _spoilt(folder, 400), ["bee/2.png cannot be read"]),
    "cut image in tar": (
        lambda folder: pack(_spoilt(folder, 400), "i.tar"),
        ["bee/2.png cannot be read"],
    ),
    "one class": (lambda folder: folder / "ant", ["has no class folders"]),
    "no class folders": (_flat, ["has no class folders"]),
    "no torch data": (lambda folder: f"torch/cifar10:{folder}", ["is not a dataset of images"]),
    "no such torch data": (
        lambda folder: f"torch/cifar11:{folder}",
        ["is not a dataset of images", "cifar11"],
    ),
}


@pytest.mark.parametrize(
    ("case", "workers"),
    [*((case, 0) for case in BAD), *((case, 1) for case in BAD if "image" in case)],
)
def test_bad_data(images: Path, case: str, workers: int) -> None:
    spoil, words = BAD[case]
    source = spoil(images)

    with pytest.raises(SourceError) as caught:
        loaded(CONFIG, source, workers=workers)

    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("config", "options", "kind"),
    [
        ({"input_size": [4, 16, 16]}, {}, SourceError),
        ({}, {"batch_size": 0}, OptionError),
        ({}, {"samples": 0}, OptionError),
        ({}, {"workers": -1}, OptionError),
    ],
)
def test_bad_options(
    images: Path, config: dict[str, Any], options: dict[str, Any], kind: type[NormswapError]
) -> None:
    with pytest.raises(kind):
        make_loader({**CONFIG, **config}, str(images), **options)


def test_torch_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return Image.new("L", (20, 20), 60 * index), index % 3

    asked: dict[str, Any] = {}

    def create_dataset(name: str, **options: Any) -> Fake:
        asked.update(name=name, **options)
        return Fake()

    monkeypatch.setattr(datasets, "create_dataset", create_dataset)

    pixels, labels = loaded(CONFIG, f"torch/mnist:{tmp_path}")

    assert asked["name"] == "torch/mnist"
    assert asked["root"] == str(tmp_path)
    assert asked["split"] == "validation"
    assert (pixels.shape, labels) == ((4, 3, 16, 16), [0, 1, 2, 0])


def test_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        transform: Any = None

        def __iter__(self) -> Any:
            for label in range(9):
                yield self.transform(Image.new("RGB", (20, 20))), label

    monkeypatch.setattr(datasets, "create_dataset", lambda *_, **__: Stream())

    assert loaded(CONFIG, "wds/x:/y")[1] == list(range(9))
    assert loaded(CONFIG, "wds/x:/y", samples=7)[1] == list(range(7))


@pytest.mark.parametrize("prefix", [*places.PREFIXES, "TORCH"])
def test_a_dataset_that_timm_opens_is_no_missing_path(prefix: str) -> None:
    places.check(f"{prefix}/no/such/path")

    for other in (f"{prefix}s/no/such/path", f"no/{prefix}"):
        with pytest.raises(SourceError, match=other):
            places.check(other)


@pytest.mark.parametrize("word", ["demo", "noise", "synthetic"])
def test_a_word_in_place_of_images_is_no_missing_path(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    places.check(word)

    with pytest.raises(SourceError, match=f"{word}s"):
        places.check(f"{word}s")
    (tmp_path / f"{word}s").mkdir()
    places.check(f"{word}s")


# What stands in a folder, the part that is asked for, and the part that is read: "" is the folder.
PARTS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "without class folders, beside files": (
        ("train/1.png", "val/1.png", "notes"),
        "train",
        "train",
    ),
    "by another usual name": (("training/1.png", "test/1.png"), "train", "training"),
    "of two usual names, the one that is asked for": (("val/1.png", "test/1.png"), "test", "test"),
    "with class folders, beside others": (("train/ant/1.png", "docs/1.png"), "train", "train"),
    "a class beside other classes": (("train/1.png", "bus/1.png", "car/1.png"), "train", ""),
    "a tar": (("train.tar", "bus/1.png"), "train", "train.tar"),
    "a folder before a tar": (("val/1.png", "val.tar"), "validation", "val"),
    "none": (("ant/1.png",), "val", ""),
    "the user's own": (("mine/ant/1.png", "train/ant/1.png"), "mine", "mine"),
}


@pytest.mark.parametrize("name", PARTS)
def test_the_part_of_a_folder_that_is_read(name: str, tmp_path: Path) -> None:
    files, split, part = PARTS[name]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()

    assert datasets.part_of(tmp_path, split) == tmp_path / part


def test_a_part_of_the_users_own_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train" / "ant").mkdir(parents=True)

    with pytest.raises(SourceError, match="no part mine"):
        datasets.part_of(tmp_path, "mine")
