"""What the caller set in torch as a whole is as it was after a conversion, whatever it was."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
from support.torch_settings import precisions, settings
from torch import Tensor, nn

import normswap
from normswap.errors import quiet
from normswap.models.modes import callers_dtype, full_precision

IMAGES = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["as torch has them", "others", "short products", "deterministic", "frozen"])
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
    elif request.param == "short products":
        torch.set_float32_matmul_precision("medium")
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


def test_products_are_whole_in_full_precision(set_before: dict[str, Any]) -> None:
    with full_precision():
        inside = precisions()

    values = {inside[name] for name in ("float32 products", "cuda.matmul", "mkldnn.matmul")}
    assert values <= {"highest", "ieee"}
    assert inside["cuda.matmul.allow_tf32"] == "False"
    assert inside["cudnn.conv"] in ("none", "ieee")
    assert inside["mkldnn.conv"] == "ieee"


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_forward_gets_the_callers_dtype_at_any_depth(depth: int, dtype: torch.dtype) -> None:
    """A conversion makes others, and each of them switches to full precision."""
    torch.set_default_dtype(dtype)
    try:
        with ExitStack() as blocks:
            for _ in range(depth):
                blocks.enter_context(full_precision())
            assert torch.empty(0).dtype is torch.float32

            with callers_dtype():
                assert torch.empty(0).dtype is dtype

            assert torch.empty(0).dtype is torch.float32
        assert torch.empty(0).dtype is dtype
    finally:
        torch.set_default_dtype(torch.float32)

    # Nothing of a caller is left for the next one.
    with full_precision(), callers_dtype():
        assert torch.empty(0).dtype is torch.float32


class MakesOnes(nn.Module):
    """Multiplies by a tensor of the default dtype that its forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)) * (torch.ones(1) / 3)


def test_a_network_in_the_callers_dtype_is_proved_in_it() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        network = MakesOnes().eval()
        done = normswap.convert(network, "folded", inputs=IMAGES.double())
        answers = done.model(IMAGES.double())
        wanted = network(IMAGES.double())
    finally:
        torch.set_default_dtype(torch.float32)

    assert done.report.verdict == "PROVED"
    assert answers.dtype == wanted.dtype == torch.float64
    torch.testing.assert_close(answers, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("level", [logging.NOTSET, logging.DEBUG, logging.WARNING, 99])
@pytest.mark.parametrize("fails", [False, True])
def test_what_the_caller_hears_of_libraries_is_as_before(level: int, fails: bool) -> None:
    logging.disable(level)
    filters = [*warnings.filters]
    try:
        with suppress(ZeroDivisionError), quiet():
            assert logging.root.manager.disable >= logging.CRITICAL
            if fails:
                raise ZeroDivisionError

        assert logging.root.manager.disable == level
        assert [*warnings.filters] == filters
    finally:
        logging.disable(logging.NOTSET)


def test_an_error_restores_them(set_before: dict[str, Any]) -> None:
    with pytest.raises(ZeroDivisionError), full_precision():
        raise ZeroDivisionError

    assert settings() == set_before
