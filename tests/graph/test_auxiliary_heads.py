"""Auxiliary heads, which only training runs: seen, converted, and held to the proof."""

import copy
from typing import Any

import pytest
import torch
import torchvision
from lived import batchnorms, lived_in
from torch import Tensor, nn

import normswap
from normswap.models.modes import evaluating, with_heads
from normswap.surgery import comparison
from normswap.surgery.network import Network


class Two(nn.Module):
    """A trunk, a classifier, and a head that only training runs."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.fc = nn.Linear(8, 4)
        self.aux = nn.Sequential(nn.Conv2d(8, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1))

    def forward(self, x: Tensor) -> Any:
        """(N, 3, H, W) -> (N, 4), in training with the head's (N, 4)"""
        x = self.trunk(x)
        out = self.fc(x.mean((2, 3)))
        return (out, self.aux(x).mean((2, 3))) if self.training else out


class Asks(Two):
    """In training it wants targets, too."""

    def forward(self, x: Tensor, target: Tensor | None = None) -> Any:
        """As that of `Two`."""
        if self.training and target is None:
            raise ValueError("targets")
        return self.fc(self.trunk(x).mean((2, 3)))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def lived(model: nn.Module, x: Tensor) -> nn.Module:
    """Also what eval mode does not reach gets statistics and gammas of its own."""
    model = lived_in(model, x).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            with torch.no_grad():
                module.running_var.uniform_(0.5, 2)
                module.running_mean.normal_()
                module.weight.uniform_(-1, 2)
                module.bias.normal_()
    return model


def head(model: Any, x: Tensor) -> Tensor:
    """What the head gives, without the forward's help."""
    with torch.no_grad(), evaluating(model):
        return model.aux(model.trunk(x)).mean((2, 3))


def test_heads_are_folded(x: Tensor) -> None:
    model = lived(Two(), x)
    done = normswap.convert(model, to="folded", inputs=x)
    assert batchnorms(done.model) == []
    assert not model.training
    torch.testing.assert_close(head(done.model, x), head(model, x), rtol=1e-11, atol=1e-11)
    assert any("auxiliary" in note for note in done.notes)


def test_a_wrong_head_fails_the_proof(x: Tensor) -> None:
    model = lived(Two(), x)
    result: Any = normswap.convert(model, to="folded", inputs=x).model
    network = Network(model, x)
    assert comparison.compare(network, result).passed
    wrong = copy.deepcopy(result)
    wrong.aux[0].weight.data *= 1.001
    assert not comparison.compare(network, wrong).passed
    assert comparison.verify(model, wrong, x).passed  # eval mode alone does not see it


def test_a_forward_that_wants_targets_keeps_its_head(x: Tensor) -> None:
    model = lived(Asks(), x)
    done = normswap.convert(model, to="folded", inputs=x)
    assert batchnorms(done.model) == ["aux.1"]
    assert str(done.outcomes["aux.1"]) == "never called by forward"


def test_the_mode_is_put_back() -> None:
    model = Two().eval()
    model.trunk.train()
    before = torch.get_rng_state()
    with with_heads(model):
        assert model.training
        assert not model.trunk[1].training
        torch.rand(3)
    assert [m.training for m in (model, model.trunk, model.trunk[1], model.aux)] == [False, True, True, False]
    assert torch.equal(torch.get_rng_state(), before)


def test_googlenet() -> None:
    model = lived(torchvision.models.googlenet(weights=None, init_weights=False, num_classes=5),
                  torch.randn(2, 3, 64, 64)).float()  # fmt: skip
    done = normswap.convert(model, to="folded")
    assert batchnorms(done.model) == []
    example = torch.randn(2, 3, 96, 96)
    with torch.no_grad(), with_heads(model):
        expected = model(example)
    with torch.no_grad(), with_heads(done.model):
        found = done.model(example)
    for name in expected._fields:
        one, two = getattr(expected, name).double(), getattr(found, name).double()
        assert (one - two).norm() <= 1e-4 * one.norm(), name
