"""Law of fusing: methods of other libraries that fuse norms do nothing once the norms are gone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.lived_in_networks import distance, lived_in, run
from torch import Tensor, nn

import normswap

METHODS = ("fuse", "fuse_convs", "reparameterize", "switch_to_deploy")
IMAGES = torch.randn(3, 3, 9, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def drop_biases(module: nn.Module) -> str:
    """Drop every bias below a module, as who fuses takes them to be zero in front of a norm."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            layer.bias = None
    return "fused"


class Fuses(nn.Module):
    """A module around others, with all methods that fuse."""

    fuse = fuse_convs = reparameterize = switch_to_deploy = drop_biases

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = part(x)
        return x


def network() -> Fuses:
    """A norm below two modules that fuse, and a module that fuses without a norm."""
    torch.manual_seed(0)
    inner = Fuses(conv=nn.Conv2d(4, 4, 3), bn=nn.BatchNorm2d(4), act=nn.ReLU())
    outer = Fuses(conv=nn.Conv2d(3, 4, 3), inner=inner)
    beside = Fuses(conv=nn.Conv2d(4, 4, 1))
    model: Any = lived_in(Fuses(outer=outer, beside=beside), IMAGES)
    return model


@pytest.mark.parametrize("path", ["", "outer", "outer.inner"])
@pytest.mark.parametrize("method", METHODS)
def test_around_a_norm_that_is_gone_nothing_is_left_to_fuse(path: str, method: str) -> None:
    source = network()
    converted = normswap.convert(source, "folded", inputs=IMAGES).model
    module = converted.get_submodule(path)
    fuse: Callable[..., object] = getattr(module, method)

    assert fuse() is module

    assert distance(run(source, IMAGES), run(converted, IMAGES)) < 1e-12


@pytest.mark.parametrize("method", METHODS)
def test_elsewhere_and_in_the_source_they_fuse_as_before(method: str) -> None:
    source = network()
    converted = normswap.convert(source, "folded", inputs=IMAGES).model

    assert getattr(converted.get_submodule("beside"), method)() == "fused"
    assert getattr(source, method)() == "fused"
    assert converted.get_submodule("beside.conv").bias is None
