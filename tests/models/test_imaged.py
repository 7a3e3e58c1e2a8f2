"""Networks as functions of images: one that is called so stays itself, any other is wrapped, with the same answer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from normswap.errors import TraceError
from normswap.models.imaged import Imaged, imaged


class _Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)


class Plain(_Base):
    """x -> a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class ByName(_Base):
    """Images by name alone."""

    def forward(self, *, pixels: Tensor) -> Tensor:
        return self.conv(pixels)


class Beside(_Base):
    """Images, and another tensor by name."""

    def forward(self, x: Tensor, *, other: Tensor) -> Tensor:
        return self.conv(x)


class OfList(_Base):
    """A list of single images."""

    def forward(self, images: list[Tensor]) -> Tensor:
        return torch.stack([self.conv(one) for one in images])


class InDict(_Base):
    """x -> a dictionary with one answer."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.conv(x)}


def test_what_takes_and_gives_a_tensor_stays_itself() -> None:
    model = Plain()
    assert imaged(model, torch.randn(2, 3, 4, 4)) is model


@pytest.mark.parametrize("kind", [ByName, OfList])
def test_what_is_called_otherwise_is_wrapped(kind: type[_Base]) -> None:
    model, x = kind().eval(), torch.randn(2, 3, 4, 4)
    wrapped = imaged(model, x)
    assert isinstance(wrapped, Imaged)
    assert torch.allclose(wrapped(x), model.conv(x))


def test_what_answers_with_more_is_wrapped_in_its_own_mode() -> None:
    x = torch.randn(2, 3, 4, 4)
    for training in (True, False):
        model = InDict().train(training)
        wrapped = imaged(model, x)
        assert isinstance(wrapped, Imaged)
        assert wrapped.training == training
        assert torch.equal(wrapped(x), model.conv(x))


def test_a_second_tensor_by_name_is_not_forgotten() -> None:
    with pytest.raises(TraceError, match="more than images"):
        imaged(Beside(), torch.randn(2, 3, 4, 4))
