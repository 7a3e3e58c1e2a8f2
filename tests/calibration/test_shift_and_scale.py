"""Law of shift, scale and order: estimators against NumPy in float64, wherever numbers lie, however they come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from normswap.analysis import signal_propagation
from normswap.calibration import channel_moments, channel_values, sequential_fit
from normswap.calibration.channel_moments import ChannelLine
from normswap.calibration.least_squares import Folds
from normswap.calibration.population import estimate_population
from normswap.calibration.restoring import restore
from normswap.layers.site_norm import SiteNorm
from normswap.surgery.network import Network

Array = npt.NDArray[np.float64]
C = 4


class Shifted(nn.Module):
    """A norm behind a layer that shifts and scales what it reads, in float32."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(C, C, 1), norm
        nn.init.eye_(self.conv.weight.data[:, :, 0, 0])
        nn.init.zeros_(self.conv.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(x))
        return y


def rows(x: Tensor) -> Array:
    """(C, N) in float64."""
    array: Array = x.double().transpose(0, 1).flatten(1).numpy()
    return array


def expected_moments(x: Tensor) -> tuple[Array, Array]:
    return rows(x).mean(1), rows(x).var(1, ddof=1)


def by_measuring(x: Tensor) -> tuple[Any, Any]:
    model = Shifted(nn.BatchNorm2d(C)).eval()
    moments = channel_moments.measure(model, {"norm": model.norm}, x.split(3)).moments["norm"]
    return moments.mean, moments.variance


def by_population(x: Tensor) -> tuple[Any, Any]:
    """In one batch, of which the formula is that of all images."""
    model = Shifted(nn.BatchNorm2d(C)).eval()
    estimate_population(model, [x])
    return model.norm.running_mean, model.norm.running_var


def by_ghosts(x: Tensor) -> tuple[Any, Any]:
    """Each ghost batch is a batch: mean of means, and of unbiased variances."""
    model = Shifted(SiteNorm(C, eps=1e-5, momentum=0.1, ghost=len(x) // 2, act=None)).eval()
    estimate_population(model, [x])
    return model.norm.running_mean, model.norm.running_var


def of_ghosts(x: Tensor) -> tuple[Array, Array]:
    halves = [expected_moments(half) for half in x.split([len(x) // 2, len(x) - len(x) // 2])]
    mean, variance = (np.mean(values, 0) for values in zip(*halves, strict=True))
    return mean, variance


def by_line(x: Tensor) -> tuple[Any, Any]:
    line = ChannelLine(C, torch.device("cpu"))
    for part in x.split(3):
        values = part.double().transpose(0, 1).flatten(1)
        line.add(values, 3 * values + 1)
    mean, variance = line.moments()
    return mean, variance * line.count / (line.count - 1)


def by_folds(x: Tensor) -> tuple[Any, Any]:
    folds = Folds()
    for part in x.split(3):
        patches = part.flatten(2).transpose(1, 2)[:, None]
        folds.add(patches, patches[..., :1])
    total = folds.total()
    return total.means()[0][0], total.covariances()[0][0].diagonal() * total.count / (total.count - 1)


def by_estimating(x: Tensor) -> tuple[Any, Any]:
    """What a norm with statistics per sample becomes."""
    source, result = Shifted(nn.GroupNorm(2, C)).eval(), Shifted(nn.Identity()).eval()
    result.norm = SiteNorm(C, eps=1e-5, momentum=0.1, ghost=0, act=None).eval()
    sequential_fit.refit(source, result, list(x.split(3)), only=lambda path: path == "norm", mirrored=0)
    return result.norm.running_mean, result.norm.running_var


def by_image(x: Tensor) -> tuple[Any, Any]:
    """From each image's moments about what the norm expects."""
    norm = nn.BatchNorm2d(C)
    norm.running_mean.copy_(x.mean((0, 2, 3)) + 0.1 * x.std((0, 2, 3)))  # type: ignore[union-attr]
    means, squares = channel_values.image_moments(norm, x.flatten(2))
    mean = means.mean(0)
    variance = squares.mean(0) - mean.square()
    count = x.numel() / C
    assert norm.running_mean is not None
    return mean + norm.running_mean.double(), variance * count / (count - 1)


def by_restoring(x: Tensor) -> tuple[Any, Any]:
    """A network that gives other numbers gets the moments of one that gives these."""
    source, result = Shifted(nn.Identity()).eval(), Shifted(nn.Identity()).eval()
    with torch.no_grad():
        result.conv.weight *= 1.7
        result.conv.bias += x.std()  # type: ignore[operator]
    restore(result, [source], list(x.split(3)))
    with torch.no_grad():
        y = result.double()(x.double())
    mean, variance = expected_moments(y)
    return mean, variance


ESTIMATORS: dict[str, tuple[Callable[[Tensor], tuple[Any, Any]], Callable[[Tensor], tuple[Array, Array]]]] = {
    "measure": (by_measuring, expected_moments),
    "population": (by_population, expected_moments),
    "ghosts": (by_ghosts, of_ghosts),
    "line": (by_line, expected_moments),
    "folds": (by_folds, expected_moments),
    "estimate": (by_estimating, expected_moments),
    "image moments": (by_image, expected_moments),
    "restore": (by_restoring, expected_moments),
}
HARD = [(1e3, 0.5), (-1e4, 0.5), (0.0, 1e-3), (0.0, 1e3), (2.0, 1e-3), (1e3, 1e3)]


@pytest.mark.parametrize(("shift", "scale"), HARD)
@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=2)
@given(seed=st.integers(0, 100))
def test_mean_and_variance_are_numpys(name: str, shift: float, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    widths = 0.5 + torch.rand(1, C, 1, 1, generator=generator)
    x = shift + scale * widths * torch.randn(10, C, 3, 3, generator=generator)
    estimate, formula = ESTIMATORS[name]
    mean, variance = (torch.as_tensor(value).double().numpy() for value in estimate(x))
    wanted_mean, wanted_variance = formula(x)
    # Float32 holds a number near the mean to a seven-digit share of it, and a variance is stored in as many digits.
    rounding = abs(shift) * 2e-7 + 1e-5 * scale
    np.testing.assert_allclose(mean, wanted_mean, rtol=0, atol=rounding)
    np.testing.assert_allclose(variance, wanted_variance, rtol=2e-3 if name == "restore" else 2e-4)
    order, channels = (torch.randperm(n, generator=generator) for n in (len(x), C))
    if name != "ghosts":
        again = [torch.as_tensor(value).double().numpy() for value in estimate(x[order][:, channels])]
        np.testing.assert_allclose(again[0], mean[channels], rtol=0, atol=rounding)
        np.testing.assert_allclose(again[1], variance[channels], rtol=4e-3 if name == "restore" else 4e-4)


@pytest.mark.parametrize(("shift", "scale"), HARD)
def test_lines_are_numpys(shift: float, scale: float) -> None:
    x = shift + scale * torch.randn(C, 200, generator=torch.Generator().manual_seed(0)).double()
    x[3] = shift
    y = 1e-2 * torch.randn(C, 200, generator=torch.Generator().manual_seed(1)).double() + 3 * x / scale
    line = ChannelLine(C, torch.device("cpu"))
    for part in range(0, 200, 33):
        line.add(x[:, part : part + 33], y[:, part : part + 33])
    slope, offset = line.fitted()
    for channel in range(3):
        wanted = np.polyfit(x[channel].numpy() - shift, y[channel].numpy(), 1)
        assert float(slope[channel]) == pytest.approx(wanted[0], rel=1e-5)
        assert float(offset[channel] + slope[channel] * shift) == pytest.approx(wanted[1], rel=1e-5, abs=1e-5)
    assert float(slope[3]) == 0
    assert float(offset[3]) == pytest.approx(float(y[3].mean()))


@pytest.mark.parametrize(("shift", "scale"), HARD)
def test_the_signal_is_numpys(shift: float, scale: float) -> None:
    """After the sum, and at the end of the branch."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(C, C, 1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.conv(x)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(C, C, 1), Block(), nn.Conv2d(C, 2, 1)).eval()
    x = shift + scale * torch.randn(10, C, 3, 3)
    (point,) = signal_propagation.signal(Network(model, x[:2]), list(x.split(3)))
    with torch.no_grad():
        stem = model[0](x)
        branch = model[1].conv(stem)
        total = stem + branch
    assert point.mean_sq == pytest.approx(float(np.mean(rows(total).mean(1) ** 2)), rel=1e-5)
    assert point.variance == pytest.approx(float(np.mean(rows(total).var(1))), rel=1e-3)
    assert point.branch_variance == pytest.approx(float(np.mean(rows(branch).var(1))), rel=1e-3)
