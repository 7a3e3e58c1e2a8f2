"""What holds for a while: eval mode, nearly training mode, hooks, full precision."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normswap.layers.seeding import seeded

# It is called with the number of steps so far, and the total (0 where it is not known).
Progress: TypeAlias = Callable[[int, int], None]


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Inside a `with` block, put networks in eval mode. Then each module gets its mode back."""
    modes: list[tuple[nn.Module, bool]] = []
    for model in models:
        modes += [(module, module.training) for module in nn.Module.modules(model)]

    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def undisturbed(*models: nn.Module) -> Iterator[None]:
    """Inside a `with` block, put networks in eval mode. Then undo what a forward wrote to them.

    A forward may write counters, caches, or a scale that the first batch sets. The attributes and
    tensors of all modules are put back, except in modules whose class is torch's own.
    """
    modules: set[nn.Module] = set()
    for model in models:
        modules.update(nn.Module.modules(model))

    with ExitStack() as stack:
        for module in modules:
            if not type(module).__module__.startswith("torch."):
                stack.callback(_restore, module, dict(vars(module)), list(_contents(module)))
        stack.enter_context(evaluating(*models))
        yield


# What every module has beside its tensors and children: hooks, which no forward registers.
_HOOKS = vars(nn.Module()).keys() - {"_parameters", "_buffers", "_modules"}
# A tensor or collection, a copy of its contents, and the tensor's memory (None for a collection).
Contents: TypeAlias = tuple[Any, Any, Tensor | None]


def _contents(module: nn.Module) -> Iterator[Contents]:
    """Yield the tensors and plain collections that a module may write into, nested ones too.

    Each comes as a triple: the tensor or collection, a copy of its contents, and the tensor's
    memory (None for a collection). The contents can then be put back.
    """
    # `_HOOKS` has the attributes of every module, such as its hooks. No forward writes into them.
    values = [value for name, value in vars(module).items() if name not in _HOOKS]
    values += [*module._parameters.values(), *module._buffers.values()]

    visited = set[int]()
    while values:
        value = values.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        # The tensor's memory (`data`) is kept, too, because a forward may give the tensor another.
        if isinstance(value, Tensor) and not value.is_meta:
            yield value, value.detach().clone(), value.data
        elif type(value) in (dict, OrderedDict, list, set, tuple):
            values += value.values() if isinstance(value, dict) else value
            # A tuple cannot be written into, but what it holds can.
            if not isinstance(value, tuple):
                yield value, copy.copy(value), None


@torch.no_grad()
def _restore(module: nn.Module, attributes: dict[str, object], contents: list[Contents]) -> None:
    """Undo what was written into a module.

    Args:
        module: The module.
        attributes: The attributes that it had.
        contents: Its tensors and collections with the contents that they had, from `_contents`.
    """
    for value, before, memory in contents:
        if memory is not None:
            # A forward may have given the tensor other memory, or written into its own.
            value.data = memory
            if not torch.equal(memory, before):
                memory.copy_(before)
        # A collection is written to in place, because others may hold it, too.
        elif isinstance(value, list):
            value[:] = before
        else:
            value.clear()
            value.update(before)

    vars(module).clear()
    vars(module).update(attributes)


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Keep hooks registered inside a `with` block, and remove all of them at its end.

    Args:
        handles: The handles of the hooks. They may come from a generator that registers each hook
            when its handle is asked for: if one fails, those before it are removed.
    """
    with ExitStack() as hooks:
        for handle in handles:
            hooks.enter_context(handle)
        yield


# The default dtype that the caller of `full_precision` had set, which the network's forward gets.
_callers_dtype: ContextVar[torch.dtype | None] = ContextVar("_callers_dtype", default=None)


@contextmanager
def full_precision() -> Iterator[None]:
    """Inside a `with` block, switch off torch's settings that make arithmetic less exact.

    These are autocast, TF32 and other shortened products of float32, and a default dtype other than
    float32. Two more settings that would be in the way are switched off: the refusal of functions
    that are not deterministic, and `torch.inference_mode`, in which no tensor can be trained. All
    are restored at the end.
    """
    # `callers_dtype` goes back to this dtype. If such blocks are nested, the outer caller's counts.
    default_dtype = torch.get_default_dtype()
    token = _callers_dtype.set(_callers_dtype.get() or default_dtype)
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        with ExitStack() as stack:
            kinds = ["cpu"]
            # Up to torch 2.6 asking for an accelerator that is not there is an error. The text of a
            # device is its kind and perhaps a number, as in `cuda:0`.
            if torch.accelerator.is_available():
                kinds.append(str(torch.accelerator.current_accelerator()).partition(":")[0])
            for kind in kinds:
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            stack.enter_context(_without_tf32())
            stack.enter_context(torch.inference_mode(False))
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warns_only)
        torch.set_default_dtype(default_dtype)
        _callers_dtype.reset(token)


@contextmanager
def callers_dtype() -> Iterator[None]:
    """Inside a `with` block, use the default dtype that the caller of `full_precision` had set.

    A network's forward runs in it, so that tensors that it makes have the dtype that they usually
    have. Outside of `full_precision` nothing changes.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(_callers_dtype.get() or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _gpu_switches(cudnn: Any, products: Any) -> list[tuple[Any, str, object]]:
    """Return the settings of torch that allow TF32 on a GPU, with values that switch it off.

    Each is a triple: the object that has the setting, the name of the attribute, and the value.

    Args:
        cudnn: `torch.backends.cudnn`.
        products: `torch.backends.cuda.matmul`.
    """
    older: list[tuple[Any, str, object]] = [
        (cudnn, "allow_tf32", False),
        (products, "allow_tf32", False),
    ]
    if not hasattr(cudnn, "conv"):
        return older

    # After `torch.backends.disable_global_flags()`, which torch's own test helpers call, only the
    # newer names can be set.
    newer: list[tuple[Any, str, object]] = [
        (cudnn.conv, "fp32_precision", "ieee"),
        (products, "fp32_precision", "ieee"),
    ]
    if torch.backends.flags_frozen():
        return newer
    # Values that were set by the newer names cannot be read by the older ones.
    try:
        for holder, name, _ in older:
            getattr(holder, name)
    except RuntimeError:
        return newer
    return older


def _cpu_switches() -> list[tuple[Any, str, object]]:
    """Return the settings of torch that shorten products on a CPU, as `_gpu_switches` does.

    Older versions of torch have none for the CPU alone.
    """
    cpu = cast(Any, torch.backends.mkldnn)
    if not (hasattr(cpu, "matmul") and hasattr(cpu, "conv")):
        return []
    return [(cpu.matmul, "fp32_precision", "ieee"), (cpu.conv, "fp32_precision", "ieee")]


def _product_precision() -> str | None:
    """Return what `torch.set_float32_matmul_precision` was given: highest, high or medium.

    The result is None if the caller has used the newer names, by which torch cannot tell it.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Inside a `with` block, compute products of float32 numbers in float32.

    Otherwise torch may use TF32 in convolutions on a GPU, which keeps 10 bits of each factor. On a
    CPU it may use bfloat16, if the user has called `torch.set_float32_matmul_precision`.
    """
    cudnn = cast(Any, torch.backends.cudnn)
    products = cast(Any, torch.backends.cuda.matmul)
    gpu_switches = _gpu_switches(cudnn, products)
    cpu_switches = _cpu_switches()

    # Remember the settings. `allow_tf32` has two values, and the precision of products has three by
    # one other name and four by the newest, so it is remembered by all of its names.
    gpu_before = [(holder, name, getattr(holder, name)) for holder, name, _ in gpu_switches]
    cpu_before = [(holder, name, getattr(holder, name)) for holder, name, _ in cpu_switches]
    precision = _product_precision()
    newest_before = []
    if hasattr(products, "fp32_precision"):
        newest_before.append((products, "fp32_precision", products.fp32_precision))

    try:
        for holder, name, value in [*gpu_switches, *cpu_switches]:
            setattr(holder, name, value)
        yield
    finally:
        # Each name sets values of those that follow, and none of those before it.
        for holder, name, value in gpu_before:
            setattr(holder, name, value)
        if precision is not None:
            torch.set_float32_matmul_precision(precision)
        for holder, name, value in [*cpu_before, *newest_before]:
            setattr(holder, name, value)


@contextmanager
def with_heads(*models: nn.Module) -> Iterator[None]:
    """Inside a `with` block, let networks run their auxiliary heads, as they do in training.

    All layers are in eval mode, and only the modules that hold them are in training mode. torch's
    random numbers start from a fixed seed. At the end of the block all is restored.
    """
    devices: set[torch.device] = set()
    with undisturbed(*models):
        for model in models:
            # Put the modules that hold others in training mode. Single layers stay in eval mode.
            show_heads(model)
            devices.update(parameter.device for parameter in nn.Module.parameters(model))
        with seeded(*devices):
            yield


def show_heads(model: nn.Module) -> None:
    """Put the modules that hold other modules in training mode, so that auxiliary heads run.

    A forward may ask for `self.training` to decide whether it runs them. Single layers, and the
    containers of torch, stay in their mode.
    """
    for module in nn.Module.modules(model):
        if module._modules and not type(module).__module__.startswith("torch.nn"):
            module.__dict__["training"] = True
