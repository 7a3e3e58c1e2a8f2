"""The first layer that differs is named by the values that a result computes, also where it has no value of some."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from normswap.graph import recording
from normswap.models.calling import Example
from normswap.surgery import departure


class Gated(nn.Module):
    """Its gate is 0.5 and hardly moves: an error of `gate` is 1e-4 of that in what the gate multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.act, self.gate = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1)
        self.body, self.head = nn.Conv2d(8, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.stem(x))
        x = x * (1e-3 * self.gate(x.mean((2, 3), keepdim=True))).sigmoid()
        return self.head(self.act(self.body(x)).mean((2, 3)))


@pytest.mark.parametrize("fused", [(), ("stem", "body")])
@pytest.mark.parametrize("faulty", ["stem", "gate", "body", "head", "", "stem gate body"])
def test_the_layer_is_named(faulty: str, fused: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    network, values = Gated().eval(), dict[str, object]()
    other, example = copy.deepcopy(network), Example((torch.randn(2, 3, 12, 12),))
    for layer in faulty.split():
        other.get_parameter(f"{layer}.weight").data.mul_(1.3)
    recording.record_once(other, example, lambda name, value: values.update({name: copy.deepcopy(value)}))
    results = [value for name, value in values.items() if name not in fused]
    apart = departure.first_apart(network, example, results, 1e-6)
    assert (apart and apart.site) == next(iter(faulty.split()), None)
