"""The papers' measurements, small: each figure beside what theory says. The scripts do the same at full size."""

from __future__ import annotations

import math

import de_smith_linear
import de_smith_relu
import kim_first_update
import kim_variance
import nf_variance
import pytest
from stacks import slope, worst


def test_linear_stacks() -> None:
    found = de_smith_linear.compare(depth=16, width=400, batch=400, seeds=2)
    assert worst(*found["unnormalized, skip path"]) < 0.1  # 2^(l - 1)
    assert worst(*found["normalized, skip path"]) < 0.03  # l
    assert worst(*found["normalized, branch"]) < 0.03  # 1


def test_normalized_relu_stacks() -> None:
    found = de_smith_relu.compare(depth=24, width=400, batch=400, seeds=3)
    measured = de_smith_relu.rates(found)
    assert measured["moving variance"] == pytest.approx(1 - 1 / math.pi, rel=0.04)
    assert measured["squared moving mean"] == pytest.approx(1 / math.pi, rel=0.12)
    assert found["variance of the branch"] == pytest.approx([1 - 1 / math.pi] * 24, rel=0.05)


@pytest.mark.parametrize(("down", "last"), kim_variance.CASES)
def test_reset_and_accumulation_in_resnet50(down: float, last: float) -> None:
    (_, variance), (_, wanted), starts = kim_variance.compare_v1("resnet50", down, last, seeds=1, batch=8, side=64)
    assert variance == pytest.approx(wanted, rel=0.05)
    resets = [v for v, first in zip(variance, starts, strict=True) if first]
    assert resets == pytest.approx([down**2 + last**2] * 4, rel=0.03)


def test_half_the_variance_of_every_gamma_accumulates_in_resnetv2_50() -> None:
    second, wanted, _ = kim_variance.compare_v2("resnetv2_50", 1.0, 1.0, seeds=1, batch=8, side=64)
    assert second == pytest.approx(wanted, rel=0.12)


def test_the_reflected_walk_far_from_the_reset() -> None:
    mean_sq, variance = kim_variance.theory_v1([True] + [False] * 24, 1.0, 1.0)
    assert variance[-1] - variance[-2] == pytest.approx(1 - 2 / math.pi, rel=0.02)
    assert (mean_sq[1], variance[1]) == pytest.approx((1 / math.pi, 2 - 1 / math.pi), rel=1e-3)


def test_the_first_update_of_the_gammas() -> None:
    powers = (-3, 0, 3)
    found = kim_first_update.compare(seeds=1, batch=8, side=32, powers=powers)
    slopes = {name: slope(powers, [math.log2(v) for v in relative]) for name, (_, relative) in found.items()}
    assert slopes["gamma_other"] == pytest.approx(-2, abs=1e-3)
    assert slopes["gamma_last"] > -1.5


@pytest.mark.slow
def test_three_stages_of_nf_resnet50() -> None:
    variance, wanted = nf_variance.measure("nf_resnet50", nf_variance.textured(6, 384, 0), 0)
    assert variance[:13] == pytest.approx(wanted[:13], rel=0.2)
    assert variance[0] == pytest.approx(wanted[0], rel=1e-3)  # by the factor; twelve are measured


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_all_of_nf_resnet50_as_timm_has_it(seed: int) -> None:
    variance, wanted = nf_variance.measure("nf_resnet50", nf_variance.textured(8, 768, seed), seed)
    assert variance == pytest.approx(wanted, rel=0.2)


def test_the_input_is_white_near_by_and_smooth_from_cell_to_cell() -> None:
    x = nf_variance.textured(16, 256, 0)
    assert float(x.var()) == pytest.approx(1, rel=1e-3)
    agree = [float((x[..., :-shift] * x[..., shift:]).mean()) for shift in (1, 2, 4)]
    assert agree[:2] == pytest.approx([0, 0], abs=0.1)
    assert agree[2] > 0.95
