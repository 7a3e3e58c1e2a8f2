"""Factors before a tanh: against brute force over normal and long-tailed channels, and on a network with images."""

import copy
import math

import numpy as np
import pytest
import torch
from crossed import sampled
from lived import distance, run
from test_dyt import network, pictures
from torch import Tensor

from normswap.calibration import tanh_factors
from normswap.graph import inspection
from normswap.models.calling import Example
from normswap.schemes.dyt import fitting_target
from normswap.surgery import applying, conversion


def calls(*batches: Tensor) -> list[Example]:
    return [Example((batch,)) for batch in batches]


def channels() -> Tensor:
    """Normal ones, flat ones, and ones with longer and longer tails, all of deviation 1."""
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(6, 4000, generator=generator)
    x = torch.stack([u[0], u[1].clamp(-1, 1), u[2] * u[2].abs(), u[3] ** 3, u[4].exp(), 0 * u[5]])
    return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True).clamp_min(1e-30)


def residual(x: np.ndarray, alpha: float) -> float:  # type: ignore[type-arg]
    """By a least-squares solver."""
    design = np.stack([np.tanh(alpha * x), np.ones_like(x)], 1)
    off = x - design @ np.linalg.lstsq(design, x, rcond=None)[0]
    return float(off @ off / ((x - x.mean()) @ (x - x.mean())))


@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_factors_are_the_largest_with_which_no_more_is_lost(alpha: float) -> None:
    x = channels()
    found = tanh_factors.factors(x, alpha)
    normal = np.random.default_rng(0).standard_normal(400_000)
    most = residual(normal, alpha)
    steps = (-4 * found.log2()).round()
    assert torch.equal(found, 2 ** (-steps / 4))
    assert found[[1, 5]].tolist() == [1, 1]
    assert found[0] > 0.8
    assert bool((found[2:5] < 0.8).all())
    for channel, factor in list(zip(x.double().numpy(), found.tolist(), strict=True))[2:5]:
        assert residual(channel, alpha * factor) < 1.03 * most
        assert residual(channel, alpha * factor * 2**0.25) > 0.97 * most


def test_channels_that_are_not_finite_keep_their_size() -> None:
    x = channels()
    x[2, 0] = math.inf
    assert tanh_factors.factors(x, 0.25)[2] == 1


@pytest.mark.parametrize("arch", sampled(["resnetv2_18", "mobilenetv2_035"], every=2))
def test_other_factors_keep_the_target(arch: str) -> None:
    """The target computes what it did, on leaves and on images, and images come nearer."""
    source, x = network(arch), pictures(8, 3)
    step, _ = conversion.plan_step(inspection.inspect(source, x), "dyt", bend=0.7)
    target, result = applying.apply_step(source, fitting_target(step)), applying.apply_step(source, step)
    found = []
    for batches in ((), calls(x, 3 * pictures(8, 4))):
        pattern, bent = copy.deepcopy(target), copy.deepcopy(result)
        tanh_factors.choose_factors(pattern, bent, step, Example((x,)), batches)
        assert distance(run(source, x), run(pattern, x)) < 1e-12
        found.append((distance(run(source, x), run(bent, x)), bent.state_dict()))
    (on_leaves, one), (on_images, two) = found
    assert any(not torch.equal(tensor, two[name]) for name, tensor in one.items())
    assert on_images < on_leaves


def test_few_values_do_not_choose_factors() -> None:
    """Of one image less than 16 there are 240 values of a channel."""
    source, x = network("resnet18"), pictures(15, 3)
    step, _ = conversion.plan_step(inspection.inspect(source, x[:2]), "dyt", bend=0.7)
    target, result = applying.apply_step(source, fitting_target(step)), applying.apply_step(source, step)
    on_leaves = copy.deepcopy(result)
    tanh_factors.choose_factors(copy.deepcopy(target), on_leaves, step, Example((x,)), ())
    tanh_factors.choose_factors(target, result, step, Example((x,)), calls(x))
    assert all(tensor.equal(on_leaves.state_dict()[name]) for name, tensor in result.state_dict().items())
