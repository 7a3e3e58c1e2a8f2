"""Law of shift, scale and order: estimators against NumPy in float64, wherever numbers lie, however
they come.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.hand_written_networks import Branch
from torch import Tensor, nn

from normswap.analysis import block_signals
from normswap.calibration import channel_moments, channel_values, sequential_fit
from normswap.calibration.channel_moments import ChannelLine
from normswap.calibration.least_squares import Folds
from normswap.calibration.population import estimate_population
from normswap.calibration.restoring import restore
from normswap.layers.site_norm import SiteNorm
from normswap.surgery.network import Network

C = 4
Moments = tuple[Any, Any]


class Behind(nn.Module):
    """A norm behind a convolution that passes on what it reads, in float32."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(C, C, 1)
        self.norm = norm
        nn.init.dirac_(self.conv.weight)
        nn.init.zeros_(self.conv.bias)  # type: ignore[arg-type]
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(x))
        return y


def ghosts(count: int) -> Any:
    return SiteNorm(C, eps=1e-5, momentum=0.1, ghost=count, act=None)


def rows(x: Tensor) -> Any:
    return x.double().transpose(0, 1).flatten(1).numpy()


def by_numpy(x: Tensor) -> Moments:
    return rows(x).mean(1), rows(x).var(1, ddof=1)


def by_measuring(x: Tensor) -> Moments:
    model = Behind(nn.BatchNorm2d(C))
    moments = channel_moments.measure(model, {"norm": model.norm}, x.split(3)).moments["norm"]
    return moments.mean, moments.variance


def by_population(norm: nn.Module, x: Tensor) -> Moments:
    model = Behind(norm)
    estimate_population(model, [x])
    return model.norm.running_mean, model.norm.running_var


def by_folds(x: Tensor) -> Moments:
    folds = Folds()
    for part in x.split(3):
        patches = part.flatten(2).transpose(1, 2)[:, None]
        folds.add(patches, patches[..., :1])
    total = folds.total()
    count = float(total.count)
    return total.means()[0][0], total.covariances()[0][0].diagonal() * count / (count - 1)


def by_estimating(x: Tensor) -> Moments:
    """What a norm with statistics per sample becomes."""
    source = Behind(nn.GroupNorm(2, C))
    result = Behind(ghosts(0))
    sequential_fit.refit(
        source, result, list(x.split(3)), only=lambda path: path == "norm", mirrored=0
    )
    return result.norm.running_mean, result.norm.running_var


def by_image(x: Tensor) -> Moments:
    """From each image's moments."""
    moments = channel_values.image_moments(nn.Identity(), x.flatten(2))
    mean, square = moments.mean(1)
    count = x.numel() / C
    return mean, (square - mean.square()) * count / (count - 1)


@torch.no_grad()
def by_restoring(x: Tensor) -> Moments:
    """A network that gives other numbers gets the moments of one that gives these."""
    source = Behind(nn.Identity())
    result = Behind(nn.Identity())
    result.conv.weight *= 1.7
    result.conv.bias += x.std()  # type: ignore[operator]
    restore(result, [source], list(x.split(3)))
    return by_numpy(result.double()(x.double()))


def of_ghosts(x: Tensor) -> Moments:
    """Each ghost batch is a batch, what is left joins the last: the mean of means, and of unbiased
    variances, each counted by its images.
    """
    sizes = [4, 6]
    means, variances = zip(*map(by_numpy, x.split(sizes)), strict=True)
    return np.average(means, 0, sizes), np.average(variances, 0, sizes)


ESTIMATORS: dict[str, tuple[Callable[[Tensor], Moments], Callable[[Tensor], Moments]]] = {
    "measure": (by_measuring, by_numpy),
    "population": (lambda x: by_population(nn.BatchNorm2d(C), x), by_numpy),
    "ghosts": (lambda x: by_population(ghosts(4), x), of_ghosts),
    "folds": (by_folds, by_numpy),
    "estimate": (by_estimating, by_numpy),
    "image moments": (by_image, by_numpy),
    "restore": (by_restoring, by_numpy),
}
HARD = [(1e3, 0.5), (-1e4, 0.5), (0.0, 1e-3), (0.0, 1e3), (2.0, 1e-3), (1e3, 1e3)]
hard = pytest.mark.parametrize(("shift", "scale"), HARD)


@pytest.mark.one_in(3)
@hard
@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=2)
@given(seed=st.integers(0, 100))
def test_mean_and_variance_are_numpys(name: str, shift: float, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    widths = 0.5 + torch.rand(1, C, 1, 1, generator=generator)
    x = shift + scale * widths * torch.randn(10, C, 3, 3, generator=generator)
    estimate, formula = ESTIMATORS[name]

    order = torch.arange(10) if name == "ghosts" else torch.randperm(10, generator=generator)
    for images in (x, x[order][:, torch.randperm(C, generator=generator)]):
        mean, variance = (torch.as_tensor(value).double().numpy() for value in estimate(images))
        wanted_mean, wanted_variance = formula(images)
        # Float32 holds seven digits of a number, and by so much a mean may be off.
        np.testing.assert_allclose(mean, wanted_mean, rtol=0, atol=abs(shift) * 2e-7 + 1e-5 * scale)
        np.testing.assert_allclose(
            variance, wanted_variance, rtol=2e-3 if name == "restore" else 2e-4
        )


@hard
def test_lines_are_numpys(shift: float, scale: float) -> None:
    x = shift + scale * torch.randn(C, 200, generator=torch.Generator().manual_seed(0)).double()
    x[3] = shift
    y = (
        1e-2 * torch.randn(C, 200, generator=torch.Generator().manual_seed(1)).double()
        + 3 * x / scale
    )
    line = ChannelLine(C, torch.device("cpu"))
    for part, target in zip(x.split(33, 1), y.split(33, 1), strict=True):
        line.add(part, target)

    slope, offset = line.fitted()
    for channel in range(3):
        wanted = np.polyfit(x[channel].numpy() - shift, y[channel].numpy(), 1)
        assert float(slope[channel]) == pytest.approx(wanted[0], rel=1e-5)
        assert float(offset[channel] + slope[channel] * shift) == pytest.approx(
            wanted[1], rel=1e-5, abs=1e-5
        )

    assert (float(slope[3]), float(offset[3])) == (0, pytest.approx(float(y[3].mean())))

    constant = ChannelLine(1, torch.device("cpu"))
    constant.add(torch.full((1, 999), 1e3 / 7).double(), torch.zeros(1, 999).double())
    assert constant.moments()[1].item() >= 0


@hard
def test_the_signal_is_numpys(shift: float, scale: float) -> None:
    """After the sum, and at the end of the branch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(C, C, 1), Branch(), nn.Conv2d(C, 2, 1)).eval()
    x = shift + scale * torch.randn(10, C, 3, 3)
    (point,) = block_signals.signal_propagation(Network(model, x[:2]), list(x.split(3)))

    with torch.no_grad():
        stem = model[0](x)
        branch = model[1].bn(model[1].conv(stem))  # type: ignore[union-attr, operator]

    assert point.mean_sq == pytest.approx(
        float(np.mean(rows(stem + branch).mean(1) ** 2)), rel=1e-6
    )
    assert point.variance == pytest.approx(float(np.mean(rows(stem + branch).var(1))), rel=1e-6)
    assert point.branch_variance == pytest.approx(float(np.mean(rows(branch).var(1))), rel=1e-6)
