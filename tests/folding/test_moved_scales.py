"""Law: a scale that moves through a ReLU keeps the function, however small, in every dtype."""

import pytest
import torch
from support.lived_in_networks import distance, run
from torch import Tensor, nn

import normswap
from normswap.layers.channelwise import ChannelAffine, ChannelBias
from normswap.sites import affine

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Scales of one channel each: 0 of either sign, then from 1e-44 to 100, also of either sign.
EXPONENTS = [*range(-44, -8, 4), *range(-8, 3)]
SCALES = [0.0, -0.0, *(sign * 10.0**exponent for exponent in EXPONENTS for sign in (1, -1))]
SHIFTS = (0.0, 1e-30, 1e-3, -1.0, 30.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", SHIFTS)
def test_a_split_map_is_the_same_map(shift: float, dtype: torch.dtype) -> None:
    """What a channel of sign 0 leaves out is no more than the rounding of its dtype."""
    scales = torch.tensor(SCALES, dtype=torch.float64)
    shifts = torch.full_like(scales, shift)
    x = torch.linspace(-4, 4, 41, dtype=torch.float64)[:, None]

    magnitude, sign, moved = affine.split(ChannelAffine(scales, shifts), dtype)

    split = magnitude * torch.relu(sign * x + moved)
    error = (split - torch.relu(scales * x + shifts)).abs()
    assert bool((error <= torch.finfo(dtype).eps * x.abs() * (1 + abs(shift)) + 1e-13).all())

    # The convolution multiplies by the magnitude, and the layer that stays adds the shift to x.
    info = torch.finfo(dtype)
    assert bool((magnitude >= info.tiny).all())
    assert bool((moved.abs() + 4 <= info.max / 4).all())


class Moving(nn.Module):
    """A norm that no convolution before it absorbs, and a padded convolution behind its ReLU."""

    def __init__(self, gammas: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        channels = len(gammas)
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, 8, 3, padding=1)
        self.norm.weight.data.copy_(gammas)
        self.norm.bias.data.normal_()
        # A beta of 0 under a gamma of 0 is a channel of zeros.
        self.norm.bias.data[-1] = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.conv(torch.relu(self.norm(x)))
        return torch.cat([x, y], 1).flatten(1)


GAMMAS = {
    "zeros": [1, 0, 0.5, 2, -0.0, 1, 0.3, 0],
    "either sign": [1, -2, 0.5, -0.3, 1, -1, 2, 0],
    "small": [1, 0.05, 0.01, -0.03, 1e-3, 1e-5, -1e-7, 1e-30],
    "no number of float32": [1, 1e-44, 1, -1e-40, 1, 1, 1, 0],
}


@pytest.mark.parametrize("gammas", GAMMAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_scale_moves_whatever_it_is(dtype: torch.dtype, gammas: str) -> None:
    model = Moving(torch.tensor(GAMMAS[gammas])).eval()
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    expected = run(model.double(), images)
    model, x = model.to(dtype), images.to(dtype)

    # An error is raised if the result is wrong in float64, or worse than its dtype explains.
    result = normswap.convert(model, "folded", inputs=x).model

    assert isinstance(result.norm, ChannelBias)
    assert distance(expected, run(result, x).double()) <= 10 * torch.finfo(dtype).eps + 1e-7


@pytest.mark.parametrize("gammas", GAMMAS)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_a_norm_in_float32_beside_layers_in_half_precision(half: torch.dtype, gammas: str) -> None:
    """As apex and others leave them: what is too small for one dtype may not be for the other."""
    model = Moving(torch.tensor(GAMMAS[gammas])).eval()
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    expected = run(model.double(), images)
    model, x = model.to(half), images.to(half)
    model.norm.float()

    result = normswap.convert(model, "folded", inputs=x).model

    assert distance(expected, run(result, x).double()) <= 10 * torch.finfo(half).eps
