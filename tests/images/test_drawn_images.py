"""Law of draws: images that a command draws are drawn from all that it may draw from.

Images that are fitted to are never measured on, and the first images of a folder are no draw: they
are of its first classes. Each image here tells its own row by its brightness.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.small_trainings import network, recipe
from torch import Tensor

from normswap.cli.commands import export_command
from normswap.images import datasets
from normswap.images.datasets import Loader, make_loader
from normswap.training.training_images import TrainingImages, held_out

CLASSES = 6
PER_CLASS = 10
ROWS = CLASSES * PER_CLASS
RECORD: dict[str, Any] = {
    "input_size": (3, 8, 8),
    "mean": (0.0, 0.0, 0.0),
    "std": (1.0, 1.0, 1.0),
    "interpolation": "bilinear",
    "crop_pct": 1.0,
    "crop_mode": "center",
    "num_classes": CLASSES,
}
# What may be drawn from, and the parts that are drawn, as rows of the folder.
Draw = tuple[set[int], list[int], list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("drawn")
    for row in range(ROWS):
        label = place / f"class{row // PER_CLASS}"
        label.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (4 * row,) * 3).save(label / f"{row:02}.png")
    return place


def row_of(image: Tensor) -> int:
    return round(float(image.mean()) * 255 / 4)


def rows_of(loader: Loader) -> list[int]:
    return [row_of(image) for images, _ in loader for image in images]


def samples(folder: Path, seed: int) -> Draw:
    """`--samples`: a part of all images. The others are those of no draw."""
    drawn = rows_of(make_loader(RECORD, str(folder), workers=0, samples=20, seed=seed))
    return {*range(ROWS)}, drawn, sorted({*range(ROWS)}.difference(drawn))


def calibrated_and_measured(folder: Path, seed: int) -> Draw:
    """The images that int8 is fitted to, and the images that its cost is measured on."""
    loader = make_loader(RECORD, str(folder), workers=0)
    fitted, measured = datasets.split_for_calibration(loader, 18, most=18)
    return {*range(ROWS)}, rows_of(fitted), rows_of(measured)


def by_one_name(folder: Path, seed: int) -> Draw:
    """The same where `--data` names the images of `--calibrate` once more."""
    model: Any = network()
    model.reset_classifier(CLASSES)
    model.__dict__.update(pretrained_cfg=RECORD, default_cfg=RECORD)
    int8 = export_command.Int8(str(folder), calibrate_samples=18)
    checked = export_command.Checked(data=str(folder), samples=18)
    fitted, measured = int8.parts(checked, model)
    return {*range(ROWS)}, rows_of(fitted), rows_of(measured)


def calibrated(folder: Path, seed: int) -> Draw:
    """The images that int8 is fitted to where its cost is measured on another folder's."""
    loader = make_loader(RECORD, str(folder), workers=0)
    drawn = rows_of(datasets.calibration_images(loader, 20))
    return {*range(ROWS)}, drawn, sorted({*range(ROWS)}.difference(drawn))


def held_out_of_training(folder: Path, seed: int) -> Draw:
    """The images that networks are compared on, and those that are left to train on."""
    plan = recipe(folder, data={"validation": None, "samples": 50}, train={"seed": seed})
    images = TrainingImages(RECORD, plan.data, seed, labelled=True)
    may_draw = {*read_rows(images)}

    compared = rows_of(held_out(RECORD, plan.data, images))

    return may_draw, compared, read_rows(images)


def read_rows(images: TrainingImages) -> list[int]:
    """The rows of the training images, as they are read."""
    return [row_of(images.images[(0, index, 0)][0]) for index in range(len(images.images))]


# Each draw with the number of images in its two parts.
DRAWS: dict[str, tuple[Callable[[Path, int], Draw], tuple[int, int]]] = {
    "samples": (samples, (20, ROWS - 20)),
    "calibrated and measured": (calibrated_and_measured, (18, 18)),
    "calibrated and measured, by one name": (by_one_name, (18, 18)),
    "calibrated": (calibrated, (20, ROWS - 20)),
    "held out of training": (held_out_of_training, (5, 45)),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", DRAWS)
def test_what_is_drawn_is_a_draw(name: str, seed: int, folder: Path) -> None:
    draw, counts = DRAWS[name]

    may_draw, drawn, others = draw(folder, seed)

    assert (len(drawn), len(others)) == counts
    assert len({*drawn, *others}) == sum(counts), "an image stands in both parts, or twice"
    assert {*drawn, *others} <= may_draw
    for part in (drawn, others):
        # The first images of a folder, or of what may be drawn from it, would be of few classes.
        classes = {row // PER_CLASS for row in part}
        assert len(classes) >= min(CLASSES, len(part) - 1), part
    assert draw(folder, seed) == (may_draw, drawn, others)


@pytest.mark.parametrize("name", ["samples", "held out of training"])
def test_another_seed_is_another_draw(name: str, folder: Path) -> None:
    draw, _ = DRAWS[name]

    assert draw(folder, 0)[1] != draw(folder, 1)[1]
