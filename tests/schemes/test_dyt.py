"""`--to dyt`: gamma tanh(alpha x) + beta in place of BatchNorms, against the formula by hand and
its limit.

Factors before a tanh: against brute force over normal and long-tailed channels, and on a network
with images.
"""

import copy
import functools
import math
from typing import Any

import numpy as np
import pytest
import timm
import torch
from support.lived_in_networks import batchnorms, distance, lived_in, run
from support.model_sources import SMALL_IMAGES
from support.sampled_tables import quick
from torch import Tensor, nn

from normswap import convert
from normswap.calibration import tanh_factors
from normswap.errors import RefusedError
from normswap.graph import inspection
from normswap.layers.dynamic_tanh import DynamicTanh, gain
from normswap.models.calling import Example
from normswap.schemes.dyt import fitting_target
from normswap.surgery import applying, conversion

NARROW: dict[str, dict[str, Any]] = {
    "resnet18": {"channels": (8, 8, 12, 12)},
    "resnetv2_18": {"channels": (8, 8, 12, 12)},
    "mobilenetv2_035": {},
    "densenet121": {"growth_rate": 4, "block_config": (2, 2)},
}


def pictures(count: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(
        count, 3, 64, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


@functools.lru_cache(1)
def network(arch: str) -> nn.Module:
    torch.manual_seed(0)
    return lived_in(
        timm.create_model(arch, num_classes=5, pretrained_cfg_overlay=SMALL_IMAGES, **NARROW[arch]),
        pictures(),
    )


@pytest.mark.slow
@pytest.mark.parametrize("arch", quick(NARROW, ["resnet18"]))
def test_hardly_bent_it_is_the_network(arch: str) -> None:
    """tanh(alpha x) / alpha goes to x: of order alpha^2, whatever stands before the norm, and
    whatever it carries.
    """
    source = network(arch)
    x = pictures(4, 1)
    errors = [
        distance(run(source, x), run(convert(source, "dyt", inputs=x, bend=a).model, x))
        for a in (0.001, 0.0005)
    ]
    assert errors[0] < 1e-3
    assert 3.5 < errors[0] / errors[1] < 4.5


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_one_norm_by_hand(bias: bool, affine: bool) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 6, 3, bias=bias)
    norm = nn.BatchNorm2d(6, affine=affine, eps=0.1)
    source = lived_in(
        nn.Sequential(conv, norm, nn.ReLU(), nn.Conv2d(6, 2, 1)), pictures(4)[..., :9, :9]
    )
    x = pictures(4, 1)[..., :9, :9]
    made: Any = convert(source, "dyt", inputs=x, bend=0.7).model
    first = source[0]
    one = source[1]
    std = (one.running_var + one.eps).sqrt()
    smaller = (
        made[0].weight.flatten(1).norm(dim=1) / first.weight.flatten(1).norm(dim=1) * std
    )  # with long tails

    assert bool((smaller < 1 + 1e-12).all())
    assert bool((smaller < 0.9).any())

    t = torch.linspace(-12, 12, 24001, dtype=torch.float64)
    per = (1, -1, 1, 1)
    bent = (0.7 * smaller.view(per) * t.view(-1, 1, 1, 1)).tanh()
    density = (-t.square() / 2).exp().view(-1, 1, 1, 1)
    factor = (density * t.view(-1, 1, 1, 1) * bent).sum(0, keepdim=True) / (
        density * bent.square()
    ).sum(0, keepdim=True)
    whole = smaller.view(per) * (first(x) - one.running_mean.view(per)) / std.view(per)
    gamma = one.weight.view(per) if affine else 1.0
    beta = one.bias.view(per) if affine else 0.0
    expected = source[3]((factor * gamma * (0.7 * whole).tanh() + beta).relu())

    assert isinstance(made[1], DynamicTanh)
    assert not batchnorms(made)
    assert distance(expected.detach(), run(made, x)) < 1e-12


@pytest.mark.parametrize(("alpha", "most"), [(0.1, 1e-12), (0.5, 1e-9), (2.0, 1e-3)])
def test_the_line_is_the_best(alpha: float, most: float) -> None:
    """E[tanh(alpha u) (u - gain tanh(alpha u))] = 0 over N(0, 1), by Gauss-Hermite quadrature."""
    u, weights = np.polynomial.hermite_e.hermegauss(180)
    bent = np.tanh(alpha * u)
    assert (
        abs((weights * bent * (u - gain(alpha) * bent)).sum() / (weights * bent * u).sum()) < most
    )


@pytest.mark.slow
def test_it_is_a_source_with_images() -> None:
    """As norms with statistics per sample are: each becomes the BatchNorm most like it, which folds
    away.
    """
    source = network("resnet18")
    x = pictures(8, 1)
    bent = convert(source, "dyt", inputs=x, bend=0.025).model
    done = convert(bent, "folded", inputs=x, calibrate=[pictures(32, 3)])
    assert not any(isinstance(module, DynamicTanh) for module in done.model.modules())
    assert distance(run(bent, x), run(done.model, x)) < 0.01


def test_there_must_be_a_norm() -> None:
    seen = inspection.inspect(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).double(), pictures(1))
    with pytest.raises(RefusedError, match="no BatchNorm to replace by a Dynamic Tanh"):
        conversion.plan_step(seen, "dyt")


@pytest.mark.parametrize("target", ["dyt", "affine", "batchnorm", "tune", "frozen-bn"])
def test_layernorms_are_refused_with_the_reason(target: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).eval()
    with pytest.raises(RefusedError, match="statistics of each token, and without those too much"):
        convert(model, target, inputs=torch.randn(4, 8))


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


@pytest.mark.slow
@pytest.mark.parametrize("arch", quick(["resnetv2_18", "mobilenetv2_035"], ["resnetv2_18"]))
def test_other_factors_keep_the_target(arch: str) -> None:
    """The target computes what it did, on leaves and on images, and images come nearer."""
    source = network(arch)
    x = pictures(8, 3)
    step, _ = conversion.plan_step(inspection.inspect(source, x), "dyt", bend=0.7)
    target = applying.apply_step(source, fitting_target(step))
    result = applying.apply_step(source, step)

    found = []
    for batches in ((), calls(x, 3 * pictures(8, 4))):
        pattern = copy.deepcopy(target)
        bent = copy.deepcopy(result)
        tanh_factors.choose_factors(pattern, bent, step, Example((x,)), batches)
        assert distance(run(source, x), run(pattern, x)) < 1e-12
        found.append((distance(run(source, x), run(bent, x)), bent.state_dict()))

    (on_leaves, one), (on_images, two) = found
    assert any(not torch.equal(tensor, two[name]) for name, tensor in one.items())
    assert on_images < on_leaves


@pytest.mark.slow
def test_few_values_do_not_choose_factors() -> None:
    """Of one image less than 16 there are 240 values of a channel."""
    source = network("resnet18")
    x = pictures(15, 3)
    step, _ = conversion.plan_step(inspection.inspect(source, x[:2]), "dyt", bend=0.7)
    target = applying.apply_step(source, fitting_target(step))
    result = applying.apply_step(source, step)
    on_leaves = copy.deepcopy(result)
    tanh_factors.choose_factors(copy.deepcopy(target), on_leaves, step, Example((x,)), ())
    tanh_factors.choose_factors(target, result, step, Example((x,)), calls(x))

    assert all(
        tensor.equal(on_leaves.state_dict()[name]) for name, tensor in result.state_dict().items()
    )
