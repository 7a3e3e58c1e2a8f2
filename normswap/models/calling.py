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
    """The arguments of one call of a network.

    Args:
        args: The positional arguments.
        kwargs: The keyword arguments, by name.
    """

    args: tuple[object, ...]
    kwargs: dict[str, object] = field(default_factory=dict)

    def call(self, model: nn.Module) -> object:
        """Run the network with these arguments and return its output."""
        return model(*self.args, **self.kwargs)

    def call_on_copies(self, model: nn.Module) -> object:
        """Run the network with copies of these tensors, as a forward may write into its input."""
        return self.map(torch.clone).call(model)

    def map(self, change: Callable[[Tensor], Tensor]) -> Example:
        """Return a call like this, every tensor changed."""
        return Example(changed(self.args, change), changed(self.kwargs, change))

    def map_floats(self, change: Callable[[Tensor], Tensor]) -> Example:
        """Return a call like this, every floating-point tensor changed."""
        return self.map(lambda tensor: change(tensor) if tensor.is_floating_point() else tensor)

    def tensors(self) -> list[Tensor]:
        """Return every tensor of the call."""
        return [tensor for _, tensor in named_tensors((self.args, self.kwargs))]

    @property
    def images(self) -> Tensor:
        """The first floating-point tensor of the call, which counts as its images."""
        tensors = self.tensors()
        return next((tensor for tensor in tensors if tensor.is_floating_point()), tensors[0])

    @property
    def size(self) -> tuple[int, ...]:
        """The size (C, H, W) of one of its images."""
        if self.listed:
            return tuple(self.images.shape)
        return tuple(self.images.shape[1:])

    @property
    def count(self) -> int:
        """The number of samples: the length of its list, or else of its images' first dimension."""
        listed = next((value for value in self._values() if isinstance(value, list)), None)
        if listed is not None:
            return len(listed)
        return len(torch.atleast_1d(self.images))

    def _values(self) -> list[object]:
        return [*self.args, *self.kwargs.values()]

    def _cut(self, cut: Callable[[Any], object]) -> Example | None:
        """Return the call with every tensor and list cut.

        The result is None unless all of them have the same number of samples.
        """
        # The number of samples in each tensor and list. A tensor without dimensions counts as 0.
        sizes: set[int] = set()

        def measure(value: Any) -> None:
            sizes.add(0 if isinstance(value, Tensor) and not value.ndim else len(value))

        changed((self.args, self.kwargs), measure, list)
        if len(sizes) != 1 or not min(sizes):
            return None
        return Example(changed(self.args, cut, list), changed(self.kwargs, cut, list))

    def first(self, count: int) -> Example:
        """Return the first samples of the batch, or the whole call if it cannot be parted."""
        if self.count <= count:
            return self
        return self._cut(lambda value: value[:count]) or self

    def take(self, rows: Tensor) -> Example | None:
        """Return the samples that are marked.

        Args:
            rows: Which samples, (N,), bool.

        Returns:
            The call, or None if no sample is marked or the call cannot be parted.
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
        """Return the call on the model's device, with floating-point tensors in its dtype."""
        tensor = anchor(model)
        return self.on(tensor.device).map_floats(lambda values: values.to(tensor.dtype))

    def on(self, device: torch.device) -> Example:
        """Return the call with its tensors on a device."""
        return self.map(lambda tensor: tensor.to(device))

    def parted(self, size: int) -> list[Example]:
        """Return the samples in order, `size` at a time, or the call if it cannot be parted."""
        part_of = torch.arange(self.count) // size
        parts = [self.take(part_of == i) for i in part_of.unique()]
        return [part for part in parts if part is not None] or [self]

    @property
    def listed(self) -> bool:
        """Whether it takes a list of images, each of its own size."""
        return any(isinstance(value, list) for value in self._values())

    @property
    def only_images(self) -> bool:
        """Whether the call has one tensor, or one list of tensors, and constants besides.

        Then another call of the same form differs by its images alone.
        """
        lists = [value for value in self._values() if isinstance(value, list)]
        if lists:
            return len(lists) == 1 and all(isinstance(entry, Tensor) for entry in lists[0])
        return len(self.tensors()) == 1

    @property
    def mirrors(self) -> bool:
        """Whether one argument alone holds images, so that they may be mirrored."""
        with_tensors = [
            value for value in self._values() if next(named_tensors(value), None) is not None
        ]
        dimensions = 3 if self.listed else 4
        are_images = all(
            tensor.ndim == dimensions and tensor.is_floating_point() for tensor in self.tensors()
        )
        return len(with_tensors) == 1 and are_images

    @property
    def plain(self) -> str:
        """Everything in the call except its tensors, as text."""
        values = (changed(value, lambda _: None) for value in (self.args, self.kwargs))
        return repr(tuple(values))

    @property
    def hollow(self) -> Example:
        """The call with an empty tensor in place of each tensor, of the same dtype and device."""
        return self.map(lambda t: t.new_empty(0))

    def of(self, images: Tensor) -> Example:
        """Return a call of this form with images (N, C, H, W).

        Raises:
            TraceError: The network takes more than images.
        """
        if not self.only_images:
            what = "a list of records" if self.listed else f"{len(self.tensors())} tensors"
            remedy = "Say what each is: '--input NAME=SHAPE' (in Python `inputs=`)"
            raise TraceError("the network takes more than images", f"it takes {what}", remedy)
        if self.listed:
            return self._around(list(images))
        return self.map(lambda _: images)

    def _of_dict(self, batch: Mapping[str, object]) -> Example:
        """Return a dict as the one argument of a network that takes a dict, or else as keywords."""
        if self.args and isinstance(self.args[0], Mapping):
            return Example((batch,))
        keywords = dict(batch)
        if "labels" not in self.kwargs:
            keywords.pop("labels", None)
        return Example((), keywords)

    def read(self, batch: object) -> tuple[Example, object]:
        """Return a batch as a call of this form, and the labels beside it, or None.

        A batch is a call as `inputs=` takes it. It may also be a tuple or list that begins with
        such a call, or with all arguments, and goes on with labels. "labels" in a dict of keywords
        are labels, too, unless this call takes them as an argument. A list of images may be one
        argument.
        """
        if isinstance(batch, Example):
            return batch, None
        if isinstance(batch, Tensor):
            return self.of(batch), None
        if isinstance(batch, Mapping):
            return self._of_dict(batch), batch.get("labels")

        if not isinstance(batch, list | tuple) or not batch:
            return Example((batch,)), None
        # The list itself may be the network's one argument: a list of images.
        if self.listed and _is_listed(batch):
            return self._around(list(batch)), None

        # Otherwise the arguments come first, and the labels follow.
        count = max(1, len(self.args))
        labels = next(iter(batch[count:]), None)
        if count > 1:
            return Example(tuple(batch[:count])), labels
        if self.listed and isinstance(batch[0], list | tuple):
            return self._around(list(batch[0])), labels
        if isinstance(batch[0], list | tuple):
            return Example((batch[0],)), labels
        call, _ = self.read(batch[0])
        return call, labels

    def _around(self, images: list[object]) -> Example:
        """Return a call of this form with other images in its list."""

        def put(value: object) -> object:
            return images if isinstance(value, list) else value

        return Example(
            tuple(map(put, self.args)), {name: put(value) for name, value in self.kwargs.items()}
        )

    def __str__(self) -> str:
        return ", ".join("x".join(map(str, t.shape)) for t in self.tensors())


def _is_listed(batch: list[object] | tuple[object, ...]) -> bool:
    """Return whether a list holds single images, or records of images, and no labels."""
    if not isinstance(batch, list):
        return False
    are_images = all(isinstance(entry, Tensor) and entry.ndim == 3 for entry in batch)
    return are_images or all(isinstance(entry, Mapping) for entry in batch)


def named_arguments(model: nn.Module, example: Example) -> dict[str, object]:
    """Return the values of a call by the names of forward's arguments.

    In place of a dict among the arguments, its entries are returned under their own keys.
    """
    names = [parameter.name for parameter in _positional(model)]
    values: dict[str, object] = {}
    for i, value in enumerate(example.args):
        if isinstance(value, Mapping):
            values |= value
        else:
            name = names[i] if i < len(names) else str(i)
            values[name] = value
    return values | example.kwargs


def plain_arguments(model: nn.Module, example: Example) -> dict[str, object]:
    """Return the values of a call that hold no tensor, by the names of forward's arguments."""
    plain: dict[str, object] = {}
    for name, value in named_arguments(model, example).items():
        if next(named_tensors(value), None) is None:
            plain[name] = value
    return plain


def defaults(model: nn.Module, example: Example) -> list[str]:
    """Return the names of forward's arguments that the call leaves at their defaults."""
    named = named_arguments(model, example)
    optional = [each.name for each in _parameters(model) if each.default is not each.empty]
    return [name for name in optional if name not in named]


def form(model: nn.Module) -> Example:
    """Return how images are given to a network, from the signature of its forward.

    The images are its first argument, or the argument that it names as its main input. They are a
    tensor, or a list if the annotation says so. Other arguments without a default are given, too.
    """
    # Empty tensors stand in for the values.
    empty = torch.empty(0)
    positional = _positional(model)
    keyword_only = [each for each in _parameters(model) if each.kind is each.KEYWORD_ONLY]
    parameters = [*positional, *keyword_only]
    if not parameters:
        return Example((empty,))

    main_name = getattr(model, "main_input_name", None)
    main = next((each for each in parameters if each.name == main_name), parameters[0])
    images: object = [empty] if _takes_list(model, main) else empty
    required = [each for each in parameters if each.default is each.empty and each is not main]

    # If the images do not come first, all arguments are given by name.
    if not positional or main is not positional[0]:
        by_name: dict[str, object] = {each.name: empty for each in required}
        return Example((), {**by_name, main.name: images})

    keywords: dict[str, object] = {each.name: empty for each in required if each in keyword_only}
    further = len(required) - len(keywords)
    return Example((images, *[empty] * further), keywords)


def _positional(model: nn.Module) -> list[inspect.Parameter]:
    """Return forward's arguments that may be given without their names."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each for each in _parameters(model) if each.kind in kinds]


def _parameters(model: nn.Module) -> list[inspect.Parameter]:
    """Return forward's arguments. The list is empty if Python does not know them."""
    try:
        return list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return []


def _takes_list(model: nn.Module, parameter: inspect.Parameter) -> bool:
    """Return whether forward's annotation asks for a list.

    Args:
        model: The network.
        parameter: The parameter of its forward.
    """
    # Annotations are the user's, and may name what is not imported.
    with suppress(Exception):
        return get_origin(get_type_hints(model.forward).get(parameter.name)) in (list, Sequence)
    return False


def batches(inputs: Inputs, form: Example | None = None) -> list[Example]:
    """Return the user's inputs as a list of calls of the network.

    Args:
        inputs: A call, or a list of calls.
        form: How the network takes images. With it, a tensor among the inputs is images.

    Raises:
        OptionError: A tensor is missing, or has no values.
        TraceError: The network takes more than images.
    """
    several = inputs if isinstance(inputs, list) else [inputs]
    calls: list[Example] = []
    for call in several:
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
    for call in calls:
        if any(tensor.is_meta for tensor in call.tensors()):
            raise OptionError("the inputs have no values", "they are on the meta device")
    return calls


def anchor(model: nn.Module) -> Tensor:
    """Return a tensor with the network's device and dtype: that of most numbers in its parameters.

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
            [(most_common_dtype, _)] = numbers.most_common(1)
            return firsts[most_common_dtype]
    return torch.empty(0)


def named_tensors(value: object, name: str = "", depth: int = 8) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in tuples, lists, dicts and records, with its name.

    Args:
        value: The tensor, or the structure that holds tensors.
        name: The name of the value itself.
        depth: How many levels are looked into.
    """
    if isinstance(value, Tensor):
        yield name, value
    elif depth:
        for key, entry in _parts(value):
            yield from named_tensors(entry, dotted(name, str(key)), depth - 1)


def named_numbers(value: object, name: str = "", depth: int = 8) -> Iterator[tuple[str, float]]:
    """Yield every plain number in tuples, lists and dicts, with its name.

    Records are not looked into, because they may hold numbers that are no answers, such as a time.

    Args:
        value: The number, or the structure that holds numbers.
        name: The name of the value itself.
        depth: How many levels are looked into.
    """
    if isinstance(value, bool | int | float):
        yield name, value
    elif depth and isinstance(value, Mapping | tuple | list):
        for key, entry in _parts(value):
            yield from named_numbers(entry, dotted(name, str(key)), depth - 1)


def _parts(value: object) -> Iterable[tuple[object, object]]:
    """Return the entries of a collection or record, with their keys."""
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
    """Return whether a value is a record of results, such as a dataclass or an ImageList."""
    is_a_value = type(value).__module__.split(".")[0] in ("torch", "builtins", "types", "numpy")
    return hasattr(value, "__dict__") and not callable(value) and not is_a_value


def changed(value: object, change: Callable[[Any], object], *kinds: type) -> Any:
    """Return the same structure with every tensor in it changed.

    Args:
        value: The structure: tuples, lists, dicts and records.
        change: Returns the replacement of a tensor.
        kinds: Further classes whose objects are changed as a whole.
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
