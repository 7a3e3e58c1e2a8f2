"""The images of a run: which are validated on, by whom and prepared how, and what tells one set from another."""

from pathlib import Path
from typing import Any

import pytest
import torch
from trained import network, recipe, write_images

from normswap.errors import SourceError
from normswap.models.preprocessing import data_config
from normswap.training.training_images import Share, TrainingImages, require_validation, validation


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("data") / "images", 2)


def record(**stated: Any) -> dict[str, Any]:
    return {**data_config(network()), "num_classes": 10, **stated}


def test_processes_share_the_validation_images(images: Path) -> None:
    data = recipe(images).data
    whole = torch.cat([batch for batch, _ in validation(record(), data, Share(), 0, batch=8) or ()])
    parts = [[*(validation(record(), data, Share(rank, 3), 0, batch=8) or ())] for rank in range(3)]
    assert [sum(len(batch) for batch, _ in part) for part in parts] == [7, 7, 6]
    seen = torch.cat([batch for part in parts for batch, _ in part])
    assert {tuple(image.flatten().tolist()) for image in seen} == {tuple(image.flatten().tolist()) for image in whole}


def test_validation_has_a_number_of_images_of_its_own(images: Path) -> None:
    data = recipe(images, data={"samples": 16, "validation_samples": 6}).data
    loader = validation(record(), data, Share(), 0, batch=8)
    assert loader is not None
    assert sum(len(batch) for batch, _ in loader) == 6
    assert len(TrainingImages(record(), data, 0, labelled=True).images) == 16


def test_as_many_images_of_other_names_are_other_images(images: Path, tmp_path: Path) -> None:
    """A run that goes on would else have other images in the order of these."""
    renamed = write_images(tmp_path / "renamed", 2)
    for file in [*renamed.rglob("*.png")]:
        file.rename(file.with_name(f"other{file.name}"))
    same = write_images(tmp_path / "same", 2)
    first, other, again = (
        TrainingImages(record(), recipe(place).data, 0, labelled=True).digest for place in (images, renamed, same)
    )
    assert first == again != other


def test_what_is_decided_by_top1_takes_validation_images_that_are_named_or_lie_beside(tmp_path: Path) -> None:
    write_images(tmp_path / "train")
    lying: dict[str, Any] = {"root": str(tmp_path), "validation": None}
    with pytest.raises(SourceError, match=r"no validation images.*Give data\.validation=PATH"):
        require_validation(recipe(tmp_path, data=lying).data)
    require_validation(recipe(tmp_path, data={**lying, "validation": str(tmp_path / "train")}).data)
    write_images(tmp_path / "val")
    require_validation(recipe(tmp_path, data=lying).data)
