"""Where a convolution's channels are after a step, against what changes with one of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.tiny_modules import C, Net, conv, net
from torch import Tensor, nn

from normswap.folding.plan_builder import PlanBuilder
from normswap.graph import inspection
from normswap.graph.channel_axes import Axis
from normswap.graph.tracing import inputs

# The number of channels; maps are 8 by 8, in two samples.
WIDE = 6

Step = Callable[[Tensor], Tensor]
# A step on maps (N, C, H, W), and whether the channels are followed through it.
STEPS: dict[str, tuple[Step, bool]] = {
    "nothing": (lambda y: y, True),
    "tokens": (lambda y: y.flatten(2).transpose(1, 2), True),
    "channels last": (lambda y: y.permute(0, 2, 3, 1), True),
    "windows": (
        lambda y: (
            y.unflatten(2, (-1, 4)).unflatten(4, (-1, 4)).permute(0, 2, 4, 3, 5, 1).flatten(0, 2)
        ),
        True,
    ),
    "heads": (lambda y: y.flatten(2).transpose(1, 2).unflatten(2, (2, 3)), True),
    "heads, a dimension each": (
        lambda y: y.flatten(2).transpose(1, 2).unflatten(2, (2, 3)).permute(2, 0, 1, 3),
        False,
    ),
    "a row of all": (lambda y: y.flatten(1), True),
    "rolled": (lambda y: y.roll(1, 2), True),
    "rolled over the channels": (lambda y: y.roll(1, 1), False),
    "padded": (lambda y: F.pad(y, (1, 1)), True),
    "padded with channels": (lambda y: F.pad(y, (0, 0, 0, 0, 1, 1)), False),
    "averaged": (lambda y: y.mean((2, 3)), True),
    "averaged over the channels": (lambda y: y.mean(1), False),
    "cut": (lambda y: y[:, :, 1:3], True),
    "some channels": (lambda y: y[:, :3], False),
    "every other channel": (lambda y: y[:, ::2], False),
    "one of the samples": (lambda y: y[0], True),
    "split over the channels": (lambda y: y.chunk(2, 1)[1], False),
    "unbound": (lambda y: y.unbind(3)[2], True),
    "joined over the places": (lambda y: torch.cat([y, y], 2), True),
    "joined over the channels": (lambda y: torch.cat([y, y], 1), True),
    "stacked": (lambda y: torch.stack([y, y], 1), True),
    "pooled": (lambda y: F.avg_pool2d(y, 2), True),
    "pooled to a size": (lambda y: F.adaptive_avg_pool2d(y, 3), True),
    "enlarged": (lambda y: F.interpolate(y, scale_factor=2.0), True),
    "expanded": (lambda y: y[:, :, None].expand(-1, -1, 3, -1, -1), True),
    "repeated channels": (lambda y: y.repeat(1, 2, 1, 1), True),
    "a sum": (lambda y: y + 2 * y, True),
    "a sum with a neighbour": (lambda y: y + y.roll(1, 3), True),
    "a sum with other channels": (lambda y: y + y.roll(1, 1), False),
    "a sum over a mean": (lambda y: y + y.mean((2, 3), keepdim=True), True),
    "halves turned": (lambda y: torch.cat([y[:, 3:], y[:, :3]], 1), False),
    "a square": (lambda y: y * y, False),
    "a product": (lambda y: y * y.roll(1, 3), False),
    "a number times": (lambda y: 2 * y, True),
    "an activation": (lambda y: y.sigmoid(), False),
}


def moved(step: Step) -> tuple[int | None, bool]:
    """The dimension that holds the channels alone, and whether each element belongs to a channel.

    One channel after the other is changed: the elements that change belong to it.
    """
    y = torch.rand(2, WIDE, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    changed = []
    for channel in range(WIDE):
        other = y.clone()
        other[:, channel] += 1
        changed.append(step(other) != step(y))

    alone: int | None = None
    for dim, size in enumerate(changed[0].shape):
        if size == WIDE and _is_diagonal([part.movedim(dim, 0) for part in changed]):
            alone = dim

    return alone, bool(torch.stack(changed).any(0).all())


def _is_diagonal(changed: list[Tensor]) -> bool:
    """Whether a change of channel i changes nothing but row i."""
    for channel, part in enumerate(changed):
        if part[torch.arange(WIDE) != channel].any():
            return False
    return True


@pytest.mark.parametrize("name", STEPS)
def test_channels_are_where_a_change_of_them_shows(name: str) -> None:
    step, known = STEPS[name]
    model = net(lambda m, x: step(m.conv(x)), conv=lambda: conv(out=WIDE))()
    anatomy = inspection.inspect(model, torch.randn(2, C, 8, 8))
    (last,) = inputs(anatomy.traced.nodes[-1])
    axis = PlanBuilder(anatomy).axes.get(last)
    assert (axis is not None) is known
    if axis is not None:
        assert axis.size == WIDE
        assert (axis.dim, axis.pure) == moved(step)
        assert axis.last is (axis.dim == len(last.meta["shape"]) - 1)


# The shape of a parameter that maps (2, 6, 7, 7) are added to or multiplied by, and whether each of
# its numbers belongs to one channel.
PARAMETERS: dict[str, tuple[tuple[int, ...], bool]] = {
    "a number per channel": ((WIDE, 1, 1), True),
    "a number per channel and place": ((WIDE, 7, 7), True),
    "the same with a dimension for samples": ((1, WIDE, 7, 7), True),
    "a number per place": ((7, 7), False),
    "a number per column": ((7,), False),
}


@pytest.mark.parametrize("operation", [torch.add, torch.mul])
@pytest.mark.parametrize("name", PARAMETERS)
def test_channels_stay_apart_beside_a_parameter_that_has_them_too(
    name: str, operation: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """The maps are odd, so that no stride divides the number of channels by accident."""
    shape, known = PARAMETERS[name]
    numbers = nn.Parameter(torch.rand(shape))
    model = Net(lambda m, x: operation(m.conv(x), m.numbers), conv=conv(out=WIDE))
    model.numbers = numbers
    anatomy = inspection.inspect(model, torch.randn(2, C, 7, 7))
    (last,) = inputs(anatomy.traced.nodes[-1])

    axis = PlanBuilder(anatomy).axes.get(last)

    assert axis == (Axis(WIDE, dim=1, last=False, pure=True) if known else None)


# How wide the padding is, of the side that is padded: nothing at 8.
WIDTHS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "to a multiple of 4": lambda side: (0, -side % 4),
    "on both sides": lambda side: (side % 2, side % 2),
    "below": lambda side: (0, 0, 0, -side % 4),
    "before the channels": lambda side: (side % 4, 0, 0, side % 4),
}


@pytest.mark.parametrize("flexible", [True, False])
@pytest.mark.parametrize("name", WIDTHS)
def test_a_padding_may_be_more_at_other_sizes(name: str, flexible: bool) -> None:
    """Only of a network that takes one size is it known that nothing is padded."""

    def forward(m: Any, x: Tensor) -> Tensor:
        if not flexible and x.shape[-1] != 8:
            raise ValueError("images are 8 by 8")
        return F.pad(m.conv(x), WIDTHS[name](x.shape[-1]))

    model = net(forward, conv=lambda: conv(out=WIDE))()
    anatomy = inspection.inspect(model, torch.randn(2, C, 8, 8))
    (last,) = inputs(anatomy.traced.nodes[-1])

    axis = PlanBuilder(anatomy).axes.get(last)

    assert anatomy.traced.flexible is flexible
    assert axis is not None
    assert axis.pure is not flexible
