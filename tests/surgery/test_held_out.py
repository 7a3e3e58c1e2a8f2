"""Held-out images: copies of images that the result was fitted to tell nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import normswap
from normswap.models.calling import Example
from normswap.surgery.held_out import COPIES, HeldOutSplit


@pytest.mark.parametrize(
    ("numbers", "fitted", "held"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 4, 5, 6], [3, 7]),
        ([0, 1, 2, 9, 9, 5, 6, 7], [0, 1, 2, 9, 5, 6], [7]),  # a copy that comes later
        ([0, 1, 2, 3, 4, 5, 6, 3], [0, 1, 2, 4, 5, 6], [3]),
        ([0] * 8, [0] * 6, []),
    ],
)
def test_a_copy_of_an_image_is_not_measured_on(numbers: list[int], fitted: list[int], held: list[int]) -> None:
    images = torch.tensor(numbers).double()[:, None, None, None].expand(-1, 1, 2, 3)
    dealt = HeldOutSplit([Example((part,)) for part in images.split(4)], torch.device("cpu"))
    for _ in range(2):
        assert [int(x) for one in dealt for x in one.images[:, 0, 0, 0]] == fitted
        assert [int(x) for one in dealt.held for x in one.images[:, 0, 0, 0]] == held
        assert dealt.copies == 2 - len(held)


def test_images_that_are_all_alike_keep_nothing_known() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    x = torch.randn(1, 3, 6, 6)
    network.train()(torch.randn(64, 3, 6, 6))  # statistics
    network.eval()
    report = normswap.convert(network, "groupnorm", calibrate=[x.expand(32, -1, -1, -1)]).report
    assert (report.kept, report.unmeasured) == (None, COPIES)
    some = normswap.convert(network, "groupnorm", calibrate=[torch.cat([torch.randn(28, 3, 6, 6), x, x, x, x])])
    assert some.report.kept is not None
    assert some.report.kept.count == 7
    assert "1 of the held-out images are copies of others, and do not count" in some.notes
