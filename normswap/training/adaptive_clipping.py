"""Adaptive gradient clipping (Brock et al. 2021, arXiv:2102.06171), with few launches on a GPU.

timm's `adaptive_clip_grad` says what it computes, with 10 launches for every parameter. Here a parameter has at most
three, two norms and a product; what lies between is done once for the norms of all of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_LEAST_WEIGHT, _LEAST_GRADIENT = 1e-3, 1e-6  # timm's: filters at zero may move, and nothing is divided by zero


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], share: float) -> None:
    """Clip gradients in place, of each output's weights and of each vector, to a share of the norm of these."""
    groups: dict[tuple[torch.device, torch.dtype, torch.dtype], list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            key = (parameter.device, parameter.dtype, parameter.grad.dtype)
            groups.setdefault(key, []).append(parameter)
    for group in groups.values():
        ordered = sorted(group, key=lambda parameter: parameter.ndim <= 1)  # vectors last, as `_norms` has them
        gradients = [parameter.grad for parameter in ordered if parameter.grad is not None]
        most = _norms([parameter.detach() for parameter in ordered]).clamp_(min=_LEAST_WEIGHT).mul_(share)
        norms = _norms(gradients)
        factors = torch.where(norms < most, 1.0, most / norms.clamp(min=_LEAST_GRADIENT))
        parts = factors.split([1 if gradient.ndim <= 1 else len(gradient) for gradient in gradients])
        shaped = [
            part.view(-1, *[1] * (gradient.ndim - 1)) if gradient.ndim > 1 else part.view([1] * gradient.ndim)
            for part, gradient in zip(parts, gradients, strict=True)
        ]
        torch._foreach_mul_(gradients, shaped)


def _norms(tensors: list[Tensor]) -> Tensor:
    """Those of each output of the weights, one after the other, then those of the vectors."""
    weights = [tensor for tensor in tensors if tensor.ndim > 1]
    vectors = [tensor for tensor in tensors if tensor.ndim <= 1]
    rows = [torch.linalg.vector_norm(weight, dim=tuple(range(1, weight.ndim))) for weight in weights]
    return torch.cat([*rows, *([torch.stack(torch._foreach_norm(vectors))] if vectors else [])])
