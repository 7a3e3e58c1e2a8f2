"""Law: a factor passes a row of activations if it passes each of them."""

import itertools
from collections.abc import Callable

import pytest
from timm.layers import activations as timm_activations
from torch import nn

from normswap.sites.activations import is_homogeneous

ACTIVATIONS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "ReLU": (nn.ReLU, True),
    "LeakyReLU": (nn.LeakyReLU, True),
    "Identity": (nn.Identity, True),
    "GELU": (nn.GELU, False),
    "Sigmoid": (nn.Sigmoid, False),
    "ReLU6": (nn.ReLU6, False),
    "Mish of timm": (timm_activations.Mish, False),
}


@pytest.mark.parametrize(("one", "other"), [*itertools.product(ACTIVATIONS, repeat=2)])
def test_a_row_passes_what_each_passes(one: str, other: str) -> None:
    first, first_passes = ACTIVATIONS[one]
    second, second_passes = ACTIVATIONS[other]

    assert is_homogeneous(first()) is first_passes
    assert is_homogeneous(nn.Sequential(first(), second())) is (first_passes and second_passes)
    nested = nn.Sequential(nn.Identity(), nn.Sequential(first(), second()))
    assert is_homogeneous(nested) is (first_passes and second_passes)
