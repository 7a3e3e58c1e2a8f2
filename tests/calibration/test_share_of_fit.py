"""As much of a fit is kept as makes the answers to images that were held out of it better."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from normswap.calibration import sequential_fit
from normswap.calibration.sequential_fit import keep_share, values_of
from normswap.models.calling import Example
from normswap.proof.held_out import HeldOutSplit


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)
    ).eval()


def on_the_way(model: nn.Module, share: float) -> tuple[nn.Module, sequential_fit.Values]:
    """A fitted network, and the values before the fit, so that `model` lies at that share of the
    way between them.
    """
    before = copy.deepcopy(model)
    fitted = copy.deepcopy(model)
    for one, two in zip(before.parameters(), fitted.parameters(), strict=True):
        step = torch.randn_like(one.data)
        one.data -= share * step
        two.data += (1 - share) * step
    return fitted, values_of(before)


def calls(count: int, seed: int = 0) -> list[Example]:
    return [
        Example((torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(seed + i)),), {})
        for i in range(count)
    ]


@pytest.mark.parametrize("share", sequential_fit.SHARES)
def test_the_share_is_found_at_which_the_answers_are_the_source_s(share: float) -> None:
    source = net(0)
    result, before = on_the_way(source, share)
    assert keep_share(source, result, before, calls(2)) == share
    for found, wanted in zip(result.parameters(), source.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_without_images_to_choose_on_all_is_kept() -> None:
    result, before = on_the_way(net(0), 0.0)
    fitted = values_of(result)
    assert keep_share(net(0), result, before, []) == 1.0
    assert all(torch.equal(value, fitted[name]) for name, value in result.state_dict().items())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_fit_that_is_not_finite_is_taken_back(bad: float) -> None:
    source = net(0)
    result, before = on_the_way(source, 0.25)
    result.get_parameter("4.bias").data[0] = bad
    assert keep_share(source, result, before, calls(1)) == 0.0
    assert all(torch.equal(value, before[name]) for name, value in result.state_dict().items())


def test_logits_are_compared_as_probabilities_and_maps_by_their_squares() -> None:
    one = torch.randn(7, 5, dtype=torch.float64)
    two = torch.randn(7, 5, dtype=torch.float64)
    p, q = (torch.distributions.Categorical(logits=value) for value in (one, two))

    assert float(sequential_fit.divergence(one, two)) == pytest.approx(
        float(torch.distributions.kl_divergence(p, q).sum())
    )

    maps = (one.view(7, 5, 1, 1), two.view(7, 5, 1, 1))
    assert float(sequential_fit.divergence(*maps)) == pytest.approx(float((one - two).norm() ** 2))
    assert float(sequential_fit.divergence(one, one + 3)) == pytest.approx(
        0, abs=1e-12
    )  # the same answers


class Apart:
    """Batches of which the last is held out."""

    def __init__(self, batches: list[Example]) -> None:
        self.batches = batches
        self.held: list[Example] = []

    def __iter__(self) -> Iterator[Example]:
        self.held = self.batches[-1:]
        return iter(self.batches[:-1])


def distance(source: nn.Module, result: nn.Module, example: Example) -> float:
    with torch.no_grad():
        wanted, found = (example.call(model) for model in (source, result))
    return float(sequential_fit.divergence(wanted, found)) / len(wanted)


@pytest.mark.parametrize("zero_sum", [False, True])
def test_what_misleads_is_taken_back_by_the_images_that_were_held_out(zero_sum: bool) -> None:
    """Ours clips what is bright, and is fitted to bright samples; on the dark ones that are held
    out it was right.

    Filters that must sum to zero have nothing to go back to: there all of the fit is kept.
    """
    torch.manual_seed(0)
    source = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4)).eval()
    result = nn.Sequential(
        copy.deepcopy(source[0]), nn.Hardtanh(0, 2), copy.deepcopy(source[2])
    ).eval()
    bright = [Example((20 * torch.randn(16, 3),), {}) for _ in range(4)]
    dark = Example((torch.randn(16, 3),), {})

    assert distance(source, result, dark) < 1e-12

    factors = (lambda path, module: None) if zero_sum else None
    sequential_fit.refit(source, result, Apart([*bright, dark]), zero_sum=factors)
    assert (
        distance(source, result, dark) > 0.01
        if zero_sum
        else distance(source, result, dark) < 1e-12
    )


@pytest.mark.parametrize("size", [4, 12])
def test_a_copy_of_an_image_is_not_measured_on(size: int) -> None:
    """Nor is one of two that are held out, in one batch or in two."""
    images = (
        torch.tensor([0, 1, 2, 0, 4, 5, 6, 7, 8, 9, 9, 7])
        .double()[:, None, None, None]
        .expand(-1, 1, 2, 3)
    )
    split = HeldOutSplit([Example((batch,)) for batch in images.split(size)], torch.device("cpu"))
    for _ in range(2):
        assert sum(call.count for call in split) == 9
        assert [int(x) for call in split.held for x in call.images[:, 0, 0, 0]] == [7]
        assert split.copies == 2
