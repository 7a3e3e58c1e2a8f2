"""Networks of Ultralytics, with a small module in the place of the library, which need not be here.

It has what `ultralytics_models` calls: the folder of descriptions, `YOLO`, and a network with
`yaml` and `fuse`. Ultralytics' own networks are opened in `test_fused_detectors.py`.
"""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.model_sources import same
from torch import nn

from normswap.errors import SourceError
from normswap.models import ultralytics_models
from normswap.models.building import BuildRequest, Built
from normswap.plan import Arch

IMAGES = {
    "input_size": [3, 640, 640],
    "mean": [0.0] * 3,
    "std": [1.0] * 3,
    "license": "agpl-3.0",
    "interpolation": "bilinear",
    "crop_pct": 1.0,
}


class Detector(nn.Module):
    """A network that keeps its description, as those of Ultralytics do."""

    def __init__(self, cfg: dict[str, Any], nc: int | None = None, verbose: bool = True) -> None:
        super().__init__()
        self.yaml = {**cfg, "nc": cfg["nc"] if nc is None else nc}
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.norm: nn.Module = nn.BatchNorm2d(4)
        self.head = nn.Conv2d(4, self.yaml["nc"], 1)

    def fuse(self, verbose: bool = True) -> nn.Module:
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.Identity()
        return self


def yolo(model: str) -> SimpleNamespace:
    """Stand in for `ultralytics.YOLO`, whose network has 80 classes."""
    return SimpleNamespace(model=Detector({"nc": 80, "yaml_file": Path(model).name}))


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module, and the descriptions that it ships."""
    module: Any = ModuleType("ultralytics")
    module.__file__ = str(tmp_path / "ultralytics" / "__init__.py")
    module.__version__ = "8.9"
    module.YOLO = yolo
    monkeypatch.setitem(sys.modules, "ultralytics", module)

    folder = tmp_path / "ultralytics" / "cfg" / "models" / "11"
    folder.mkdir(parents=True)
    for name in ("yolo11.yaml", "yolo11-cls.yaml", "special.yaml"):
        (folder / name).write_text("nc: 80", encoding="utf-8")


def checkpoint(folder: Path, **changes: Any) -> tuple[Path, Detector]:
    """A file that Ultralytics' trainer might have written, and the network in it."""
    torch.manual_seed(0)
    network = Detector({"nc": 3, "yaml_file": "yolo11n.yaml"}).eval()
    network.yaml |= changes
    file = folder / "best.pt"
    torch.save({"epoch": 3, "model": network}, file)
    return file, network


def opened(name: str, **request: Any) -> Built:
    return ultralytics_models.build(f"ultralytics:{name}", BuildRequest(**request))


@pytest.mark.parametrize("fused", [False, True])
def test_a_checkpoint_is_built_from_the_description_that_it_names(
    fused: bool, tmp_path: Path
) -> None:
    file, network = checkpoint(tmp_path)
    if fused:
        torch.save({"model": network.fuse()}, file)

    built = opened(str(file), trained=True)
    model = built.pretrained()

    assert built.arch == Arch("yolo11n.yaml", {"num_classes": 3, "fused": fused}, "ultralytics")
    assert built.source == f"ultralytics:{file}"
    assert built.preprocessing == {**IMAGES, "crop_mode": "border"}
    assert same(model, network.state_dict())
    assert not model.training
    assert same(ultralytics_models.create(built.arch), {}) is False


def test_a_classifier_sees_the_centre_of_an_image(tmp_path: Path) -> None:
    file, _ = checkpoint(tmp_path, yaml_file="/home/me/yolo11n-cls.yaml")

    built = opened(str(file), trained=True)

    assert built.arch.name == "yolo11n-cls.yaml"
    assert built.preprocessing == {**IMAGES, "input_size": [3, 224, 224], "crop_mode": "center"}


def test_the_users_number_of_classes_goes_before_the_files(tmp_path: Path) -> None:
    file, _ = checkpoint(tmp_path)

    built = opened(str(file), trained=True, num_classes=7)

    assert built.arch.kwargs == {"num_classes": 7, "fused": False}
    assert built.model.get_parameter("head.weight").shape[0] == 7
    with pytest.raises(SourceError, match=r"best\.pt"):
        built.pretrained()


@pytest.mark.parametrize(("asked", "classes"), [({}, 80), ({"num_classes": 5}, 5)])
@pytest.mark.parametrize("name", ["yolo11n.yaml", "yolo11.yaml", "special.yaml"])
def test_a_description_alone_has_random_values(
    name: str, asked: dict[str, int], classes: int
) -> None:
    built = opened(name, **asked)

    assert built.arch == Arch(name, {"num_classes": classes}, "ultralytics")
    assert built.source == f"ultralytics:{name}"
    model: Any = ultralytics_models.create(built.arch)
    assert model.head.out_channels == classes
    assert model.yaml["yaml_file"] == name
    assert not model.training


def test_a_description_has_no_trained_weights() -> None:
    with pytest.raises(SourceError, match=r"yolo11n\.yaml has no weights.*weights="):
        opened("yolo11n.yaml", trained=True)


@pytest.mark.parametrize(
    ("name", "kwargs", "said"),
    [
        ("yolo11n.yaml", {"num_classes": "3"}, "num_classes"),
        ("yolo11n.yaml", {"num_classes": 3, "fused": 1}, "fused"),
        ("yolo11n.yaml", {"num_classes": 3, "verbose": True}, "verbose"),
        ("yolo11n.yaml", {"num_classes": 3, "ch": 1}, "ch"),
        ("yolo11n.yaml", {"num_classes": 2**60}, "num_classes"),
        ("yolo12n.yaml", {}, r"8\.9 ships no yolo12n\.yaml"),
        ("../11/yolo11.yaml", {}, "ships no"),
    ],
)
def test_what_a_saved_file_may_not_ask_for_is_refused(
    name: str, kwargs: dict[str, Any], said: str
) -> None:
    with pytest.raises(SourceError, match=said):
        ultralytics_models.create(Arch(name, kwargs, "ultralytics"))


def test_a_file_that_is_missing_or_no_checkpoint_is_named(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(3)}, tmp_path / "plain.pt")
    nameless, _ = checkpoint(tmp_path, yaml_file=None)

    with pytest.raises(
        SourceError, match=r"gone\.pt does not exist.*ultralytics\.YOLO\('gone\.pt'\)"
    ):
        opened("gone.pt", trained=True)
    for file in (tmp_path / "plain.pt", nameless):
        with pytest.raises(SourceError, match=rf"{file.name} cannot be read.*--arch"):
            opened(str(file), trained=True)
