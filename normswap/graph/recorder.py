"""SEE: one real forward, recorded as a graph whose leaves are norms and childless modules.

The network runs in eval mode, without gradients, on an example. A torch function mode sees every
operation; calls of modules are intercepted as torch.fx does it. Each tensor that was computed from
the input carries its node. Shapes, branches and loops run as plain Python, so the graph has the
operations that were done.

A value that Python reads (`.item()`, `bool`, `.numpy()`) gets a reader in the graph that nothing
can pass. A tensor that was overwritten through a view becomes a value of both. A tensor of unknown
origin must be a constant.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from normswap.copying import dotted, tree
from normswap.errors import TraceError
from normswap.graph import spelling
from normswap.graph.spelling import Args, Function, Kwargs, memory, version
from normswap.layers import affine, own_forwards
from normswap.models.calling import Example, named_tensors

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_LOOKS = {
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "item",
    "tolist",
    "is_nonzero",
    "equal",
    "allclose",
}
_MARK = "_normswap_mark"
_CASTS = frozenset(("float", "half", "bfloat16", "to", "type", "type_as"))
_CONSTANTS = (
    "tensor",
    "as_tensor",
    "new_tensor",
    "scalar_tensor",
    "zeros",
    "ones",
    "full",
    "empty",
    "eye",
)
_RANGES = (
    "arange",
    "linspace",
    "logspace",
    "meshgrid",
    "hann_window",
    "rand",
    "randn",
    "from_numpy",
)
_ALIKE = ("zeros_like", "ones_like", "full_like", "empty_like")
_REDUCTIONS = ("softmax", "log_softmax", "cumsum", "sum", "mean")
_MAKERS = frozenset((*_CASTS, *_CONSTANTS, *_RANGES, *_ALIKE, *_REDUCTIONS))
_NARROW = (torch.float32, torch.float16, torch.bfloat16)


class _Mark:
    """The recorder's note on a tensor: the node that made it, or a collection of tensors and the
    keys in it.
    """

    __slots__ = ("keys", "node", "run", "version", "written")

    def __init__(
        self, run: Recorder, node: fx.Node | None, at: int, keys: tuple[object, ...] = ()
    ) -> None:
        self.run = run
        self.node = node
        self.version = at
        self.keys = keys
        self.written = False

    def __deepcopy__(self, memo: object) -> _Mark:
        return self


class Recorder(TorchFunctionMode):
    """One run of a twin; `look` is called with the name of each new node and its value."""

    def __init__(self, model: nn.Module, look: Callable[[str, object], None] | None = None) -> None:
        super().__init__()
        self.model = model
        self.look = look
        self.graph = fx.Graph()
        self.paths: dict[int, str] = {}
        self.named: dict[int, str] = {}
        for path, module in tree(model).items():
            self.paths.setdefault(id(module), path)
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self.named.setdefault(id(tensor), dotted(path, name))
        self.around: list[str] = []
        self.failed = ""
        self.outputs: dict[fx.Node, list[str]] = {}
        self.opaque: dict[str, str] = {}
        self.constants: dict[str, Tensor] = {}
        self.untracked: dict[str, str] = {}
        self.branches: list[str] = []
        self.size_dependent = False
        self.resting = False
        # A convolution that holds modules holds them to pad its input.
        holders = (module for module in tree(model).values() if module._modules)
        self.convolutions = {id(module) for module in holders if own_forwards.computes(module)}
        self._known: dict[int, tuple[Tensor, fx.Node, int]] = {}
        self._writes: dict[StorageWeakRef | None, fx.Node] = {}

    def run(self, example: Example) -> None:
        """Record the forward on `example`, whose tensors are not changed."""
        names = iter(
            name for name, _ in named_tensors((dict(enumerate(example.args)), example.kwargs))
        )

        def enter(tensor: Tensor) -> Tensor:
            value = tensor.detach().clone()
            argument, *keys = next(names).split(".")[1:]
            name = "_".join((argument, *keys))
            node = self._add(
                "placeholder", f"x{name}" if name[0].isdigit() else name, (), {}, value
            )
            node.meta["place"] = (argument, *(key for key in keys if not key.isdigit()))
            self._set(value, node)
            return value

        entered = example.map(enter)
        with intercepted(self._call), self:
            result = entered.call(self.model)
        nodes = [self._node(tensor) for _, tensor in named_tensors(result)]
        outputs = tuple(node for node in nodes if node is not None)
        self._add("output", "output", (outputs[0] if len(outputs) == 1 else outputs,), {}, None)

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if self.resting:
            return func(*args, **kwargs)
        self.size_dependent = self.size_dependent or spelling.asks_size(func)
        if spelling.is_plain(func):
            return func(*args, **kwargs)
        tensors = [tensor for _, tensor in named_tensors((args, kwargs))]
        if not any(self._is_tracked(tensor) for tensor in tensors):
            result = func(*args, **kwargs)
            for _, tensor in named_tensors(result):
                if id(tensor) not in self.named:
                    self._set(tensor, None)
            return result
        kind, target, positional, named = spelling.spelled(func, args, kwargs)
        positional = self._mapped(positional)
        named = self._mapped(named)
        before = [version(tensor) for tensor in tensors]
        result = func(*args, **kwargs)
        overwritten = [t for t, old in zip(tensors, before, strict=True) if version(t) != old]
        if not overwritten and next(named_tensors(result), None) is None:
            place = (next(iter(positional), None), func.__name__)
            kind = "call_function"
            target = spelling.left
            positional = place
            named = {}
            if func.__name__ in _LOOKS:
                self.branches.append(next(reversed(self.around), ""))
        node = self._add(kind, target, positional, named, result)
        return self._made(node, result, tensors, overwritten)

    def _add(self, kind: str, target: Any, args: Any, kwargs: Any, value: object) -> fx.Node:
        node = self.graph.create_node(kind, target, args, kwargs)
        node.meta["inside"] = tuple(self.around)
        node.meta["shape"] = spelling.shapes(value)
        node.meta["dtype"] = getattr(value, "dtype", None)
        if self.look is not None:
            self.look(node.name, value)
        return node

    def _made(
        self, node: fx.Node, result: object, tensors: list[Tensor], overwritten: list[Tensor]
    ) -> object:
        """Mark the tensors that `node` wrote and returned; returns the result, as a new tensor
        object if needed.
        """
        # A layer that copies its input may be put there later.
        leaf = node.op == "call_module"
        for tensor in overwritten:
            self._writes[memory(tensor)] = node
            self._set(tensor, node)
            if leaf and (mark := self._mark(tensor)) is not None:
                mark.written = True
        if isinstance(result, Tensor):
            if any(result is t for t in tensors) and (
                leaf or not any(result is t for t in overwritten)
            ):
                # A layer that returns its input gets a new tensor object on the same memory, for
                # its own node.
                result = torch.Tensor.detach(result)
            self._set(result, node)
            return result
        for keys, tensor in spelling.places(result):
            if not any(tensor is t for t in tensors):
                self._set(tensor, node, keys)
        return result

    def _set(self, tensor: Tensor, node: fx.Node | None, keys: tuple[object, ...] = ()) -> None:
        if id(tensor) in self.named or id(tensor) in self._known:
            if node is not None:
                self._keep(tensor, node)
            return
        setattr(tensor, _MARK, _Mark(self, node, version(tensor), keys))

    def _mark(self, tensor: Tensor) -> _Mark | None:
        mark: _Mark | None = getattr(tensor, "__dict__", {}).get(_MARK)
        if mark is None or mark.run is not self:
            return None
        return mark

    def _is_tracked(self, tensor: Tensor) -> bool:
        if id(tensor) in self.named or id(tensor) in self._known:
            return True
        mark = self._mark(tensor)
        return (
            mark is None
            or mark.node is not None
            or (mark.version != version(tensor) and memory(tensor) in self._writes)
        )

    def _node(self, tensor: Tensor) -> fx.Node | None:
        if id(tensor) in self.named and id(tensor) not in self._known:
            self._keep(tensor, self._add("get_attr", self.named[id(tensor)], (), {}, tensor))
        if id(tensor) in self._known:
            return self._known[id(tensor)][1]
        mark = self._mark(tensor)
        if mark is None or mark.node is None:
            node = self._constant(tensor, stranger=mark is None)
            if (
                mark is not None
                and mark.version != version(tensor)
                and memory(tensor) in self._writes
            ):
                node = self._add(
                    "call_function",
                    spelling.after,
                    (node, self._writes[memory(tensor)]),
                    {},
                    tensor,
                )
                self._keep(tensor, node)
            return node
        while mark.keys:
            key, *later_keys = mark.keys
            fetch: Function = operator.getitem
            if isinstance(key, spelling.Attribute):
                fetch = getattr
                key = str(key)
            mark.node = self._add("call_function", fetch, (mark.node, key), {}, tensor)
            mark.keys = tuple(later_keys)
        if mark.written:
            mark.node.meta["old_name"] = True
        if mark.version != version(tensor):
            write = self._writes.get(memory(tensor))
            if write is not None:
                mark.node = self._add(
                    "call_function", spelling.after, (mark.node, write), {}, tensor
                )
            mark.version = version(tensor)
        return mark.node

    def _keep(self, tensor: Tensor, node: fx.Node) -> fx.Node:
        self._known[id(tensor)] = (tensor, node, version(tensor))
        return node

    def _constant(self, tensor: Tensor, *, stranger: bool) -> fx.Node:
        name = f"_tensor_constant{len(self.constants)}"
        self.constants[name] = tensor.detach().clone()
        if stranger:
            self.untracked[name] = next(reversed(self.around), "")
        return self._keep(tensor, self._add("get_attr", name, (), {}, tensor))

    def _mapped(self, value: object) -> Any:
        if isinstance(value, Tensor):
            return self._node(value)
        if isinstance(value, slice):
            return slice(*(self._mapped(entry) for entry in (value.start, value.stop, value.step)))
        if isinstance(value, Mapping):
            return {key: self._mapped(entry) for key, entry in value.items()}
        if isinstance(value, torch.Size):
            return tuple(value)
        if isinstance(value, tuple | list):
            entries = map(self._mapped, value)
            return list(entries) if type(value) is list else tuple(entries)
        return value

    def _call(self, module: nn.Module, original: Function, args: Args, kwargs: Kwargs) -> object:
        path = self.paths.get(id(module))
        if path is None and not self.resting and (module._parameters or module._buffers):
            remedy = "Keep it in an nn.ModuleList or nn.ModuleDict, or as an attribute"
            raise TraceError(
                f"forward calls a {type(module).__name__} that no state_dict has", remedy=remedy
            )
        if self.resting or not path:
            return original(module, *args, **kwargs)
        try:
            if self._is_leaf(module, path):
                return self._leaf(module, path, original, args, kwargs)
            self.around.append(path)
            try:
                result = original(module, *args, **kwargs)
            finally:
                self.around.pop()
        except Exception:
            self.failed = self.failed or path
            raise
        if (
            isinstance(result, Tensor)
            and self._is_tracked(result)
            and (node := self._node(result)) is not None
        ):
            self.outputs.setdefault(node, []).append(path)
        return result

    def _is_leaf(self, module: nn.Module, path: str) -> bool:
        if isinstance(module, torch.jit.ScriptModule):
            self.opaque[path] = "it is scripted, so its operations cannot be seen"
            return True
        if affine.is_norm(module) or affine.is_affine(module):
            return True
        whole = not module._modules or id(module) in self.convolutions
        return (whole or type(module).__module__.startswith("torch.nn")) and not isinstance(
            module, _CONTAINERS
        )

    def _leaf(
        self, module: nn.Module, path: str, original: Function, args: Args, kwargs: Kwargs
    ) -> object:
        if not args and kwargs and (affine.is_norm(module) or affine.is_affine(module)):
            remedy = (
                f"Write {path}(x) for {path}({next(iter(kwargs))}=x): what takes its place has"
                " another argument"
            )
            raise TraceError(f"{path} is called by keyword", remedy=remedy)
        self.resting = True
        try:
            tensors = [tensor for _, tensor in named_tensors((args, kwargs))]
            positional = self._mapped(args)
            named = self._mapped(kwargs)
            before = [version(tensor) for tensor in tensors]
            hooks = module._forward_hooks
            module._forward_hooks = type(module._forward_hooks)()
            # The user's hooks do not run; the network's own run afterwards.
            result = original(module, *args, **kwargs)
            module._forward_hooks = hooks
            overwritten = [t for t, old in zip(tensors, before, strict=True) if version(t) != old]
            self.size_dependent = self.size_dependent or not isinstance(result, Tensor)
            node = self._add("call_module", path, positional, named, result)
            self.outputs.setdefault(node, []).append(path)
            result = self._made(node, result, tensors, overwritten)
        finally:
            self.resting = False
        return self._after_hooks(module, hooks, args, kwargs, result)

    def _after_hooks(
        self,
        module: nn.Module,
        hooks: Mapping[int, Function],
        args: Args,
        kwargs: Kwargs,
        result: object,
    ) -> object:
        """The layer's result after the network's own hooks: methods of its modules."""
        for key, hook in hooks.items():
            if id(getattr(hook, "__self__", None)) in self.paths:
                arguments = (args, kwargs) if key in module._forward_hooks_with_kwargs else (args,)
                answer = hook(module, *arguments, result)
                if answer is not None:
                    result = answer
        return result


class Widening(TorchFunctionMode):
    """For a network in float64: tensors that its forward makes in float32 or less are float64, too."""

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


@contextmanager
def intercepted(call: Callable[..., object]) -> Iterator[None]:
    """Calls of modules go through `call(module, original, args, kwargs)`."""
    original = nn.Module.__call__

    def wrapper(module: nn.Module, *args: object, **kwargs: object) -> object:
        return call(module, original, args, kwargs)

    nn.Module.__call__ = wrapper  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]
