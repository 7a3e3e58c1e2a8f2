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
from enum import Enum
from types import NoneType
from typing import Any, TypeAlias, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from normswap.copying import dotted
from normswap.errors import OptionError, TraceError

# A tuple is the arguments of one call, a mapping its keywords; a list of calls is a list of
# batches.
Call: TypeAlias = "Tensor | Example | tuple[object, ...] | Mapping[str, object]"
Inputs: TypeAlias = "Call | Sequence[Call] | None"
_NUMBERS = bool | int | float | complex
# The kinds of numpy's dtypes that are no results of a computation.
_TEXTS_AND_DATES = "USMm"
# What a forward may return beside its results: texts, kinds and the like.
_WITHOUT_RESULTS = (
    *(str, bytes, NoneType, Enum, type, range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


@dataclass(frozen=True)
class Example:
    """The input of a network: the arguments with which it is called once.

    Args:
        args: The positional arguments.
        kwargs: The keyword arguments, by name.
    """

    args: tuple[object, ...]
    kwargs: dict[str, object] = field(default_factory=dict)

    def call(self, model: nn.Module) -> object:
        """Return the output of a network for the input that this object holds."""
        return model(*self.args, **self.kwargs)

    def call_on_copies(self, model: nn.Module) -> object:
        """Return the output of a network for a copy of the input that this object holds.

        A forward may write into its input. Then it writes into the copy.
        """
        return self.map(torch.clone).call(model)

    def map(self, change: Callable[[Tensor], Tensor]) -> Example:
        """Return the input of a network with another tensor in place of every tensor.

        Args:
            change: Takes a tensor, and returns the one that takes its place.
        """
        return Example(changed(self.args, change), changed(self.kwargs, change))

    def map_floats(self, change: Callable[[Tensor], Tensor]) -> Example:
        """Return the input of a network with every floating-point tensor replaced.

        Args:
            change: Takes a floating-point tensor, and returns the one that takes its place.
        """
        return self.map(lambda tensor: change(tensor) if tensor.is_floating_point() else tensor)

    def tensors(self) -> list[Tensor]:
        """Return every tensor in the input of a network, also those in lists and dicts."""
        return [tensor for _, tensor in named_tensors((self.args, self.kwargs))]

    @property
    def images(self) -> Tensor:
        """The tensor in the input of a network that is taken for its images.

        It is the first floating-point tensor. If there is none, it is the first tensor.
        """
        tensors = self.tensors()
        return next((tensor for tensor in tensors if tensor.is_floating_point()), tensors[0])

    @property
    def size(self) -> tuple[int, ...]:
        """The shape of one sample in the input of a network: (C, H, W) if it is an image."""
        # The images of a list have no batch dimension.
        if self.listed:
            return tuple(self.images.shape)
        return tuple(self.images.shape[1:])

    @property
    def count(self) -> int:
        """The number of samples in the input of a network, which is a batch.

        If an argument is a list, it is the length of the list. Otherwise it is the first dimension
        of the images.
        """
        listed = next((value for value in self._values() if isinstance(value, list)), None)
        if listed is not None:
            return len(listed)
        return len(torch.atleast_1d(self.images))

    def _values(self) -> list[object]:
        return [*self.args, *self.kwargs.values()]

    def _lists(self) -> list[list[object]]:
        """Return the arguments that are lists, such as a detector's list of images."""
        return [value for value in self._values() if isinstance(value, list)]

    def _cut(self, cut: Callable[[Any], object]) -> Example | None:
        """Return the input of a network with only some of the samples in its batch.

        The result is None if the tensors and lists have different numbers of samples, or if they
        have no samples.

        Args:
            cut: Takes a tensor or list of all samples, and returns the part of it that stays.
        """
        # The numbers of samples in tensors and lists. A tensor without dimensions counts as 0.
        sizes: set[int] = set()

        def measure(value: Any) -> None:
            sizes.add(0 if isinstance(value, Tensor) and not value.ndim else len(value))

        # `changed` hands every tensor to `measure`. It is told to hand over every list as a whole,
        # too. Its result is not needed here.
        changed((self.args, self.kwargs), measure, list)
        have_same_number = len(sizes) == 1
        if not have_same_number or not min(sizes):
            return None
        return Example(changed(self.args, cut, list), changed(self.kwargs, cut, list))

    def first(self, count: int) -> Example:
        """Return the input of a network with only the first samples of its batch.

        If the tensors and lists have different numbers of samples, all samples stay.

        Args:
            count: How many samples stay.
        """
        if self.count <= count:
            return self
        return self._cut(lambda value: value[:count]) or self

    def take(self, rows: Tensor) -> Example | None:
        """Return the input of a network with only the marked samples of its batch.

        Args:
            rows: Whether each sample stays: (N,), bool.

        Returns:
            The input. None if no sample stays, or if some samples are to be left out and the
            tensors and lists have different numbers of samples.
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
        """Return the input of a network on its device, with floating-point tensors in its dtype.

        Args:
            model: The network.
        """
        # `anchor` gives a tensor of the network that has its device and dtype.
        tensor = anchor(model)
        return self.on(tensor.device).map_floats(lambda values: values.to(tensor.dtype))

    def on(self, device: torch.device) -> Example:
        """Return the input of a network with every tensor on a device."""
        return self.map(lambda tensor: tensor.to(device))

    def parted(self, size: int) -> list[Example]:
        """Divide the input of a network, which is a batch, into smaller batches in the same order.

        If the tensors and lists have different numbers of samples, the batch stays whole, and the
        result has one entry.

        Args:
            size: The number of samples in a smaller batch. The last one may have fewer.
        """
        # The number of the part to which each sample belongs.
        part_of = torch.arange(self.count) // size
        parts = [self.take(part_of == i) for i in part_of.unique()]
        return [part for part in parts if part is not None] or [self]

    @property
    def listed(self) -> bool:
        """Whether one of the arguments in the input of a network is a list.

        A detector takes a list of images, because each image may have another size.
        """
        return bool(self._lists())

    @property
    def only_images(self) -> bool:
        """Whether images are the only tensors in the input of a network.

        It is taken to be so if there is one tensor and no list, or one list that holds only
        tensors, and no tensor beside it. Then other images can take their place, and nothing else
        need be changed.
        """
        count = len(self.tensors())
        lists = self._lists()
        if lists:
            are_tensors = all(isinstance(entry, Tensor) for entry in lists[0])
            return len(lists) == 1 and are_tensors and count == len(lists[0])
        return count == 1

    @property
    def mirrors(self) -> bool:
        """Whether all tensors in the input of a network are images, which may be mirrored.

        Exactly one argument must hold tensors. Each of its tensors must have the dimensions of a
        batch of images (or of one image, if it is in a list), and be of a floating-point dtype.
        """
        with_tensors = [
            value for value in self._values() if next(named_tensors(value), None) is not None
        ]
        # The images of a list have no batch dimension.
        dimensions = 3 if self.listed else 4
        are_images = all(
            tensor.ndim == dimensions and tensor.is_floating_point() for tensor in self.tensors()
        )
        return len(with_tensors) == 1 and are_images

    @property
    def plain(self) -> str:
        """The input of a network as text, in which None takes the place of every tensor."""
        values = (changed(value, lambda _: None) for value in (self.args, self.kwargs))
        return repr(tuple(values))

    @property
    def hollow(self) -> Example:
        """The input of a network with an empty tensor in place of every tensor.

        The empty tensor has the dtype and device of the one that it replaces.
        """
        return self.map(lambda t: t.new_empty(0))

    def of(self, images: Tensor) -> Example:
        """Return the input of a network with other images in place of those that it holds.

        Args:
            images: The new images (N, C, H, W). A network that takes a list gets a list of them.

        Raises:
            TraceError: The input holds more than images, such as a second tensor.
        """
        if not self.only_images:
            entries = itertools.chain.from_iterable(self._lists())
            has_records = not all(isinstance(entry, Tensor) for entry in entries)
            what = "a list of records" if has_records else f"{len(self.tensors())} tensors"
            remedy = "Say what each is: '--input NAME=SHAPE' (in Python `inputs=`)"
            raise TraceError("the network takes more than images", f"it takes {what}", remedy)
        if self.listed:
            return self._around(list(images))
        return self.map(lambda _: images)

    def _of_dict(self, batch: Mapping[str, object]) -> Example:
        """Return the input of a network for a batch that is a dict.

        The entries of the dict become keyword arguments. But if the first argument in this object
        is a dict, the network takes the batch as its one argument.

        Args:
            batch: The dict.
        """
        if self.args and isinstance(self.args[0], Mapping):
            return Example((batch,))
        keywords = dict(batch)
        # The network gets the labels of the batch only if it takes an argument of that name.
        if "labels" not in self.kwargs:
            keywords.pop("labels", None)
        return Example((), keywords)

    def read(self, batch: object) -> tuple[Example, object]:
        """Return the input of a network for a batch of a loader, and the labels of the batch.

        The input in this object shows how the network takes images: as a tensor, in a list, or as
        one of several arguments. The labels are None if the batch has none.

        Args:
            batch: The batch. It is one of: an `Example`, a tensor of images, a dict of keyword
                arguments (its entry `labels` holds the labels), or a list of images if the network
                takes a list. Or it is a tuple or list that begins with one of these, or with all
                positional arguments, and goes on with the labels.
        """
        if isinstance(batch, Example):
            return batch, None
        # A tensor takes the place of the images in the input of this object.
        if isinstance(batch, Tensor):
            return self.of(batch), None
        if isinstance(batch, Mapping):
            return self._of_dict(batch), batch.get("labels")

        if not isinstance(batch, list | tuple) or not batch:
            return Example((batch,)), None
        # The batch itself may be the list of images that the network takes. `_around` puts it in
        # the place of the list in this object.
        if self.listed and _is_listed(batch):
            return self._around(list(batch)), None

        # Otherwise the arguments come first, as many as this object has, and the labels follow.
        count = max(1, len(self.args))
        labels = next(iter(batch[count:]), None)
        if count > 1:
            return Example(tuple(batch[:count])), labels
        if self.listed and isinstance(batch[0], list | tuple):
            return self._around(list(batch[0])), labels
        if isinstance(batch[0], list | tuple):
            return Example((batch[0],)), labels
        # The first entry holds all arguments: it is a tensor, a dict or an `Example`.
        call, _ = self.read(batch[0])
        return call, labels

    def _around(self, images: list[object]) -> Example:
        """Return the input of a network with a new list in place of the list of images.

        Args:
            images: The entries of the new list.
        """

        def put(value: object) -> object:
            return images if isinstance(value, list) else value

        return Example(
            tuple(map(put, self.args)), {name: put(value) for name, value in self.kwargs.items()}
        )

    def __str__(self) -> str:
        return ", ".join("x".join(map(str, t.shape)) for t in self.tensors())


def _is_listed(batch: list[object] | tuple[object, ...]) -> bool:
    """Return whether a batch is a list of images (C, H, W), or of dicts with an image each.

    Such a list is the argument of a network that takes a list. It holds no labels.
    """
    if not isinstance(batch, list):
        return False
    are_images = all(isinstance(entry, Tensor) and entry.ndim == 3 for entry in batch)
    return are_images or all(isinstance(entry, Mapping) for entry in batch)


def named_arguments(model: nn.Module, example: Example) -> dict[str, object]:
    """Return the arguments that a network is called with, by their names in its `forward`.

    If an argument is a dict, its entries are returned instead, by their keys.

    Args:
        model: The network.
        example: The arguments.
    """
    names = [parameter.name for parameter in _positional(model)]
    values: dict[str, object] = {}
    for i, value in enumerate(example.args):
        if isinstance(value, Mapping):
            values |= value
        else:
            # Arguments that forward takes as `*args` have no names, so their number stands in.
            name = names[i] if i < len(names) else str(i)
            values[name] = value
    return values | example.kwargs


def plain_arguments(model: nn.Module, example: Example) -> dict[str, object]:
    """Return those arguments of a network that hold no tensor, by their names in its `forward`.

    Args:
        model: The network.
        example: All arguments that the network is called with.
    """
    plain: dict[str, object] = {}
    for name, value in named_arguments(model, example).items():
        if next(named_tensors(value), None) is None:
            plain[name] = value
    return plain


def defaults(model: nn.Module, example: Example) -> list[str]:
    """Return the names of those arguments of `forward` that keep their default values.

    Args:
        model: The network.
        example: The arguments that the network is called with. All others keep their defaults.
    """
    named = named_arguments(model, example)
    optional = [each.name for each in _parameters(model) if each.default is not each.empty]
    return [name for name in optional if name not in named]


def form(model: nn.Module) -> Example:
    """Return an input with empty tensors that shows how a network takes images.

    It follows from the signature of `forward`. The images are the first argument, or the one that
    the network names in `main_input_name`. They are a tensor, or a list if the annotation says so.
    Other arguments without a default get an empty tensor, too.
    """
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

    # Otherwise only those arguments are given by name that cannot be given by position.
    keywords: dict[str, object] = {each.name: empty for each in required if each in keyword_only}
    positional_besides = len(required) - len(keywords)
    return Example((images, *[empty] * positional_besides), keywords)


def _positional(model: nn.Module) -> list[inspect.Parameter]:
    """Return those arguments of a network's `forward` that may be given without their names."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each for each in _parameters(model) if each.kind in kinds]


def _parameters(model: nn.Module) -> list[inspect.Parameter]:
    """Return the arguments of a network's `forward`, as Python's `inspect` describes them.

    The list is empty if Python does not know them.
    """
    try:
        return list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return []


def _takes_list(model: nn.Module, parameter: inspect.Parameter) -> bool:
    """Return whether an argument of a network's `forward` is annotated as a list.

    Args:
        model: The network.
        parameter: The argument.
    """
    # Reading the annotations runs the user's code, and they may name what is not imported.
    with suppress(Exception):
        return get_origin(get_type_hints(model.forward).get(parameter.name)) in (list, Sequence)
    return False


def batches(inputs: Inputs, form: Example | None = None) -> list[Example]:
    """Return the user's batches as inputs of a network.

    Args:
        inputs: One batch, or a list of batches. A batch is a tensor, a tuple of arguments, a dict
            of keyword arguments or an `Example`.
        form: An input that shows how the network takes images, from the function `form`. A batch
            that is a tensor takes the place of the images in it. If `form` is None, such a tensor
            is the network's one argument.

    Raises:
        OptionError: A tensor is missing, or has no values.
        TraceError: The network takes more than images.
    """
    # Turn each batch into an input of the network: the arguments of one call.
    given_calls = inputs if isinstance(inputs, list) else [inputs]
    calls: list[Example] = []
    for call in given_calls:
        # A tensor takes the place of the images in `form`. A dict holds the keyword arguments, and
        # a tuple the positional ones. Anything else is the one argument.
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
    """Return a tensor of the network that has the network's device and dtype.

    Its dtype is that of most numbers in the network's parameters, so one float64 constant does not
    decide. Buffers are asked only if no parameter has floating-point numbers. The tensor is empty
    if the network has no floating-point numbers at all.
    """
    for kind in ("_parameters", "_buffers"):
        # The first tensor of each dtype, and how many numbers have the dtype.
        first_of_dtype: dict[torch.dtype, Tensor] = {}
        numbers: Counter[torch.dtype] = Counter()
        for module in nn.Module.modules(model):
            for tensor in getattr(module, kind).values():
                if tensor is not None and tensor.is_floating_point():
                    first_of_dtype.setdefault(tensor.dtype, tensor)
                    # A lazy parameter has no shape yet. It counts as one number, as an empty one
                    # does.
                    numbers[tensor.dtype] += 1 if is_lazy(tensor) else max(tensor.numel(), 1)
        if first_of_dtype:
            [(most_common_dtype, _)] = numbers.most_common(1)
            return first_of_dtype[most_common_dtype]
    return torch.empty(0)


def named_tensors(value: object, name: str = "", depth: int = 8) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in tuples, lists, dicts and objects with attributes, with its name.

    The name joins keys, numbers and attributes that lead to the tensor, as in `features.0`.

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


def named_numbers(value: object, name: str = "", depth: int = 8) -> Iterator[tuple[str, complex]]:
    """Yield every plain number in tuples, lists and dicts, with its name (as `named_tensors`).

    The attributes of other objects are not looked at, because they may hold numbers that the
    network has not computed, such as a time.

    Args:
        value: The number, or the structure that holds numbers.
        name: The name of the value itself.
        depth: How many levels are looked into.
    """
    if isinstance(value, _NUMBERS):
        yield name, value
    elif depth and isinstance(value, Mapping | tuple | list):
        for key, entry in _parts(value):
            yield from named_numbers(entry, dotted(name, str(key)), depth - 1)


def named_arrays(value: object, name: str = "", depth: int = 8) -> Iterator[tuple[str, Tensor]]:
    """Yield every array and number of numpy, as a tensor, with its name (as `named_tensors`).

    Arrays that torch has no dtype for are left out.

    Args:
        value: The array, or the structure that holds arrays.
        name: The name of the value itself.
        depth: How many levels are looked into.
    """
    if isinstance(value, np.ndarray | np.generic):
        array = _as_tensor(value)
        # Some numbers of numpy are Python's, too, which `named_numbers` finds.
        if array is not None and not isinstance(value, _NUMBERS):
            yield name, array
    elif depth:
        for key, entry in _parts(value):
            yield from named_arrays(entry, dotted(name, str(key)), depth - 1)


def _as_tensor(array: np.ndarray[Any, Any] | np.generic) -> Tensor | None:
    """Return an array or number of numpy as a tensor, or None if torch has no such numbers.

    It has no objects, no long doubles, and no numbers with their bytes in another order.
    """
    try:
        return torch.from_numpy(np.array(array))
    except (TypeError, ValueError):
        return None


def _parts(value: object) -> Iterable[tuple[object, object]]:
    """Return the entries of a value with their keys. A value without entries gives none.

    The keys are those of a dict, the numbers of a list, or the names of attributes.
    """
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if isinstance(value, list | tuple):
        return enumerate(value)
    if is_record(value):
        return attributes(value).items()
    return ()


def is_record(value: object) -> bool:
    """Return whether a value is an object that holds results in attributes, such as a dataclass.

    A distribution of torch is one, too. Functions, and objects of numpy and Python itself, are
    none.
    """
    is_a_value = type(value).__module__.split(".")[0] in ("builtins", "numpy")
    return not (is_a_value or callable(value)) and bool(attributes(value))


def attributes(value: object) -> dict[str, object]:
    """Return what an object holds in attributes, by name: in its `__dict__` and in its slots."""
    found = dict(getattr(value, "__dict__", {}))
    for name in _slots(type(value)):
        # A slot to which nothing was assigned has no value.
        with suppress(AttributeError):
            found[name] = getattr(value, name)
    return found


def _slots(kind: type) -> Iterator[str]:
    """Yield the names of the slots of a class and its bases, as they are read from outside."""
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if not name.startswith("__"):
                yield name
            elif not name.endswith("__"):
                # Python stores a private name under that of its class.
                yield f"_{base.__name__.lstrip('_')}{name}"


def unread(value: object, name: str = "", depth: int = 8) -> Iterator[str]:
    """Yield the name of every value that may hold results and is not read.

    Neither `named_tensors` nor `named_numbers` nor `named_arrays` finds it: it is an array of
    objects, a set of tensors, an object of an unknown kind, or nested too deeply.

    Args:
        value: What a forward returned, or a part of it.
        name: The name of the value itself.
        depth: How many levels are looked into.
    """
    if isinstance(value, Tensor | _NUMBERS) or _holds_no_results(value):
        return
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind not in _TEXTS_AND_DATES and _as_tensor(value) is None:
            yield name
        return
    if depth and isinstance(value, Mapping | tuple | list):
        for key, entry in _parts(value):
            yield from unread(entry, dotted(name, str(key)), depth - 1)
    elif depth and is_record(value):
        # An object may hold anything beside its results, so only arrays count.
        for key, entry in attributes(value).items():
            if isinstance(entry, np.ndarray):
                yield from unread(entry, dotted(name, key), depth - 1)
    else:
        yield name


def _holds_no_results(value: object) -> bool:
    """Return whether a value, such as a text or a function, is no result of a computation."""
    if isinstance(value, set | frozenset):
        return all(isinstance(entry, _NUMBERS) or _holds_no_results(entry) for entry in value)
    return isinstance(value, _WITHOUT_RESULTS) or inspect.isroutine(value)


def changed(value: object, change: Callable[[Any], object], *kinds: type) -> Any:
    """Return the same structure in which `change` has replaced every tensor.

    Args:
        value: The structure of tuples, lists, dicts and objects with attributes.
        change: Returns the replacement of a tensor.
        kinds: Further classes, such as list, whose objects `change` replaces as a whole.
    """
    if isinstance(value, (Tensor, *kinds)):
        return change(value)
    if isinstance(value, Mapping):
        return {key: changed(entry, change, *kinds) for key, entry in value.items()}
    # A named tuple takes its entries one by one, and any other tuple takes them all at once.
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(changed(entry, change, *kinds) for entry in value))
    if isinstance(value, list | tuple):
        return type(value)(changed(entry, change, *kinds) for entry in value)

    # An object without tensors is not copied.
    if is_record(value) and next(named_tensors(value), None) is not None:
        record = copy.copy(value)
        for name, attribute in changed(attributes(value), change, *kinds).items():
            # A frozen dataclass forbids its own assignment.
            object.__setattr__(record, name, attribute)
        return record
    return value
