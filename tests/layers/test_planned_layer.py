"""Two layers of one name are refused; a subclass that torch makes while it records one is the same layer."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import normswap
from normswap.errors import PlanError
from normswap.layers.placeholders import Vacant
from normswap.layers.planned_layer import PlannedLayer, planned_layers


class Part(nn.Module):
    """A convolution, its norm, and an activation that others have, too, as Ultralytics' networks have it."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


def test_another_layer_of_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(PlanError, match=r"two layers are called Vacant: one is in normswap.layers.placeholders"):
        type("Vacant", (PlannedLayer,), {})
    assert planned_layers()["Vacant"] is Vacant


def test_a_network_that_shares_an_activation_is_exported(tmp_path: Path) -> None:
    """torch.export records such a network through subclasses that have the names of the layers."""
    act = nn.SiLU()
    model = nn.Sequential(Part(act), Part(act), nn.Flatten()).eval()
    done = normswap.export(model, tmp_path / "net.pt2", input_size=(3, 8, 8), images=torch.randn(2, 3, 8, 8))
    assert done.figures.passed
    assert planned_layers()["Vacant"] is Vacant
