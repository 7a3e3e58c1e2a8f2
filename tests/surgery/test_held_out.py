"""Held-out images: every fourth, which nothing is fitted to; copies of fitted ones tell nothing."""

import pytest
import torch

from normswap.models.calling import Example
from normswap.surgery.held_out import HeldOutSplit


@pytest.mark.parametrize("size", [4, 12])
def test_a_copy_of_an_image_is_not_measured_on(size: int) -> None:
    """Nor is one of two that are held out, in one batch or in two."""
    images = torch.tensor([0, 1, 2, 0, 4, 5, 6, 7, 8, 9, 9, 7]).double()[:, None, None, None].expand(-1, 1, 2, 3)
    split = HeldOutSplit([Example((batch,)) for batch in images.split(size)], torch.device("cpu"))
    for _ in range(2):
        assert sum(call.count for call in split) == 9
        assert [int(x) for call in split.held for x in call.images[:, 0, 0, 0]] == [7]
        assert split.copies == 2
