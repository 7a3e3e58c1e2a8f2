"""Any network that images go into and one answer comes out of, as one that is called with a tensor and gives one."""

from __future__ import annotations

from torch import Tensor, nn

from normswap.models.calling import form
from normswap.models.network_input import answer


class Imaged(nn.Module):
    """Images (N, C, H, W) -> the answer of `inner`, to which they go by name or as a list where it wants that."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.form = inner, form(inner)

    def forward(self, images: Tensor) -> Tensor:
        return answer(self.form.of(images).call(self.inner))


def imaged(model: nn.Module) -> nn.Module:
    """Return `model` itself where it is called with a tensor of images, else wrap it."""
    call = form(model)
    plain = len(call.args) == 1 and not call.kwargs and not call.listed
    return model if plain else Imaged(model)
