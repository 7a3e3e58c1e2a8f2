"""A network that is about to be filled need not be drawn first: drawing takes most of the time that building takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_T = TypeVar("_T")
_DRAWS = frozenset((
    "uniform_", "normal_", "trunc_normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_",
    "orthogonal_", "sparse_",
))  # fmt: skip
_DRAWS_TOO = frozenset((
    "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "random_", "bernoulli",
    "bernoulli_", "multinomial", "normal", "exponential_", "geometric_", "cauchy_", "log_normal_", "poisson",
))  # fmt: skip


class _Undrawn(TorchFunctionMode):
    """Parameters get zeros for random values; everything else is made as ever, and it is noted if it was drawn."""

    def __init__(self, zeros: bool) -> None:
        super().__init__()
        self.zeros, self.drew = zeros, False

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _DRAWS:
            tensor = args[0] if args else (kwargs or {}).get("tensor")
            if isinstance(tensor, nn.Parameter):
                if self.zeros:
                    tensor.data.zero_()
                return tensor
        self.drew = self.drew or name in _DRAWS or name in _DRAWS_TOO
        return func(*args, **(kwargs or {}))


def undrawn(build: Callable[[], _T], network: Callable[[_T], nn.Module], *, zeros: bool = True) -> _T:
    """Build without drawing the network's parameters: for one whose every parameter is then loaded, strictly.

    What a state dict does not hold may be random, too, and has to be the same each time: where there is such a thing,
    all is built as ever.

    Args:
        network: finds the network in what `build` gives.
        zeros: parameters that are not drawn are zero; else they hold whatever their memory held, which is never touched
            if they get other memory.
    """
    with _Undrawn(zeros) as watch:
        built = build()
    return build() if _holds_more(network(built), watch.drew) else built


def _holds_more(model: nn.Module, drew: bool) -> bool:
    """Tell whether a state dict leaves out a parameter, another float tensor or, if anything was drawn, any tensor."""
    held = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    if any(id(parameter) not in held for parameter in model.parameters()):
        return True
    for module in model.modules():
        left_out = [module._buffers[name] for name in module._non_persistent_buffers_set]
        plain = [value for value in vars(module).values() if isinstance(value, Tensor)]
        if any(tensor is not None and (drew or tensor.is_floating_point()) for tensor in (*left_out, *plain)):
            return True
    return False
