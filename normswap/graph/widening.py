"""A network in float64 whose forward makes float32 tensors itself: they are cast as they are made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_MAKERS = frozenset((
    "float", "to", "type", "tensor", "as_tensor", "zeros", "ones", "full", "empty", "arange", "linspace", "eye",
    "rand", "randn", "zeros_like", "ones_like", "full_like", "empty_like", "from_numpy", "new_tensor", "type_as",
    "scalar_tensor", "meshgrid", "softmax", "log_softmax", "cumsum", "sum", "mean", "hann_window", "logspace",
))  # fmt: skip


class Widening(TorchFunctionMode):
    """While it lasts, what is made in float32 is in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") not in _MAKERS or not isinstance(result, Tensor):
            return result
        return result.double() if result.dtype == torch.float32 else result
