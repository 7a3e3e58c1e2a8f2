"""How the recorder names an operation in its graph: as torch.fx's symbolic trace does."""

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from normswap.models.calling import attributes, is_record

Function: TypeAlias = Callable[..., object]
Args: TypeAlias = tuple[object, ...]
Kwargs: TypeAlias = Mapping[str, object]
# These ask for the size of a tensor. What a forward does next may depend on the answer.
_ASK_SIZE = (
    "size",
    "numel",
    "nelement",
    "stride",
    "storage_offset",
    "__len__",
    "is_contiguous",
    "is_same_size",
)
_SPLIT = ("unbind", "split", "tensor_split", "__iter__")
_SIZES = frozenset((*_ASK_SIZE, *_SPLIT, "shape", "nbytes", "names"))
# These ask for the type, the device or the kind of a tensor. They read no value either.
_ASK_TYPE = (
    "type",
    "is_floating_point",
    "is_complex",
    "is_signed",
    "is_conj",
    "is_neg",
    "result_type",
    "can_cast",
)
_ASK_PLACE = (
    "get_device",
    "is_pinned",
    "is_shared",
    "is_set_to",
    "_is_view",
    "is_distributed",
    "element_size",
)
_ASK_OTHER = (
    "dim",
    "ndimension",
    "__hash__",
    "has_names",
    "is_inference",
    "is_tensor",
    "retain_grad",
    "register_hook",
)
_PLAIN = frozenset((*_ASK_SIZE, *_ASK_TYPE, *_ASK_PLACE, *_ASK_OTHER))
# These properties of a tensor return its values. All others return its shape, dtype or the like.
_VALUES = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))
_OPERATORS = {
    name: getattr(operator, name)
    for name in ("add", "sub", "mul", "matmul", "truediv", "getitem", "neg")
}
_OPERATORS |= {
    "div": operator.truediv,
    "true_divide": operator.truediv,
    "iadd": operator.iadd,
    "imul": operator.imul,
}
_OPERATORS |= {
    "add_": operator.iadd,
    "sub_": operator.isub,
    "mul_": operator.imul,
    "div_": operator.itruediv,
}
# Objects may refer to one another in a circle, so their attributes are followed only to this depth.
_DEEPEST = 8

_SWAPPED = {f"r{name}": _OPERATORS[name] for name in ("add", "sub", "mul", "div", "truediv")}


def setitem_(x: Tensor, index: int, value: Tensor) -> Tensor:
    """Do `x[index] = value` and return x.

    A statement returns nothing, but a node of a recorded graph needs a value.
    """
    x[index] = value
    return x


def after(x: Tensor, write: object) -> Tensor:
    """Return x. The function exists to be the target of a node in a recorded graph.

    The node stands for the value that x has after something was written to its memory through a
    view of x.

    Args:
        x: The tensor.
        write: The node that wrote to the view. As an argument it makes the new value depend on it.
    """
    return x


def left(x: object, function_name: str) -> None:
    """Do nothing. The function exists to be the target of a node in a recorded graph.

    The node says that Python reads the value of x here, for example by `x.item()`. A graph cannot
    show what Python does with the number.

    Args:
        x: The value.
        function_name: The name of the function by which Python reads it, such as `item`.
    """


def is_plain(func: Function) -> bool:
    """Whether a function reads no numbers of its tensors, but only a shape, a dtype or the like.

    Args:
        func: A function or method of torch, or the getter of a property of tensors.
    """
    property_name = _property(func)
    if property_name is None:
        return getattr(func, "__name__", "") in _PLAIN
    return property_name not in _VALUES


def asks_size(func: Function) -> bool:
    """Whether a function tells its caller the size of a tensor, as `x.shape` and `x.split` do.

    What a forward does next may then depend on the size.

    Args:
        func: A function or method of torch, or the getter of a property of tensors.
    """
    return (_property(func) or getattr(func, "__name__", "")) in _SIZES


def _property(func: Function) -> str | None:
    """Return the name of the property that `func` is the getter of, or None if it is no getter.

    For `Tensor.shape.__get__`, which torch reports when x.shape is read, the name is `shape`.
    """
    if getattr(func, "__name__", "") != "__get__":
        return None
    return getattr(getattr(func, "__self__", None), "__name__", None)


class Attribute(str):
    """The name of an attribute on the way to a tensor inside of a value, as `places` yields it.

    The class tells it from the keys of dicts and the positions in lists, which are plain.
    """


def places(
    value: object, keys: tuple[object, ...] = ()
) -> Iterator[tuple[tuple[object, ...], Tensor]]:
    """Yield a pair (keys, tensor) for every tensor in a value.

    The keys lead from the value to the tensor: dict keys, positions in lists, and attribute names.

    Args:
        value: A tensor, a collection, or an object with tensors among its attributes
            (`calling.is_record`). Collections may be nested to any depth. The attributes of an
            object are followed if fewer than eight keys lead to the object.
        keys: The keys before those that are yielded. The function passes them to itself. A caller
            leaves them empty.
    """
    if isinstance(value, Tensor):
        yield keys, value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from places(entry, (*keys, key))
    elif isinstance(value, list | tuple):
        for position, entry in enumerate(value):
            yield from places(entry, (*keys, position))
    elif is_record(value) and len(keys) < _DEEPEST:
        for name, entry in attributes(value).items():
            yield from places(entry, (*keys, Attribute(name)))


def spelled(func: Function, args: Args, kwargs: Kwargs) -> tuple[str, object, Args, Kwargs]:
    """Return how torch.fx writes a call as a node of a graph.

    The result is what `torch.fx.Graph.create_node` takes: the kind of the node, such as
    `call_function`, its target (a function, or the name of a method), and the arguments.

    Args:
        func: The function that a forward called.
        args: The positional arguments of the call.
        kwargs: The keyword arguments of the call.
    """
    name = getattr(func, "__name__", "")
    property_name = _property(func)
    if property_name is not None:
        return "call_function", getattr, (args[0], property_name), {}
    if getattr(Tensor, name, None) is not func:
        return "call_function", func, args, kwargs

    # `func` is a method of tensors. Python calls a method such as __add__ for an operator. A method
    # becomes an operator only without further arguments, such as `alpha`, which operators lack.
    operation = name.strip("_") if name.startswith("__") else name
    operands = 1 if operation == "neg" else 2
    if operation == "setitem":
        return "call_function", setitem_, args, kwargs
    if operation in _OPERATORS and not kwargs and len(args) == operands:
        return "call_function", _OPERATORS[operation], args, kwargs
    # Python calls y.__radd__(x) for x + y, so the operator takes the arguments in reverse.
    if operation in _SWAPPED:
        return "call_function", _SWAPPED[operation], args[::-1], kwargs
    return "call_method", name, args, kwargs


def version(tensor: Tensor) -> int:
    """Return how often the tensor was written to, as torch counts it.

    The result is 0 for a tensor whose writes torch does not count, such as one of inference mode.
    """
    try:
        return tensor._version
    except RuntimeError:
        return 0


def memory(tensor: Tensor) -> StorageWeakRef | None:
    """Return a dict key for the memory of a tensor, or None if the tensor has no storage.

    Views of one tensor have equal keys. An address would be no key, because another tensor may get
    the same address later.
    """
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (RuntimeError, NotImplementedError):
        return None


def shapes(value: object) -> object:
    """Return the shape of a tensor, or a tuple of the shapes of the tensors in a list or tuple.

    Lists may be nested. Anything that is neither a tensor nor a list or tuple gives None.
    """
    if isinstance(value, Tensor):
        return value.shape
    if isinstance(value, list | tuple):
        return tuple(shapes(entry) for entry in value)
    return None
