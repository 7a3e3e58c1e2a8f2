"""How a network is called: the one record of a call, and what becomes one.

What a user holds is a tensor, a tuple of arguments, a dict of keywords, or a list of batches of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normswap.errors import OptionError

Inputs = Any  # a tensor; a tuple (several arguments); a mapping (keywords); a list of batches of these


@dataclass(frozen=True)
class Example:
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def call(self, model: nn.Module) -> Any:
        return model(*self.args, **self.kwargs)

    def map(self, change: Callable[[Tensor], Tensor]) -> Example:
        """The same, every tensor changed."""
        return Example(changed(self.args, change), changed(self.kwargs, change))

    def tensors(self) -> list[Tensor]:
        return [tensor for _, tensor in named_tensors((self.args, self.kwargs))]

    @property
    def images(self) -> Tensor:
        """The first floating-point tensor: what the network looks at."""
        return next((t for t in self.tensors() if t.is_floating_point()), self.tensors()[0])

    def first(self, count: int) -> Example:
        """The first samples of the batch, where every argument, a tensor or a list, has the same number of them."""
        own = [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Tensor | list)]
        sizes = {len(value) if isinstance(value, list) or value.ndim else 0 for value in own}
        if len(sizes) != 1 or min(sizes) <= count:
            return self
        cut = {id(value): value[:count] for value in own}
        named = {name: cut.get(id(value), value) for name, value in self.kwargs.items()}
        return Example(tuple(cut.get(id(value), value) for value in self.args), named)

    def like(self, model: nn.Module) -> Example:
        """On the model's device, and floating-point tensors in its dtype."""
        own = anchor(model)
        return self.map(lambda t: t.to(own.device, own.dtype if t.is_floating_point() else t.dtype))

    def __str__(self) -> str:
        return ", ".join("x".join(map(str, t.shape)) for t in self.tensors())


def batches(inputs: Inputs) -> list[Example]:
    """What the user gives, one call each.

    Raises:
        OptionError: there is no tensor in it.
    """
    given = list(inputs) if isinstance(inputs, list) else [inputs]
    found = [one if isinstance(one, Example) else _call(one) for one in given]
    if not found or not all(one.tensors() for one in found):
        raise OptionError(
            "there is no tensor in the inputs",
            remedy="Give a tensor, a tuple of arguments, a dict of keywords, or a list of batches of these",
        )
    return found


def _call(one: Any) -> Example:
    if isinstance(one, Mapping):
        return Example((), dict(one))
    return Example(tuple(one)) if isinstance(one, tuple) else Example((one,))


def anchor(model: nn.Module) -> Tensor:
    """A tensor of the network's device and dtype."""
    tensors = (t for m in nn.Module.modules(model) for t in (*m._parameters.values(), *m._buffers.values()))
    return next((t for t in tensors if t is not None and t.is_floating_point()), torch.empty(0))


def named_tensors(value: Any, name: str = "", depth: int = 8) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in tuples, lists, dicts and records of them, with its name."""
    if isinstance(value, Tensor):
        yield name, value
    elif depth:
        for key, part in _parts(value):
            yield from named_tensors(part, f"{name}.{key}" if name else str(key), depth - 1)


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if isinstance(value, list | tuple):
        return enumerate(value)
    return vars(value).items() if is_record(value) else ()


def is_record(value: Any) -> bool:
    """Whether the value is an object of a class for results (ImageList, NestedTensor, a dataclass), not a program."""
    kind = type(value)
    return hasattr(value, "__dict__") and not callable(value) and kind.__module__.split(".")[0] not in (
        "torch", "builtins", "types", "numpy")  # fmt: skip


def changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure, every tensor in it changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: changed(part, change) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(changed(part, change) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(changed(part, change) for part in value)
    return value
