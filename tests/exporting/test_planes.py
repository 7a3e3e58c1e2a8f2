"""3-D convolutions as 2-D ones compute the same, with every stride, padding, dilation and number of groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lived import distance, run
from torch import nn

from normswap.exporting.planes import in_planes


@pytest.mark.parametrize(
    ("out", "kernel", "options"),
    [
        (8, 3, {"padding": 1}),
        (8, (3, 1, 2), {"stride": (2, 1, 2), "padding": (2, 0, 1)}),
        (4, (3, 3, 1), {"groups": 2, "dilation": (2, 1, 1), "stride": (3, 2, 1)}),
        (6, (2, 3, 3), {"groups": 6, "bias": False}),
        (8, (2, 3, 2), {"dilation": (1, 2, 3)}),
        (4, 1, {}),
    ],
    ids=["padding", "strides", "groups and dilation", "depthwise", "dilated planes", "points"],
)
def test_the_same_sums(out: int, kernel: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    conv, x = nn.Conv3d(6, out, kernel, **options).double(), torch.randn(2, 6, 9, 7, 8, dtype=torch.float64)
    network = nn.Sequential(conv, nn.ReLU())
    twin = in_planes(network)
    assert not [module for module in twin.modules() if isinstance(module, nn.Conv3d)]
    assert network[0] is conv
    assert distance(run(network, x), run(twin, x)) < 1e-14


@pytest.mark.parametrize("options", [{"padding": "same"}, {"padding": 1, "padding_mode": "circular"}])
def test_other_paddings_stay(options: dict[str, Any]) -> None:
    (layer,) = in_planes(nn.Sequential(nn.Conv3d(1, 2, 3, **options)))
    assert type(layer) is nn.Conv3d
