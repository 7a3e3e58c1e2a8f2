"""What the caller set in torch as a whole is as it was after a conversion, whatever it was."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.torch_settings import settings
from torch import nn

import normswap
from normswap.models.modes import full_precision

IMAGES = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["as torch has them", "others", "deterministic", "frozen"])
def set_before(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """The settings of the caller, which the fixture sets and takes back."""
    dtype = torch.get_default_dtype()
    precision = torch.get_float32_matmul_precision()
    if request.param == "others":
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("high")
        torch.use_deterministic_algorithms(True, warn_only=True)
    elif request.param == "deterministic":
        torch.use_deterministic_algorithms(True)
    elif request.param == "frozen":
        # torch.testing calls `disable_global_flags`, which nothing takes back but this.
        plain_module: Any = vars(torch.backends)["m"]
        monkeypatch.setattr(plain_module, "__allow_nonbracketed_mutation_flag", False)
        assert torch.backends.flags_frozen()

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
