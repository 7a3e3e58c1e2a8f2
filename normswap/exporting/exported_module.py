"""The network as it goes into a file: undressed, with what the user wants before and after it.

Whatever the weights' dtype, images come in and answers go out in float32: a caller need not know.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normswap.models.network_input import answer

INPUT = "images"


class Shipped(nn.Module):
    """float32 images (N, C, H, W) -> float32 answers (N, classes), through `network` in its own dtype.

    Args:
        network: a folded network.
        dtype: what it computes in; stored: bfloat16 for weights that it holds exactly to be stored in it.
        scale, shift: (C, 1, 1) each: the images x become scale * x + shift first; None: nothing to do.
        softmax: answer with probabilities.
        output: what the answers are called in files that name them.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        dtype: torch.dtype = torch.float32,
        stored: torch.dtype | None = None,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        softmax: bool = False,
        output: str = "logits",
    ) -> None:
        super().__init__()
        self.network = network.to(dtype)
        self.dtype, self.stored, self.softmax, self.output = dtype, stored or dtype, softmax, output
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        if isinstance(self.scale, Tensor):
            x = x * self.scale
        if isinstance(self.shift, Tensor):
            x = x + self.shift
        half = self.dtype != torch.float32  # a cast to what it is would be a node all the same
        answers = answer(self.network(x.to(self.dtype) if half else x))
        answers = answers.to(torch.float32) if half else answers
        return answers.softmax(-1) if self.softmax else answers
