"""A fast sample of the walk over timm (tests/lab/coverage/walk.py), its own checker, and what the walk taught."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crossed import sampled
from lived import batchnorms, distance, lived_in, run, step
from tiny import C, bn, conv
from torch import Tensor, nn

from normswap import convert
from normswap.surgery import applying

sys.path.insert(0, str(Path(__file__).parents[1] / "lab" / "coverage"))

import mutants
import network

SAMPLE = {  # by family: norms folded back, forward, scale moved on, left as a scale and shift
    "test_resnet": (15, 0, 0, 0),
    "test_byobnet": (14, 0, 0, 0),
    "test_efficientnet": (13, 0, 0, 0),
    "regnety_002": (44, 0, 0, 0),
    "mobilenetv3_small_050": (34, 0, 0, 0),
    "tinynet_e": (31, 0, 0, 0),
    "ghostnet_050": (80, 0, 0, 0),
    "repvgg_a0": (44, 0, 0, 17),
    "levit_128s": (50, 0, 0, 2),
    "mobilevit_xxs": (32, 0, 0, 0),
    "cpubone_nano": (19, 0, 0, 0),
    "efficientvit_m0": (112, 0, 0, 1),
    "efficientvit_b0": (26, 0, 0, 0),
    "dla46_c": (48, 0, 0, 0),
    "ese_vovnet19b_slim_dw": (22, 0, 0, 0),
    "mixnet_s": (49, 0, 0, 0),
}


@pytest.mark.parametrize("arch", sampled(SAMPLE, every=2))
@pytest.mark.filterwarnings("default")
def test_fold(arch: str) -> None:
    row = network.check(arch)
    assert row["status"] == "exact", row
    assert row["left"] == 0
    assert tuple(row.get(way, 0) for way in ("back", "forward", "moved", "affine")) == SAMPLE[arch]
    assert row["sensitivity"] > 1e-2
    assert row["fuse"]["status"] != "wrong"


@pytest.mark.parametrize("arch", ["test_resnet", "regnety_002", pytest.param("cpubone_nano", marks=pytest.mark.slow)])
def test_the_checker_notices_one_percent_of_one_channel(arch: str) -> None:
    row = mutants.check(arch)
    assert (row["detected"], row["missed"]) == (mutants.TRIALS, [])


class Pair(nn.Module):
    """A convolution with its norm, as many networks have it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = conv(), bn()

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))


class Optional(Pair):
    def forward(self, x: Tensor, plain: bool = False) -> Tensor:
        return self.conv(x) if plain else self.bn(self.conv(x))


class Secretive(nn.Module):
    """Calls its part as a whole, here and there; branches on its input."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(x) if self.part is not None else x
        return self.part(y) if float(x.sum()) < 1e9 else x


class ByIndex(Secretive):
    def forward(self, x: Tensor) -> Tensor:
        y = self.part[0](x)
        return self.part[1](y) + y if float(x.sum()) < 1e9 else x


class InALoop(Secretive):
    def forward(self, x: Tensor) -> Tensor:
        total = x
        for layer in self.part:
            x = layer(x)
            total = total + x
        return total if float(x.sum()) < 1e9 else x


class ByName(Secretive):
    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) + self.part.conv(x) if float(x.sum()) < 1e9 else x


class ByWeight(Secretive):
    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) + self._slope(x) if float(x.sum()) < 1e9 else x

    def _slope(self, x: Tensor) -> Tensor:
        return next(self.part.parameters()).sum() * x


class ByFunction(Secretive):
    def forward(self, x: Tensor) -> Tensor:
        return twice(self, x) if float(x.sum()) < 1e9 else x


def twice(module: Any, x: Tensor) -> Tensor:
    return module.part(x) + module.part.conv(x)


class Option(Secretive):
    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) + self.part(x, True) if float(x.sum()) < 1e9 else x


class Heir(ByName):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Silent(Pair):
    def train(self, mode: bool = True) -> Any:  # as some of timm's: it returns nothing
        super().train(mode)


def nested() -> nn.Module:
    return Secretive(Secretive(nn.Sequential(Pair(), nn.ReLU(inplace=True), conv(), bn())))


def aliased_inside() -> nn.Module:
    inner: Any = Secretive(Pair())
    inner.alias = inner.part.conv
    return inner


BACK, KEPT = "folds into", "keeps scale and shift"
LOOKING: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "as a whole": (lambda: Secretive(Pair()), [BACK]),
    "a sequence": (lambda: Secretive(nn.Sequential(conv(), bn(), nn.ReLU(), conv(), bn())), [BACK, BACK]),
    "nested": (nested, [BACK, BACK]),
    "train returns nothing": (lambda: Secretive(Silent()), [BACK]),
    "by index": (lambda: ByIndex(nn.Sequential(conv(), bn())), [KEPT]),
    "in a loop": (lambda: InALoop(nn.Sequential(conv(), bn())), [KEPT]),
    "by name": (lambda: ByName(Pair()), [KEPT]),
    "by weight": (lambda: ByWeight(Pair()), [KEPT]),
    "by a function": (lambda: ByFunction(Pair()), [KEPT]),
    "by an option": (lambda: Option(Optional()), [KEPT]),
    "by a parent's forward": (lambda: Heir(Pair()), [KEPT]),
    "under two names": (aliased_inside, [BACK]),
}


def around(inner: nn.Module) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(3, C, 7, 7, dtype=torch.float64)
    return lived_in(nn.Sequential(conv(), inner, nn.ReLU()), x), x


@pytest.mark.parametrize("name", LOOKING)
def test_what_a_module_that_looks_at_values_calls(name: str) -> None:
    make, expected = LOOKING[name]
    model, x = around(make())
    planned, builder = step(model, "folded")
    assert builder.refusals == {}
    assert [
        str(verdict)[: len(want)] for verdict, want in zip(builder.outcomes.values(), expected, strict=True)
    ] == expected
    result = applying.apply_step(model, planned)
    assert batchnorms(result) == []
    assert distance(run(model, x), run(result, x)) < 1e-12


class Residual(nn.Module):
    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


def test_a_scalar_behind_a_branch_that_looks_at_values() -> None:
    """The branch is kept and chained, so the norms inside it have other paths in the result."""
    model, x = around(Residual(Secretive(Pair())))
    done = convert(model, "skipinit", inputs=x)
    assert batchnorms(done.model) == []
    assert str(done.outcomes["1.branch.part.bn"]) == "folds into 1.branch.part.conv"
    assert distance(run(model, x), run(done.model, x)) < 1e-12
