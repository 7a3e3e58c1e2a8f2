"""What the schemes' options and data may not be, said in one line each, with nothing left behind."""

from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from commands import DEMO, MODEL
from PIL import Image

from normswap.cli.app import main

Capture = pytest.CaptureFixture[str]


def pictures(count: int, size: tuple[int, int] = (32, 32), name: str = "a.png") -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / "x").mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", size, (9 * i, 7, 5)).save(folder / "x" / f"{i}-{name}")

    return make


def test_instancenorm_on_one_pixel(here: Path, capfd: Capture) -> None:
    """A 32-pixel input leaves the last stage of a ResNet one pixel: said, with what to do."""
    import normswap
    from normswap.errors import RefusedError

    torch.manual_seed(0)
    model = timm.create_model("resnet18", channels=(8, 8, 8, 8), num_classes=5).eval()
    with pytest.raises(RefusedError, match=r"does not run on \(3, 32, 32\).*arger inputs.*one element"):
        normswap.convert(model, "instancenorm", input_size=(3, 32, 32))
    normswap.convert(model, "instancenorm", input_size=(3, 32, 32), skip="layer4")


def test_plain_pictures_without_classes_do(here: Path, capfd: Capture) -> None:
    """Labels are not needed, nor as many classes as the network has."""
    pictures(32)(here / "d")
    assert main([*DEMO, "groupnorm", "--only", "layer4", "--calibrate", "d", "--samples", "8", "-o", "out"]) == 0
    assert main(["recalibrate", MODEL, "--data", "d", "-o", "new", "--workers", "0"]) == 0
