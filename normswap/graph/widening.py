"""A network in float64 whose forward makes float32 tensors itself: they are cast as they are made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normswap.models.network_input import anchor

_MAKERS = frozenset((
    "float", "to", "type", "tensor", "as_tensor", "zeros", "ones", "full", "empty", "arange", "linspace", "eye",
    "rand", "randn", "zeros_like", "ones_like", "full_like", "empty_like", "from_numpy", "new_tensor", "type_as",
    "scalar_tensor", "meshgrid", "softmax", "log_softmax", "cumsum", "sum", "mean", "hann_window", "logspace",
))  # fmt: skip


class Widening(TorchFunctionMode):
    """While it lasts, what is made in float32 in forward is in float64, if the network is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.wide = anchor(model).dtype == torch.float64

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.wide or getattr(func, "__name__", "") not in _MAKERS or not isinstance(result, Tensor):
            return result
        return result.double() if result.dtype == torch.float32 else result
