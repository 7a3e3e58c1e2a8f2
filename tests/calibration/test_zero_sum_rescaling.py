"""Rescaling before filters that must sum to zero: its losses against constrained least squares, and
what it gains.
"""

import copy
from typing import Any

import numpy as np
import pytest
import timm
import torch
from support.lived_in_networks import distance, lived_in, run
from support.sampled_tables import quick
from torch import Tensor, nn

from normswap.calibration import zero_sum_rescaling
from normswap.calibration.zero_sum_rescaling import Loss
from normswap.folding.channel_factors import FIXED
from normswap.layers.standardized import effective_weight
from normswap.surgery import conversion


def pictures(count: int, seed: int = 0) -> Tensor:
    """Smooth ones, so that places next to each other go together."""
    noise = torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
    return nn.functional.avg_pool2d(noise, 3, 1, 1) * 3


def network() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(
        "resnet18",
        num_classes=10,
        channels=(8, 16, 24, 32),
        layers=(1, 1, 1, 1),
        pretrained_cfg_overlay={"input_size": (3, 32, 32)},
    )
    return lived_in(model, pictures(8, 1).double()).float()


def standardized(model: nn.Module, **options: Any) -> nn.Module:
    """With every mean kept: it computes what `model` does."""
    return conversion.convert(model, "nf", inputs=pictures(2), mean="keep", **options).model


def second(path: str, module: nn.Module) -> bool:
    return path.endswith("conv2")


@torch.no_grad()
@pytest.mark.parametrize(("groups", "kernel"), [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_what_a_layer_loses_is_constrained_least_squares(groups: int, kernel: int) -> None:
    """Filter by filter: the correction, the same in all places, that makes the sum of w / f zero
    and moves least.
    """
    torch.manual_seed(0)
    conv = nn.Conv2d(6, 4, kernel, groups=groups).double()
    x = torch.randn(40, 6, 12, 12).double() @ torch.randn(12, 12).double() + torch.rand(6, 1, 1)
    x[:, 1] += x[:, 0]
    x[10:] += 5 * torch.rand(6, 1, 1)  # not what the first batch leads to expect
    seen = zero_sum_rescaling._Moments()
    for part in x.split(10):
        seen.look(conv, (part,), conv(part))
    logs = torch.randn(3).double() / 2
    logs[FIXED] = 0
    reads = torch.tensor([0, 1, 2, 2, 1, 0])
    found, _ = seen.loss(conv, reads).measured(logs.numpy())

    sums = (
        nn.functional.conv2d(x, torch.ones(6, 1, kernel, kernel).double(), groups=6)
        .transpose(0, 1)
        .flatten(1)
    )
    own = conv.weight.flatten(2).sum(2).numpy()
    width = 6 // groups
    lost = 0.0
    for o in range(4):
        at = slice(o // (4 // groups) * width, (o // (4 // groups) + 1) * width)
        spread = np.cov(sums[at].numpy(), bias=True)
        u = np.exp(-logs[reads].double().numpy()[at])
        # minimize d' spread d where kernel^2 u'd = u's
        system = np.block([[2 * spread, u[:, None]], [u[None], np.zeros((1, 1))]])
        d = np.linalg.solve(system, np.append(np.zeros(width), u @ own[o] / kernel**2))[:width]
        lost += d @ spread @ d
    variance = float(conv(x).transpose(0, 1).flatten(1).var(1, correction=0).sum())
    assert found == pytest.approx(
        lost / variance, rel=0.05
    )  # of some places, and a little is taken for chance


def test_the_gradient_is_that_of_the_loss() -> None:
    torch.manual_seed(0)
    tables = [
        table @ table.transpose(1, 2) + torch.eye(3) for table in torch.randn(2, 2, 3, 3).double()
    ]
    loss = Loss(torch.tensor([0, 1, 1, 2, 3, 4]), tables[0], tables[1], 2.0)
    logs = torch.randn(5).double()
    _, by_channel = loss.measured(logs.numpy())
    found = torch.zeros(5).double().index_add(0, loss.reads, torch.from_numpy(by_channel))

    for factor in range(5):
        step = torch.zeros(5).double()
        step[factor] = 1e-6
        above, below = (loss.measured((logs + sign * step).numpy())[0] for sign in (1, -1))
        assert float(found[factor]) == pytest.approx((above - below) / 2e-6, rel=1e-6)


def test_the_channel_that_tells_nothing_carries_the_sum() -> None:
    """The third of four channels is silent, so u is largest there, and no other one goes far."""
    spread = torch.diag(torch.tensor([1.0, 1.0, 1e-4, 1.0]))
    sums = torch.full((4, 4), 3.0)
    found = zero_sum_rescaling.factors(
        [Loss(torch.tensor([1, 2, 3, FIXED]), sums[None], spread.inverse()[None], 1.0)], 5
    )
    assert float(found[FIXED]) == 1
    assert float(found[3]) < 0.8 * float(found[1])
    assert float(found[1]) == pytest.approx(float(found[2]), rel=1e-4)
    assert float(found[4]) == pytest.approx(1, abs=1e-6)  # nobody reads it
    assert float(found.log().abs().max()) <= zero_sum_rescaling.FARTHEST + 1e-6
    assert torch.equal(zero_sum_rescaling.factors([], 3), torch.ones(3))


def test_scaled_the_pattern_computes_the_same_and_the_result_in_its_units() -> None:
    model = network()
    pattern = standardized(model).double()
    result = copy.deepcopy(pattern)
    x = pictures(4, 2).double()
    reference = run(pattern, x)
    seen = []

    def must(path: str, module: nn.Module) -> bool:
        seen.append(module is result.get_submodule(path))
        return second(path, module)

    factors = zero_sum_rescaling.rescale(
        pattern, result, [(pictures(20).double(), torch.zeros(20))], must
    )
    assert all(seen)
    assert distance(reference, run(pattern, x)) < 1e-13
    assert distance(reference, run(result, x)) < 1e-13
    assert all(
        torch.equal(a, b) for a, b in zip(pattern.parameters(), result.parameters(), strict=True)
    )
    before, after = (
        effective_weight(one.get_submodule("layer1.0.conv1")).detach().flatten(1).norm(dim=1)
        for one in (standardized(model).double(), pattern)
    )
    alive = before > 0
    reads = factors["layer1.0.conv2"].double()
    assert torch.allclose(after[alive] / before[alive], reads[alive], rtol=1e-5)
    assert float(reads.max() / reads.min()) > 1.5
    assert set(factors) == {f"layer{i}.0.conv2" for i in range(1, 5)}


def test_few_images_scale_nothing() -> None:
    pattern = standardized(network())
    result = copy.deepcopy(pattern)
    before = {name: t.clone() for name, t in pattern.state_dict().items()}
    few = list(pictures(zero_sum_rescaling.ENOUGH - 1).split(5))
    assert zero_sum_rescaling.rescale(pattern, result, few, second) == {}
    for network_ in (pattern, result):
        assert all(torch.equal(before[name], t) for name, t in network_.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("to", quick(["nf", "centered-weightnorm"], ["nf"]))
def test_zero_sum_filters_lose_less_when_rescaled(to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    x = pictures(32, 5)
    data = list(pictures(128, 3).split(32))
    found = []
    for rescale in (zero_sum_rescaling.rescale, lambda *_: {}):
        monkeypatch.setattr(zero_sum_rescaling, "rescale", rescale)
        done = conversion.convert(model, to, inputs=x, calibrate=iter(data), seed=3)
        found.append(distance(run(model, x), run(done.model, x)))
    assert found[0] < 0.7 * found[1]
