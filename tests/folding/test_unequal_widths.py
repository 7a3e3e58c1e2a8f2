"""Law of widths: an axis of a weight is never taken for another one.

Every kind of linear layer makes another number of channels than it reads, and stands behind a norm,
before one, and in a concatenation with another layer.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.lived_in_networks import batchnorms, distance, lived_in, run
from support.sampled_tables import crossed
from torch import Tensor, nn

import normswap

READ = 6
# Each layer reads six channels.
LAYERS: dict[str, tuple[Callable[[], Any], int]] = {
    "convolution": (lambda: nn.Conv2d(READ, 4, 3), 2),
    "grouped": (lambda: nn.Conv2d(READ, 9, 3, groups=3), 2),
    "depthwise": (lambda: nn.Conv2d(READ, 12, 3, groups=READ, bias=False), 2),
    "transposed": (lambda: nn.ConvTranspose2d(READ, 4, 3), 2),
    "grouped transposed": (lambda: nn.ConvTranspose2d(READ, 9, 3, groups=3, bias=False), 2),
    "of one dimension": (lambda: nn.Conv1d(READ, 4, 3), 1),
    "transposed, of one dimension": (lambda: nn.ConvTranspose1d(READ, 8, 3, groups=2), 1),
    "of three dimensions": (lambda: nn.Conv3d(READ, 9, 2, groups=3), 3),
    "transposed, of three dimensions": (lambda: nn.ConvTranspose3d(READ, 4, 2), 3),
}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class Behind(nn.Module):
    """The norm reads the layer."""

    def __init__(self, layer: Any, dimensions: int) -> None:
        super().__init__()
        self.layer = layer
        self.norm = NORMS[dimensions](layer.out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)).relu()


class Joined(nn.Module):
    """The norm reads a concatenation of the layer and of another one, on either side."""

    def __init__(self, layer: Any, dimensions: int) -> None:
        super().__init__()
        self.layer = layer
        self.other = CONVOLUTIONS[dimensions](READ, 5, 1)
        self.last = CONVOLUTIONS[dimensions](READ, 3, 1)
        self.norm = NORMS[dimensions](5 + layer.out_channels + 3)

    def forward(self, x: Tensor) -> Tensor:
        made = self.layer(x)
        like = nn.functional.interpolate(x, size=made.shape[2:])
        joined = torch.cat([self.other(like), made, self.last(like)], 1)
        return self.norm(joined).relu()


class Before(nn.Module):
    """The layer reads the norm, through a ReLU."""

    def __init__(self, layer: Any, dimensions: int) -> None:
        super().__init__()
        self.first = CONVOLUTIONS[dimensions](READ, READ, 1)
        self.norm = NORMS[dimensions](READ)
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(self.first(x)).relu())


PLACES = {"behind": Behind, "joined": Joined, "before": Before}


@crossed("name, place", LAYERS, PLACES, mark=pytest.mark.slow)
def test_a_layer_of_unequal_widths_folds(name: str, place: str) -> None:
    torch.manual_seed(0)
    make, dimensions = LAYERS[name]
    x = torch.randn(4, READ, *[7] * dimensions, dtype=torch.float64)
    model = lived_in(PLACES[place](make(), dimensions), x)

    done = normswap.convert(model, "folded", inputs=x)

    assert batchnorms(done.model) == []
    assert done.report.exact
    # Nothing is left of the norm but weights and biases.
    assert len(list(done.model.parameters())) <= len(list(model.parameters())) - 1
    assert distance(run(model, x), run(done.model, x)) < 1e-12
