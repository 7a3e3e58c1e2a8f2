"""Networks that somebody registered with timm without a record of weights: opened, found again, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models import _registry, build_model_with_cfg, register_model
from torch import nn

import normswap
from normswap.cli.app import main
from normswap.models.zoo import identify, open_source
from normswap.plan import Arch


class Net(nn.Module):
    """Three layers; as many classes as timm asks for."""

    def __init__(self, num_classes: int = 10, in_chans: int = 3) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.conv, self.bn = nn.Conv2d(in_chans, 8, 3), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.relu(self.bn(self.conv(x))).mean((2, 3)))


def own_plain(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """A network that carries no record at all."""
    return Net(**{name: value for name, value in kwargs.items() if name in ("num_classes", "in_chans")})


def own_built(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """A network that timm builds, and gives its usual record."""
    model: nn.Module = build_model_with_cfg(Net, "own_built", pretrained, **kwargs)
    return model


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    """Both are timm's for the time of a test."""
    register_model(own_plain)
    register_model(own_built)
    yield
    for name in ("own_plain", "own_built"):
        del _registry._model_entrypoints[name]
        _registry._module_to_models[_registry._model_to_module.pop(name)].discard(name)


@pytest.mark.parametrize("name", ["own_plain", "own_built"])
def test_it_opens_and_converts(name: str) -> None:
    model = open_source(name, weights="random", num_classes=4, in_chans=1)
    assert type(model) is Net
    assert (model.fc.out_features, model.conv.in_channels) == (4, 1)
    done = normswap.convert(model, "folded", inputs=torch.randn(2, 1, 16, 16))
    assert done.report.passed


@pytest.mark.parametrize("name", ["own_plain", "own_built"])
def test_it_has_no_weights_to_load(name: str, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["convert", name, "--to", "folded", "-o", str(tmp_path / "out")]) == 2
    said = capfd.readouterr().err.strip().splitlines()
    assert [line for line in said if "timm has no pretrained weights for " + name in line]
    assert not any("Traceback" in line for line in said)


def test_it_is_found_by_the_record_that_timm_gave_it() -> None:
    assert identify(timm.create_model("own_built", num_classes=4)) == Arch("own_built", {"num_classes": 4})
    assert identify(timm.create_model("own_plain", num_classes=4)) is None  # it says nowhere what it is called
