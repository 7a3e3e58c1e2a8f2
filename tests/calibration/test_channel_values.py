"""What images, and images of leaves, make reach a norm: against sums written out."""

from __future__ import annotations

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


def on_leaves(model: Any, size: tuple[int, ...] = (3, 32, 32)) -> dict[str, channel_values.Moments]:
    example = Example((torch.randn(2, *size),))
    watched = channel_values.watched_on_leaves(model, example, {"1": model[1]}, channel_values.watching_moments)
    return channel_values.joined(watched)


def test_moments_are_those_of_each_image_about_the_running_mean() -> None:
    norm, x = nn.BatchNorm2d(4).double().eval(), torch.randn(5, 4, 3, 3).double()
    nn.init.normal_(norm.running_mean)
    with channel_values.watching_moments({"norm": norm}) as seen:
        norm(x)
    ((mean, square),) = seen["norm"]
    about = x - norm.running_mean.view(-1, 1, 1)
    assert torch.allclose(mean, about.mean((2, 3)))
    assert torch.allclose(square, about.square().mean((2, 3)))


def test_norms_that_saw_what_is_not_finite_are_left_out() -> None:
    good, bad = torch.ones(2, 3), torch.tensor([[1.0, float("inf"), 1.0]])
    seen = channel_values.joined({"good": [(good, good), (good, good)], "bad": [(good, good), (bad, bad)]})
    assert [*seen] == ["good"]
    assert seen["good"][0].shape == (4, 3)


def test_leaves_are_as_loud_as_the_first_norm_expects() -> None:
    model = network()
    norm = model[1]
    norm.running_var.copy_(9 * model[0](leaves(64, (3, 32, 32), 0)).square().mean((0, 2, 3)).detach())
    seen = on_leaves(model)
    share = float(seen["1"][1].mean(0).sum() / norm.running_var.double().sum())
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
    model.pretrained_cfg = {"input_size": (3, 100, 100)}
    on_leaves(model, size)
    assert {*map(tuple, shown)} == {(3, 100, 100) if size == (3, 64, 64) else size}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_cpu_leaves_run_through_half_precision_in_float32(dtype: torch.dtype) -> None:
    """A copy of the network: its own values stay, and the figures are float32's but for what rounding weights does."""
    model, whole = network().to(dtype), network()
    dtypes: list[torch.dtype] = []
    forward = nn.Conv2d.forward

    def noted(self: nn.Conv2d, x: Tensor) -> Tensor:
        dtypes.append(x.dtype)
        return forward(self, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Conv2d, "forward", noted)
        batch = Example((torch.zeros(2, 3, 32, 32),))
        seen = channel_values.watched_on_leaves(model, batch, {"1": model[1]}, channel_values.watching_moments, 64)
    assert {*dtypes} == {torch.float32}
    assert model[0].weight.dtype == dtype
    expected = channel_values.watched_on_leaves(whole, batch, {"1": whole[1]}, channel_values.watching_moments, 64)
    for one, two in zip(seen["1"][0], expected["1"][0], strict=True):
        assert torch.allclose(one, two, rtol=0.02, atol=0.02 * float(two.abs().max()))


def test_the_size_of_the_first_batch_is_enough() -> None:
    """The network is not recorded for that: it runs on leaves alone."""
    model = network()
    calls: list[int] = []
    model.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))
    batch = Example((torch.zeros(2, 3, 24, 40),))
    seen = channel_values.watched_on_leaves(model, batch, {"1": model[1]}, channel_values.watching_moments, 64)
    assert len(seen["1"][0][0]) == 64
    assert calls == [4, 64]
