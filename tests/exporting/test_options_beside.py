"""Law of bounds: a file with an option is as near to its network as the file without it, in each
precision.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import normswap
from normswap.images.datasets import Loader, make_loader
from normswap.storage import checkpoint

OPTIONS: dict[str, dict[str, Any]] = {
    "normalize": {"normalize": True},
    "dynamic batch": {"dynamic_batch": True},
    "both": {"normalize": True, "dynamic_batch": True},
}
# Rounding goes another way where another layer comes first.
ANOTHER_WAY = 1.25


@functools.cache
def demo() -> nn.Module:
    return checkpoint.open_model("demo")


def images(samples: int, seed: int) -> Loader:
    return make_loader(demo(), "demo", samples=samples, seed=seed, workers=0, batch_size=16)


@functools.cache
def off(folder: Path, ending: str, precision: str, option: str) -> tuple[float, float]:
    """Relative L2, and the share of other answers."""
    settings = {**OPTIONS.get(option, {}), "dtype": precision, "images": images(48, 0)}
    if precision == "int8":
        settings["calibrate"] = images(32, 1)
    place = folder / f"{option}-{precision}.{ending}".replace(" ", "-")
    figures = normswap.export(demo(), place, **settings).figures
    assert figures.agreement is not None
    return figures.relative_l2, 1 - figures.agreement


FAST = (("pt2", "fp32"), ("onnx", "bf16"))
FILES = (
    *FAST,
    ("onnx", "fp32"),
    ("onnx", "fp16"),
    ("onnx", "int8"),
    ("pt2", "int8"),
    ("xml", "fp32"),
    ("xml", "int8"),
)


def marks_of(option: str, file: tuple[str, str]) -> list[pytest.MarkDecorator]:
    """Two options beside one another are slow; so are all formats but FAST, in int8 long."""
    if file not in FAST and file[1] == "int8" and file[0] != "onnx":
        return [pytest.mark.long]
    return [pytest.mark.slow] if file not in FAST or option == "both" else []


CASES = [
    pytest.param(option, *file, marks=marks_of(option, file))
    for option in OPTIONS
    for file in FILES
    if file != ("pt2", "int8")
    or option == "normalize"  # int8 of torch.export has batches of one size
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("beside")


@pytest.mark.slow
@pytest.mark.parametrize(("option", "ending", "precision"), CASES)
def test_an_option_costs_nothing(option: str, ending: str, precision: str, folder: Path) -> None:
    (error, other), (plain, differ) = (
        off(folder, ending, precision, each) for each in (option, "plain")
    )
    assert error <= ANOTHER_WAY * plain + 1e-6
    assert other <= differ + 0.05
