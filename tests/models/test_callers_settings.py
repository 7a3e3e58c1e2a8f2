"""What the caller set in torch as a whole is as it was after a conversion, whatever it was."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import normswap
from normswap.models.modes import full_precision

IMAGES = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def settings() -> dict[str, Any]:
    return {
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "only warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "float32 products": torch.get_float32_matmul_precision(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "threads": torch.get_num_threads(),
    }


@pytest.fixture(params=["as torch has them", "others", "deterministic"])
def set_before(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """The settings of the caller, which the fixture sets and takes back."""
    dtype = torch.get_default_dtype()
    precision = torch.get_float32_matmul_precision()
    if request.param == "others":
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("high")
        torch.use_deterministic_algorithms(True, warn_only=True)
    elif request.param == "deterministic":
        torch.use_deterministic_algorithms(True)

    yield settings()

    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(False)


def test_a_conversion_restores_them(set_before: dict[str, Any]) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).float().eval()

    normswap.convert(network, "folded", inputs=IMAGES)

    assert settings() == set_before


def test_an_error_restores_them(set_before: dict[str, Any]) -> None:
    with pytest.raises(ZeroDivisionError), full_precision():
        raise ZeroDivisionError

    assert settings() == set_before
