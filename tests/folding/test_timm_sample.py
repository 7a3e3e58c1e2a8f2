"""A fast sample of the walk over timm (tests/lab/coverage/walk.py), its own checker, and what the walk taught."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from crossed import sampled
from lived import batchnorms, distance, lived_in, run
from tiny import C, bn, conv, net
from torch import Tensor

from normswap import convert

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


def _looks_at_values(m: Any, x: Tensor) -> Tensor:
    return m.bn(m.conv(x)) if float(x.sum()) < 1e9 else x


def test_a_scalar_behind_a_branch_that_looks_at_values() -> None:
    """The branch is kept and chained, so the norms inside it have other paths in the result."""
    torch.manual_seed(0)
    x = torch.randn(3, C, 7, 7, dtype=torch.float64)
    branch = net(_looks_at_values, conv=conv, bn=bn)
    model = lived_in(net(lambda m, x: ((y := m.conv(x)) + m.branch(y)).relu(), conv=conv, branch=branch)(), x)
    done = convert(model, "skipinit", inputs=x)
    assert batchnorms(done.model) == []
    assert str(done.outcomes["branch.bn"]) == "folds into branch.conv"
    assert distance(run(model, x), run(done.model, x)) < 1e-12
