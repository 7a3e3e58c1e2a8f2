"""Round weights to bfloat16 so that the errors of one filter cancel.

A value of bfloat16 has 8 bits, and 2^-9 of each weight is lost. Rounding each weight for itself, the errors of a filter
add up to a shift of its output, as what it reads is mostly positive, and alike at neighbouring places. Here what one
weight loses is handed to the next one of the filter before that is rounded (error diffusion, Floyd & Steinberg 1976),
so that each filter keeps its sum, which is what data-free quantization aims at, too (SQuant, arXiv:2202.07471).
Measured in tests/benchmarks/export.md.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.no_grad()
def round_(network: nn.Module, dtype: torch.dtype) -> None:
    """Let every weight (of two dimensions or more) be a value of bfloat16, if that is `dtype`; it keeps its own dtype.

    Float16 has three bits more, and needs none of this.
    """
    for parameter in network.parameters() if dtype == torch.bfloat16 else ():
        if parameter.ndim > 1:
            parameter.copy_(diffused(parameter, dtype))


def diffused(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """(O, ...) in float64, values of `dtype`: filter by filter, what one value loses the next one gains."""
    columns = weight.detach().double().flatten(1).T.contiguous()
    found = torch.empty_like(columns)
    lost = torch.zeros_like(columns[0])
    for i, column in enumerate(columns):
        wanted = column + lost
        found[i] = wanted.to(dtype).double()
        lost = wanted - found[i]
    return found.T.reshape(weight.shape)
