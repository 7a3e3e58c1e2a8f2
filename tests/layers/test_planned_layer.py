"""Two layers of one name are refused; a subclass that torch makes while it records one is the same layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import normswap
from normswap.errors import PlanError
from normswap.layers.placeholders import Vacant
from normswap.layers.planned_layer import PlannedLayer, planned_layers


class Shared(nn.Module):
    """Two norms and one activation, in two places, as Ultralytics' convolutions have it."""

    def __init__(self) -> None:
        super().__init__()
        act = nn.SiLU()
        self.parts = nn.ModuleList(nn.ModuleList([nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), act]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm, act in self.parts:
            x = act(norm(conv(x)))
        return x.flatten(1)


def test_another_layer_of_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(PlanError, match=r"two layers are called Vacant: one is in normswap.layers.placeholders"):
        type("Vacant", (PlannedLayer,), {})
    assert planned_layers()["Vacant"] is Vacant


def test_a_network_that_shares_an_activation_is_exported(tmp_path: Path) -> None:
    """torch.export records such a network through subclasses that have the names of the layers."""
    model = Shared().eval()
    done = normswap.export(model, tmp_path / "net.onnx", input_size=(3, 8, 8), images=torch.randn(2, 3, 8, 8))
    assert (done.nodes["Conv"], done.figures.passed) == (2, True)
    assert planned_layers()["Vacant"] is Vacant
