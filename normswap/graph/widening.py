"""A network in float64 whose forward makes narrower tensors itself: they are made in float64."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from normswap.graph.spelling import Args, Function, Kwargs

_CASTS = frozenset(("float", "half", "bfloat16", "to", "type", "type_as"))
_MAKERS = _CASTS | frozenset((
    "tensor", "as_tensor", "zeros", "ones", "full", "empty", "arange", "linspace", "eye",
    "rand", "randn", "zeros_like", "ones_like", "full_like", "empty_like", "from_numpy", "new_tensor",
    "scalar_tensor", "meshgrid", "softmax", "log_softmax", "cumsum", "sum", "mean", "hann_window", "logspace",
))  # fmt: skip
_NARROW = (torch.float32, torch.float16, torch.bfloat16)


class Widening(TorchFunctionMode):
    """While it lasts, what is made in float32 or less is in float64, and what is cast to that is not rounded."""

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name not in _MAKERS or not isinstance(result, Tensor) or result.dtype not in _NARROW:
            return result
        if name in _CASTS and isinstance(args[0], Tensor) and args[0].is_floating_point():
            return args[0].to(result.device, torch.float64, copy=True)
        return result.double()
