"""Any network that images go into and one answer comes out of, as one that is called with a tensor and gives one."""

from __future__ import annotations

import torch
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


def imaged(model: nn.Module, images: Tensor) -> nn.Module:
    """Return `model` itself where it takes images (N, C, H, W) as they are and gives one tensor, else wrap it.

    Raises:
        TraceError: it takes more than images.
        OptionError: it gives no answer.
        whatever the network raises on the images.
    """
    call = form(model)
    with torch.no_grad():
        output = call.of(images).call(model)
    answer(output)
    plain = len(call.args) == 1 and not call.kwargs and not call.listed and isinstance(output, Tensor)
    return model if plain else Imaged(model).train(model.training)
