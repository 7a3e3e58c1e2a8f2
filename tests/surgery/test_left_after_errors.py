"""Law of errors: a forward that fails leaves its network, and torch, as they were.

Each public function that runs a network meets one whose forward fails once, at each of its calls in
turn. Whether the function gives up or goes another way: the network has the tensors, dtypes, modes
and hooks that it had, and torch has the settings of its caller.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hand_written_networks import PostAct
from support.lived_in_networks import living
from support.torch_settings import settings
from test_odd_networks import assert_same, fingerprint
from torch import Tensor, nn

import normswap
from normswap.errors import NormswapError

IMAGES = torch.rand(8, 3, 12, 12, generator=torch.Generator().manual_seed(0))
# At most so many calls of a function fail, one after the other, by default.
MOST = 6


def classifier() -> nn.Module:
    """Return a small residual network whose parts are in different modes, as a user may have it."""
    network, _ = living(
        nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            PostAct(4),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 3),
        ),
        *IMAGES.shape[1:],
    )
    network[1].train()
    network[0].requires_grad_(False)
    return network


def convert(scheme: str, **options: Any) -> Callable[[nn.Module, Path], object]:
    return lambda network, _: normswap.convert(network, scheme, inputs=IMAGES[:2], **options)


def export(network: nn.Module, folder: Path) -> object:
    return normswap.export(network, folder / "file.pt2", inputs=IMAGES[:1], force=True)


def unfold(network: nn.Module, folder: Path) -> object:
    converted = normswap.convert(network, "skipinit", inputs=IMAGES[:2])
    like = copy.deepcopy(network)
    return normswap.convert(converted, "unfold", inputs=IMAGES[:2], like=like)


FUNCTIONS: dict[str, Callable[[nn.Module, Path], object]] = {
    "inspect": lambda network, _: normswap.inspect(network, IMAGES[:1]),
    "convert to folded": convert("folded"),
    "convert to skipinit": convert("skipinit"),
    "convert to nf": convert("nf", calibrate=IMAGES.split(4)),
    "convert to groupnorm": convert("groupnorm", calibrate=IMAGES.split(4)),
    "convert and unfold": unfold,
    "verify": lambda network, _: normswap.verify(network, network, IMAGES[:2]),
    "diagnose": lambda network, _: normswap.diagnose(network, inputs=IMAGES[:2]),
    "spp": lambda network, _: normswap.signal_propagation(network, IMAGES),
    "recalibrate": lambda network, _: normswap.recalibrate(network, IMAGES.split(4)),
    "export": export,
}


class InPlace(nn.Module):
    """Writes into its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sub_(0.5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_forward_that_writes_into_its_input_leaves_the_users_images(
    name: str, tmp_path: Path
) -> None:
    before = IMAGES.clone()
    network = nn.Sequential(InPlace(), *classifier())

    # A function may refuse such a forward.
    with suppress(NormswapError):
        FUNCTIONS[name](network, tmp_path)

    assert torch.equal(IMAGES, before)


class Fuse:
    """Counts the calls of all convolutions, and lets one of them fail.

    Args:
        failing: The number of the call that fails. With None no call fails.
    """

    def __init__(self, failing: int | None = None) -> None:
        self.failing = failing
        self.calls = 0

    def burn(self) -> None:
        self.calls += 1
        if self.calls - 1 == self.failing:
            raise RuntimeError("this call fails")


@pytest.fixture
def fuse(monkeypatch: pytest.MonkeyPatch) -> list[Fuse]:
    """Return a list with the fuse of all convolutions, which the test exchanges."""
    fuses = [Fuse()]
    forward = nn.Conv2d._conv_forward

    def counted(self: nn.Conv2d, *args: Any) -> Tensor:
        value = forward(self, *args)
        fuses[0].burn()
        return value

    monkeypatch.setattr(nn.Conv2d, "_conv_forward", counted)
    return fuses


def spread(count: int, most: int) -> Sequence[int]:
    """Return at most so many numbers below a count: the first, the last, and some between."""
    if count <= most:
        return range(count)
    return sorted({round(part * (count - 1) / (most - 1)) for part in range(most)})


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("most", [MOST, pytest.param(1000, marks=pytest.mark.long)])
def test_a_forward_that_fails_leaves_all_as_it_was(
    name: str, most: int, fuse: list[Fuse], tmp_path: Path
) -> None:
    function = FUNCTIONS[name]
    network = classifier()
    fuse[0] = Fuse()
    function(network, tmp_path)
    calls = fuse[0].calls
    before_all = settings()

    for failing in spread(calls, most):
        fuse[0] = Fuse()
        network = classifier()
        before = fingerprint(network)
        fuse[0] = Fuse(failing)
        # The function may give up with an error, whatever it is, or go another way.
        with suppress(Exception):
            function(network, tmp_path)

        assert fuse[0].calls > failing
        assert_same(fingerprint(network), before, f"call {failing} of {calls}")
        assert settings() == before_all
