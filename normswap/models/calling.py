"""How a network is called: the one record of a call, and what becomes one.

A user holds a tensor, a tuple of arguments, a dict of keywords, or a list of batches of these.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from normswap.copying import dotted
from normswap.errors import OptionError, TraceError

# A tuple is the arguments of one call, a mapping its keywords; a list of calls is a list of
# batches.
Call: TypeAlias = "Tensor | Example | tuple[object, ...] | Mapping[str, object]"
Inputs: TypeAlias = "Call | Sequence[Call] | None"


@dataclass(frozen=True)
class Example:
    """The arguments of one call."""

    args: tuple[object, ...]
    kwargs: dict[str, object] = field(default_factory=dict)

    def call(self, model: nn.Module) -> object:
        return model(*self.args, **self.kwargs)

    def map(self, change: Callable[[Tensor], Tensor]) -> Example:
        """Return a call like this, every tensor changed."""
        return Example(changed(self.args, change), changed(self.kwargs, change))

    def map_floats(self, change: Callable[[Tensor], Tensor]) -> Example:
        """Return a call like this, every floating-point tensor changed."""
        return self.map(lambda tensor: change(tensor) if tensor.is_floating_point() else tensor)

    def tensors(self) -> list[Tensor]:
        return [tensor for _, tensor in named_tensors((self.args, self.kwargs))]

    @property
    def images(self) -> Tensor:
        """The first floating-point tensor: what the network looks at."""
        return next((t for t in self.tensors() if t.is_floating_point()), self.tensors()[0])

    @property
    def size(self) -> tuple[int, ...]:
        """Of one of its images, (C, H, W)."""
        if self.listed:
            return tuple(self.images.shape)
        return tuple(self.images.shape[1:])

    @property
    def count(self) -> int:
        """How many samples it has: as many as are in its list, else as its first images' first
        dimension says.
        """
        listed = next((value for value in self._values() if isinstance(value, list)), None)
        if listed is not None:
            return len(listed)
        return len(torch.atleast_1d(self.images))

    def _values(self) -> list[object]:
        return [*self.args, *self.kwargs.values()]

    def _cut(self, cut: Callable[[Any], object]) -> Example | None:
        """Cut every tensor and list; None where not each of them has the same number of samples."""
        sizes: set[int] = set()

        def measure(value: Any) -> None:
            sizes.add(0 if isinstance(value, Tensor) and not value.ndim else len(value))

        changed((self.args, self.kwargs), measure, list)
        if len(sizes) != 1 or not min(sizes):
            return None
        return Example(changed(self.args, cut, list), changed(self.kwargs, cut, list))

    def first(self, count: int) -> Example:
        """Return the first samples of the batch, where every argument has the same number of them."""
        if self.count <= count:
            return self
        return self._cut(lambda value: value[:count]) or self

    def take(self, rows: Tensor) -> Example | None:
        """Return the samples that are marked in `rows` (N,), bool; None where none is, or it cannot
        be parted.
        """
        if bool(rows.all()):
            return self
        if not bool(rows.any()):
            return None

        def marked(value: Any) -> object:
            if isinstance(value, Tensor):
                return value[rows.to(value.device)]
            return list(itertools.compress(value, rows.tolist()))

        return self._cut(marked)

    def like(self, model: nn.Module) -> Example:
        """On the model's device, and floating-point tensors in its dtype."""
        tensor = anchor(model)
        return self.on(tensor.device).map_floats(lambda values: values.to(tensor.dtype))

    def on(self, device: torch.device) -> Example:
        return self.map(lambda tensor: tensor.to(device))

    def parted(self, size: int) -> list[Example]:
        """Its samples in order, `size` at a time, or itself where it cannot be parted."""
        part_of = torch.arange(self.count) // size
        parts = [self.take(part_of == i) for i in part_of.unique()]
        return [part for part in parts if part is not None] or [self]

    @property
    def listed(self) -> bool:
        """Whether it takes a list of images, each of its own size."""
        return any(isinstance(value, list) for value in self._values())

    @property
    def only_images(self) -> bool:
        """Whether one tensor, or one list of tensors, is all that can differ from call to call."""
        lists = [value for value in self._values() if isinstance(value, list)]
        if lists:
            return len(lists) == 1 and all(isinstance(entry, Tensor) for entry in lists[0])
        return len(self.tensors()) == 1

    @property
    def mirrors(self) -> bool:
        """Whether all it takes is images, in one argument, which may be shown in a mirror as well."""
        among = [value for value in self._values() if next(named_tensors(value), None) is not None]
        sides = 3 if self.listed else 4
        return len(among) == 1 and all(
            t.ndim == sides and t.is_floating_point() for t in self.tensors()
        )

    @property
    def plain(self) -> str:
        """All of the call but its tensors."""
        values = (changed(value, lambda _: None) for value in (self.args, self.kwargs))
        return repr(tuple(values))

    @property
    def hollow(self) -> Example:
        """The form of the call, without values."""
        return self.map(lambda t: t.new_empty(0))

    def of(self, images: Tensor) -> Example:
        """Make a call of this form with images (N, C, H, W); raises TraceError: it takes more than
        images.
        """
        if not self.only_images:
            what = "a list of records" if self.listed else f"{len(self.tensors())} tensors"
            remedy = "Say what each is: '--input NAME=SHAPE' (in Python `inputs=`)"
            raise TraceError("the network takes more than images", f"it takes {what}", remedy)
        if self.listed:
            return self._around(list(images))
        return self.map(lambda _: images)

    def read(self, batch: object) -> tuple[Example, object]:
        """Read a batch for a network that is called like this: the call, and the labels beside it,
        or None.

        A batch is what `inputs=` takes; or a tuple or list of that, or of all the arguments, and
        then labels; "labels" in a dict of keywords are labels, too, unless this call has some. A
        list of images may be one argument.
        """
        if isinstance(batch, Example):
            return batch, None
        if isinstance(batch, Tensor):
            return self.of(batch), None
        if isinstance(batch, Mapping):
            labels = batch.get("labels")
            if self.args and isinstance(self.args[0], Mapping):
                return Example((batch,)), labels
            return (
                Example(
                    (),
                    {
                        name: batch[name]
                        for name in batch
                        if name != "labels" or name in self.kwargs
                    },
                ),
                labels,
            )
        if not isinstance(batch, list | tuple) or not batch:
            return Example((batch,)), None
        if self.listed and _is_listed(batch):
            return self._around(list(batch)), None
        count = max(1, len(self.args))
        labels = next(iter(batch[count:]), None)
        if count > 1:
            return Example(tuple(batch[:count])), labels
        if self.listed and isinstance(batch[0], list | tuple):
            return self._around(list(batch[0])), labels
        if isinstance(batch[0], list | tuple):
            return Example((batch[0],)), labels
        return self.read(batch[0])[0], labels

    def _around(self, images: list[object]) -> Example:
        def put(value: object) -> object:
            return images if isinstance(value, list) else value

        return Example(
            tuple(map(put, self.args)), {name: put(value) for name, value in self.kwargs.items()}
        )

    def __str__(self) -> str:
        return ", ".join("x".join(map(str, t.shape)) for t in self.tensors())


def _is_listed(batch: list[object] | tuple[object, ...]) -> bool:
    """Tell whether these are images, one by one, or records of them; and not a batch with labels."""
    images = all(isinstance(entry, Tensor) and entry.ndim == 3 for entry in batch)
    return isinstance(batch, list) and (
        images or all(isinstance(entry, Mapping) for entry in batch)
    )


def named_arguments(model: nn.Module, example: Example) -> dict[str, object]:
    """Return the values of a call by the names of forward's arguments; of a dict among them by its
    own keys.
    """
    positional = [
        p.name for p in _parameters(model) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    names = dict(enumerate(positional))
    values: dict[str, object] = {}
    for i, value in enumerate(example.args):
        values |= value if isinstance(value, Mapping) else {names.get(i, str(i)): value}
    return values | example.kwargs


def defaults(model: nn.Module, example: Example) -> list[str]:
    """The names of forward's arguments that the call leaves at their defaults."""
    named = named_arguments(model, example)
    return [p.name for p in _parameters(model) if p.default is not p.empty and p.name not in named]


def form(model: nn.Module) -> Example:
    """Find how images are given to a network, from the signature of its forward.

    They are its first argument, or one by name; a tensor, or a list by its annotation. What has no
    default is one, too.
    """
    empty = torch.empty(0)
    positional = [
        p for p in _parameters(model) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    taken = [*positional, *(p for p in _parameters(model) if p.kind is p.KEYWORD_ONLY)]
    stated = getattr(model, "main_input_name", None)
    first = next((p for p in taken if p.name == stated), next(iter(taken), None))
    if first is None:
        return Example((empty,))
    value: object = empty
    if _takes_list(model, first):
        value = [empty]
    required = [p for p in taken if p.default is p.empty and p is not first]
    if positional and first is positional[0]:
        named: dict[str, object] = {p.name: empty for p in required if p.kind is p.KEYWORD_ONLY}
        return Example((value, *[empty] * (len(required) - len(named))), named)
    return Example((), {p.name: empty for p in required} | {first.name: value})


def _parameters(model: nn.Module) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return []


def _takes_list(model: nn.Module, parameter: inspect.Parameter) -> bool:
    with suppress(Exception):
        return get_origin(get_type_hints(model.forward).get(parameter.name)) in (list, Sequence)
    return False


def batches(inputs: Inputs, form: Example | None = None) -> list[Example]:
    """Return the user's inputs, one call each; tensors among them are images, if `form` says how
    they are taken.

    Raises OptionError: a tensor is missing, or has no values; TraceError: the network takes more
    than images.
    """
    calls = []
    for call in inputs if isinstance(inputs, list) else [inputs]:
        if form and isinstance(call, Tensor):
            call = form.of(call)
        elif isinstance(call, Mapping):
            call = Example((), dict(call))
        elif not isinstance(call, Example):
            call = Example(call if isinstance(call, tuple) else (call,))
        calls.append(call)
    if not calls or not all(call.tensors() for call in calls):
        remedy = (
            "Give a tensor, a tuple of arguments, a dict of keywords, or a list of batches of these"
        )
        raise OptionError("there is no tensor in the inputs", remedy=remedy)
    if any(tensor.is_meta for call in calls for tensor in call.tensors()):
        raise OptionError("the inputs have no values", "they are on the meta device")
    return calls


def anchor(model: nn.Module) -> Tensor:
    """Return a tensor of the network's device and dtype: that of most of its parameters' numbers.

    Buffers decide only where there is no parameter, so one float64 constant changes nothing.
    """
    for kind in ("_parameters", "_buffers"):
        firsts: dict[torch.dtype, Tensor] = {}
        numbers: Counter[torch.dtype] = Counter()
        for module in nn.Module.modules(model):
            for tensor in getattr(module, kind).values():
                if tensor is not None and tensor.is_floating_point():
                    firsts.setdefault(tensor.dtype, tensor)
                    # A lazy parameter has no shape yet.
                    numbers[tensor.dtype] += 1 if is_lazy(tensor) else max(tensor.numel(), 1)
        if firsts:
            return firsts[numbers.most_common(1)[0][0]]
    return torch.empty(0)


def named_tensors(value: object, name: str = "", depth: int = 8) -> Iterator[tuple[str, Tensor]]:
    """Return every tensor in tuples, lists, dicts and records of them, with its name."""
    if isinstance(value, Tensor):
        yield name, value
    elif depth:
        for key, entry in _parts(value):
            yield from named_tensors(entry, dotted(name, str(key)), depth - 1)


def _parts(value: object) -> Iterable[tuple[object, object]]:
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if isinstance(value, list | tuple):
        return enumerate(value)
    if is_record(value):
        return vars(value).items()
    return ()


def is_record(value: object) -> bool:
    """Tell whether the value is an object of a class for results (ImageList, NestedTensor, a
    dataclass).
    """
    is_a_value = type(value).__module__.split(".")[0] in ("torch", "builtins", "types", "numpy")
    return hasattr(value, "__dict__") and not callable(value) and not is_a_value


def changed(value: object, change: Callable[[Any], object], *kinds: type) -> Any:
    """Return the same structure, every tensor in it changed, and whatever is of these kinds as a
    whole.
    """
    if isinstance(value, (Tensor, *kinds)):
        return change(value)
    if isinstance(value, Mapping):
        return {key: changed(entry, change, *kinds) for key, entry in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(changed(entry, change, *kinds) for entry in value))
    if isinstance(value, list | tuple):
        return type(value)(changed(entry, change, *kinds) for entry in value)
    if is_record(value) and next(named_tensors(value), None) is not None:
        record = copy.copy(value)
        vars(record).update(changed(vars(value), change, *kinds))
        return record
    return value
