"""Networks as functions of images: one that is called so stays itself, any other is wrapped, with the same answer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from normswap.models.imaged import Imaged, imaged


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class ByName(Plain):
    def forward(self, *, pixels: Tensor) -> Tensor:  # type: ignore[override]
        return self.conv(pixels)


class Beside(Plain):
    def forward(self, x: Tensor, *, other: Tensor) -> Tensor:  # type: ignore[override]
        return self.conv(x)


class OfList(Plain):
    def forward(self, images: list[Tensor]) -> Tensor:  # type: ignore[override]
        return torch.stack([self.conv(one) for one in images])


@pytest.mark.parametrize("kind", [Plain, ByName, OfList])
def test_only_what_is_called_otherwise_is_wrapped(kind: type[Plain]) -> None:
    model, x = kind(), torch.randn(2, 3, 4, 4)
    called = imaged(model)
    assert isinstance(called, Imaged) == (kind is not Plain)
    assert torch.allclose(called(x), model.conv(x))


def test_a_second_tensor_by_name_is_not_forgotten() -> None:
    assert isinstance(imaged(Beside()), Imaged)
