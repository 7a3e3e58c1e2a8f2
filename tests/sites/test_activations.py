"""What is an activation: the classes of torch's and timm's files of activations."""

import inspect

import pytest
import timm.layers.activations
import torch.nn.modules.activation
from torch import nn

from normswap.sites.activations import is_activation

FILES = (torch.nn.modules.activation, timm.layers.activations)
CLASSES = [
    kind
    for file in FILES
    for _, kind in inspect.getmembers(file, inspect.isclass)
    if issubclass(kind, nn.Module) and kind.__module__ == file.__name__
]


def bare(kind: type[nn.Module]) -> nn.Module:
    """Return a module of a class, without its arguments."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    return module


def test_both_libraries_have_some() -> None:
    assert {kind.__module__ for kind in CLASSES} == {file.__name__ for file in FILES}
    assert len(CLASSES) > 30


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_it_is_one(kind: type[nn.Module]) -> None:
    assert is_activation(bare(kind))


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.BatchNorm2d, nn.Identity, timm.layers.SEModule])
def test_it_is_none(kind: type[nn.Module]) -> None:
    assert not is_activation(bare(kind))
