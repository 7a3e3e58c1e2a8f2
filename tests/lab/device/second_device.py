"""A second device, `second`, for a machine that has none: torch's own PrivateUse1, with every operation in Python.

Its tensors say that they are on it, and torch refuses what it refuses on a GPU: `.numpy()`, CPU tensors among those of
the device, CPU generators. Their memory is the CPU's, so values are real. Importing this file patches torch: do it in a
process of its own. What a GPU does else can be switched on: `tf32()`, `without_double()`. Waits (a value goes to the
CPU) and uploads are counted by the line of normswap that asks for them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "second"
waits: Counter[str] = Counter()
uploads: Counter[str] = Counter()
_AS_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_KDL_EXT_DEV, _KDL_UINT = 12, 1
_PACKAGE = f"{(importlib.util.find_spec('normswap').submodule_search_locations or [''])[0]}/"  # type: ignore[union-attr]
_generator = torch.Generator()
_missing: set[torch.dtype] = set()
_tensor_cores: set[str] = set()
# What may be on the CPU beside tensors of the device: indices, and the other end of a copy.
_MIXED = {
    "aten::index.Tensor",
    "aten::index.Tensor_out",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_copy_from",
}
_SHAPES_FROM_VALUES = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::bincount",
                       "aten::equal", "aten::_local_scalar_dense", "aten::is_nonzero"}  # fmt: skip
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmv", "aten::mv"}
_CONVOLUTIONS = {"aten::convolution", "aten::convolution_backward"}


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]  # fmt: skip


class _Managed(ctypes.Structure):
    """DLPack's record of memory that somebody else owns."""


_Managed._fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def _wrapped(value: Tensor) -> Tensor:
    """A tensor of the device that has the CPU tensor's memory, form and values."""
    storage = value.untyped_storage()
    if not storage.nbytes():
        storage.resize_(8)
    shape = (ctypes.c_int64 * 1)(storage.nbytes())
    record = _Managed(_DLTensor(storage.data_ptr(), _KDL_EXT_DEV, 0, 1, _KDL_UINT, 8, 1, shape, None, 0))
    memory = torch._C._from_dlpack(_capsule(ctypes.addressof(record), b"dltensor", None))
    memory.untyped_storage().of = storage, record, shape  # lives and dies with the memory of the device
    room = storage.nbytes() // value.itemsize * value.itemsize
    whole = torch.ops.aten.as_strided.default.redispatch(_AS_ON_CPU, memory, (room,), (1,), 0)
    return _strided(torch.ops.aten.view.dtype.redispatch(_AS_ON_CPU, whole, value.dtype), value)


def _strided(memory: Tensor, like: Tensor) -> Tensor:
    strided: Tensor = torch.ops.aten.as_strided.default.redispatch(
        _AS_ON_CPU, memory, like.size(), like.stride(), like.storage_offset()
    )
    return strided


def _unwrapped(tensor: Tensor) -> Tensor:
    """The CPU tensor with the memory of the device's."""
    storage = tensor.untyped_storage().of[0]
    value = torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    value = value.conj() if tensor.is_conj() else value
    return value._neg_view() if tensor.is_neg() else value


def _rounded(value: Any) -> Any:
    """To the 10 bits of mantissa that TF32 reads."""
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return value
    bits = value.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def _coarse(name: str) -> bool:
    """Whether a GPU would compute this in TF32, as torch's settings are."""
    convolution = name in _CONVOLUTIONS and torch.backends.cudnn.allow_tf32
    return bool(_tensor_cores) and (convolution or (name in _PRODUCTS and torch.backends.cuda.matmul.allow_tf32))


def _asker() -> str:
    """The innermost line of normswap that is being run, or else of what is no torch."""
    frame, otherwise = sys._getframe(2), "backward"
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            return f"{file.removeprefix(_PACKAGE)}:{frame.f_lineno}"
        if otherwise == "backward" and "/torch/" not in file and file != __file__:
            otherwise = f"{file.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return otherwise


def _check_devices(name: str, tensors: list[Tensor]) -> None:
    """Refuse what torch refuses on a GPU: operands of several devices, but for numbers."""
    if name in _MIXED:
        return
    strangers = [tensor for tensor in tensors if tensor.device.type != NAME and tensor.ndim]
    if strangers:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{NAME}:0 and {strangers[0].device}! (when checking {name})"
        )


def _check_dtypes(tensors: list[Any]) -> None:
    for one in tensors:
        dtype = one.dtype if isinstance(one, Tensor) else one
        if dtype in _missing:
            raise TypeError(f"Cannot convert a {NAME} tensor to {dtype}: the device does not have it")


def _copy_from(source: Tensor, target: Tensor) -> Tensor:
    """Of the device, to it or from it: what `copy_` and `to` come down to."""
    _check_dtypes([tensor for tensor in (source, target) if tensor.device.type == NAME])
    if target.device.type == "cpu":
        waits[_asker()] += 1
    elif source.device.type == "cpu":
        uploads[_asker()] += 1
    one, two = (_unwrapped(t) if t.device.type == NAME else t for t in (source, target))
    two.copy_(one)
    return target


def _operation(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation: carried out on the CPU tensors, its results put back on the device."""
    name = op._schema.name if not op._schema.overload_name else f"{op._schema.name}.{op._schema.overload_name}"
    if name.startswith("aten::_copy_from"):
        return _copy_from(*args[:2])
    flat, form = pytree.tree_flatten((args, kwargs))
    _check_devices(name, [one for one in flat if isinstance(one, Tensor)])
    if op._schema.name in _SHAPES_FROM_VALUES:
        waits[_asker()] += 1
    theirs = [one for one in flat if isinstance(one, Tensor) and one.device.type == NAME]
    twins = {id(one): _unwrapped(one) for one in theirs}
    replaced = [twins.get(id(one), one) if isinstance(one, Tensor) else _here(one) for one in flat]
    args, kwargs = pytree.tree_unflatten(replaced, form)
    written = list(_written(op, flat, form))
    if any(one.name == "generator" for one in op._schema.arguments) and kwargs.get("generator") is None:
        kwargs["generator"] = _generator
    if _coarse(op._schema.name):
        args = pytree.tree_map(_rounded, args)
    result = op(*args, **kwargs)
    return pytree.tree_map(lambda one: _back(one, theirs, twins, written), result)


def _convolution_backward(gradient: Tensor, x: Tensor, weight: Tensor, *args: Any) -> Any:
    backward = torch.ops.aten.convolution_backward.default
    return _operation(backward, gradient, x, weight, [gradient.shape[1]], *args)


def _written(op: Any, flat: list[Any], form: Any) -> Iterator[Tensor]:
    """The tensors that the operation writes to."""
    args, kwargs = pytree.tree_unflatten(flat, form)
    for i, argument in enumerate(op._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (one for one in pytree.tree_leaves(value) if isinstance(one, Tensor))


def _here(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu'")
    if isinstance(value, torch.dtype):
        _check_dtypes([value])
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value


def _back(value: Any, theirs: list[Tensor], twins: dict[int, Tensor], written: list[Tensor]) -> Any:
    """A result on the device: what was written to is itself, a view shares the memory of what it is of."""
    if not isinstance(value, Tensor):
        return value
    _check_dtypes([value])
    for one in written:
        if twins.get(id(one)) is value:
            if one.shape != value.shape or one.stride() != value.stride():
                one.data = _wrapped(value.clone())
            return one
    address = value.untyped_storage().data_ptr()
    for one in theirs:
        if address == one.untyped_storage().data_ptr() and not (value.is_conj() or value.is_neg()):
            memory = one
            if value.dtype != one.dtype:
                memory = torch.ops.aten.view.dtype.redispatch(_AS_ON_CPU, one, value.dtype)
            return _strided(memory, value)
    return _wrapped(value.resolve_conj().resolve_neg())


@contextmanager
def tf32() -> Iterator[None]:
    """A device that has tensor cores, for a while, and a user who lets products use them, too."""
    before = torch.backends.cuda.matmul.allow_tf32
    _tensor_cores.add("TF32")
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        _tensor_cores.clear()
        torch.backends.cuda.matmul.allow_tf32 = before


@contextmanager
def without_double() -> Iterator[None]:
    """A device that has no float64, for a while."""
    _missing.add(torch.float64)
    try:
        yield
    finally:
        _missing.clear()


class _Module:
    """`torch.second`: what torch asks a device's module."""

    @staticmethod
    def is_initialized() -> bool:
        return True

    is_available = is_initialized

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        _generator.manual_seed(seed)

    manual_seed = manual_seed_all

    @staticmethod
    def get_rng_state(device: Any = 0) -> Tensor:
        return _generator.get_state()

    @staticmethod
    def set_rng_state(state: Tensor, device: Any = 0) -> None:
        _generator.set_state(state)

    @staticmethod
    def synchronize(device: Any = 0) -> None:
        pass


def _deep_copy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """`copy.deepcopy` of a tensor; of one on the device, whose storage torch cannot copy, of its values."""
    if tensor.device.type != NAME or isinstance(tensor, torch.nn.Parameter):
        return _deep_copy_of_torch(tensor, memo)
    if id(tensor) not in memo:
        memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    copied: Tensor = memo[id(tensor)]
    return copied


_setup_privateuseone_for_python_backend(NAME, backend_module=_Module)
_deep_copy_of_torch = Tensor.__deepcopy__
Tensor.__deepcopy__ = _deep_copy  # type: ignore[method-assign]
_library, _aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
_library.fallback(_operation, "PrivateUse1")
# What torch asks in place of `convolution` of a device that is none of its own.
_aten.impl("convolution_overrideable", partial(_operation, torch.ops.aten.convolution.default), "PrivateUse1")
_aten.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
