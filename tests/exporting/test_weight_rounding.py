"""Weights rounded one after another: against GPTQ as its paper writes it, and against each rounded for itself."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tiny import C, conv
from torch import Tensor, nn

from normswap.calibration.natural_noise import pink
from normswap.errors import SourceError
from normswap.exporting import weight_rounding
from normswap.exporting.weight_grid import WeightGrid
from normswap.exporting.weight_rounding import Rounded
from normswap.layers.planned_layer import Linearity

LEVELS = 8.0
DAMP = 0.01


def images(count: int = 16) -> Tensor:
    """Of C channels, smooth and mostly positive, as those in a network are."""
    return F.avg_pool2d(pink(count, (C, 18, 18), 0), 3, 1) + 1


def found(layer: nn.Module, x: Tensor, *, levels: float = LEVELS, per_channel: bool = True) -> Rounded:
    return weight_rounding.weights(nn.Sequential(layer), x.split(4), ["0"], grid(levels, per_channel))["0"]


def grid(levels: float = LEVELS, per_channel: bool = True) -> WeightGrid:
    return WeightGrid(lambda _: levels, per_channel)


def error(layer: Linearity, weight: Tensor, x: Tensor) -> float:
    """Of what the layer gives with these weights, less the mean, which the bias mends; relative."""

    def gives(own: Tensor) -> Tensor:
        twin = type(layer)(*_made(layer)).to(x)
        twin.load_state_dict({"weight": own} | ({"bias": layer.bias.detach()} if layer.bias is not None else {}))
        return twin(x).detach()

    expected = gives(layer.weight.detach())
    over = (0, 1) if isinstance(layer, nn.Linear) else (0, 2, 3)
    off = gives(weight) - expected
    return float((off - off.mean(over, keepdim=True)).norm() / expected.norm())


def _made(layer: Linearity) -> tuple[object, ...]:
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return (layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding, layer.dilation,
            layer.groups, layer.bias is not None)  # fmt: skip


LAYERS = {
    "plain": lambda: conv(), "depthwise": lambda: conv(groups=C), "grouped": lambda: conv(groups=2),
    "strided": lambda: conv(stride=2), "dilated": lambda: nn.Conv2d(C, C, 3, dilation=2, bias=False),
    "linear": lambda: nn.Linear(16, 5),
}  # fmt: skip


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("kind", list(LAYERS))
def test_less_is_lost_than_by_rounding_each_for_itself(kind: str, per_channel: bool) -> None:
    """On images that were not looked at."""
    torch.manual_seed(0)
    layer, x = LAYERS[kind](), images(32)
    one = found(layer, x[:16], per_channel=per_channel)
    nearest = error(layer, grid(per_channel=per_channel).rounded(layer), x[16:])
    assert error(layer, one.held, x[16:]) < 0.75 * nearest


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("levels", [8.0, 7.5])
def test_the_tool_finds_the_weights_again(levels: float, per_channel: bool) -> None:
    """What is given lies on the tool's own grid, whose step is as it was."""
    torch.manual_seed(0)
    layer = conv(groups=2)
    before = grid(levels, per_channel).steps(layer)
    one = found(layer, images(), levels=levels, per_channel=per_channel)
    with torch.no_grad():
        layer.weight.copy_(one.given)
    assert torch.equal(grid(levels, per_channel).steps(layer), before)
    assert torch.allclose(grid(levels, per_channel).rounded(layer), one.held, atol=1e-6)
    numbers = one.held / before
    assert float((numbers - numbers.round()).abs().max()) < 1e-4
    assert not torch.allclose(one.held, grid(levels, per_channel).rounded(conv(groups=2)))


def gptq(weight: Tensor, covariance: Tensor, step: Tensor, levels: float) -> Tensor:
    """Algorithm 1 of arXiv:2210.17323, in float64, in the order of falling variances: by the Cholesky root of the
    inverse, changing all weights that are left after each. What is `levels` steps from 0 stays."""
    order = covariance.diagonal().argsort(descending=True)
    left, step = weight[:, order].double(), step.double()
    fixed = left.abs() > (levels - 1e-4) * step[:, None]
    damped = covariance + DAMP * covariance.diagonal().mean() * torch.eye(len(covariance)).double()
    root = torch.linalg.cholesky(torch.linalg.inv(damped[order][:, order]), upper=True)
    out = torch.empty_like(left)
    for i in range(len(order)):
        number = (left[:, i] / step + 0.5).floor().clamp(-math.floor(levels), math.floor(levels))
        out[:, i] = torch.where(fixed[:, i], weight[:, order[i]].double(), number * step)
        left[:, i:] -= ((left[:, i] - out[:, i]) / root[i, i])[:, None] * root[i, i:]
    return torch.empty_like(out).scatter_(1, order.expand_as(out), out)


@pytest.mark.parametrize("parts", [1, 4])
def test_it_is_gptq(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every place is seen, in blocks of columns; of wide patches, part by part."""
    torch.manual_seed(0)
    monkeypatch.setattr(weight_rounding, "_ROWS", 10**6)
    monkeypatch.setattr(weight_rounding, "_BLOCK", 7)
    monkeypatch.setattr(weight_rounding, "_WIDEST", 9 * C // parts)
    layer, x = nn.Conv2d(C, 2 * C, 3, bias=False), images(8)
    rows = F.unfold(x, 3).transpose(1, 2).flatten(0, 1).double()
    covariance = (rows - rows.mean(0)).T @ (rows - rows.mean(0)) / len(rows)
    step = grid().steps(layer).flatten()
    expected = [
        gptq(layer.weight.detach().flatten(1)[:, own], covariance[own][:, own], step, LEVELS)
        for own in torch.arange(9 * C).tensor_split(parts)
    ]
    assert torch.allclose(found(layer, x).held.flatten(1).double(), torch.cat(expected, 1), atol=1e-5)


def test_layers_that_stay_and_those_without_patches() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(conv(), nn.ConvTranspose2d(C, 6, 2), nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect"))
    one = weight_rounding.weights(network, [images(4)], ["1", "2"], grid())
    assert list(one) == ["1", "2"]
    for path, layer in (("1", network[1]), ("2", network[2])):
        assert torch.equal(one[path].given, layer.weight.detach())  # type: ignore[arg-type]
        assert torch.equal(one[path].held, grid().rounded(layer))  # type: ignore[arg-type]


def test_what_overflows_is_named() -> None:
    network = nn.Sequential(conv())
    with pytest.raises(SourceError, match="0 cannot be rounded: the covariance is not finite"):
        weight_rounding.weights(network, [images(4) * 1e22], ["0"], grid())
