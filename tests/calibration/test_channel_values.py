"""What images, and images of leaves, make reach a norm: against sums written out."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normswap.calibration import channel_values
from normswap.calibration.natural_noise import leaves
from normswap.models.calling import Example


def network() -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(2)).eval()
    model.pretrained_cfg = {"input_size": (3, 32, 32)}
    return model


def on_leaves(model: Any, size: tuple[int, ...] = (3, 32, 32)) -> Tensor:
    """The moments of the norm's input, (2, N, C)."""
    norms = {"1": model[1]}
    batches = channel_values.dead_leaves(model, Example((torch.randn(2, *size),)), norms)
    return torch.cat(channel_values.observed(model, norms, batches, channel_values.image_moments)["1"], 1)


def test_leaves_are_as_loud_as_the_first_norm_expects() -> None:
    model = network()
    norm = model[1]
    norm.running_var.copy_(9 * model[0](leaves(64, (3, 32, 32), 0)).square().mean((0, 2, 3)).detach())
    seen = on_leaves(model)
    share = float(seen[1].mean(0).sum() / norm.running_var.double().sum())
    assert 0.5 < share < 2


def test_no_image_of_leaves_is_shown_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Tensor] = []

    def noted(count: int, size: list[int], seed: int) -> Tensor:
        shown.append(leaves(count, size, seed))
        return shown[-1]

    monkeypatch.setattr(channel_values, "leaves", noted)
    model = network()
    on_leaves(model)
    images = torch.cat([batch for batch in shown if len(batch) == channel_values.BATCH])
    assert len(images.flatten(1).unique(dim=0)) == channel_values.COUNT


@pytest.mark.parametrize("size", [(3, 64, 64), (3, 24, 40)])
def test_leaves_are_as_large_as_the_images_that_are_given(
    size: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record at the smaller size of two is no wish: the network's own size is taken then."""
    shown: list[list[int]] = []
    monkeypatch.setattr(
        channel_values, "leaves", lambda count, size, seed: shown.append([*size]) or leaves(count, size, seed)
    )
    model = network()
    model.pretrained_cfg = {"input_size": (3, 72, 72)}
    on_leaves(model, size)
    assert {*map(tuple, shown)} == {(3, 72, 72) if size == (3, 64, 64) else size}
