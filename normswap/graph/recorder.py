"""SEE: one real forward, recorded as a graph whose leaves are norms and childless modules.

The network runs in eval mode, without gradients, on an example. A torch function mode sees every
operation. Calls of modules are intercepted as torch.fx does it. Each tensor that was computed from
the input carries its node. Shapes, branches and loops run as plain Python, so the graph has the
operations that were done.

- If Python reads a value (`.item()`, `bool`, `.numpy()`), the graph gets a node that reads it
  (`spelling.left`), so that no rescaling can pass there.
- If a tensor was overwritten through a view, its new value depends on two nodes: the one that made
  the tensor and the one that wrote to the view (`spelling.after`).
- A tensor of unknown origin must be a constant.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from normswap.models.calling import Example, named_tensors
from normswap.sites import own_forwards
from normswap.sites.site import site_of

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# These functions give Python a tensor's value, on which a forward may branch.
_BRANCHING_READS = {
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
# The attribute of a tensor that holds the recorder's note.
_MARK = "_normswap_mark"
# `Widening` widens the results of the casts and of all other `_MAKERS`.
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
    """A note that the recorder hangs on a tensor: which node of the graph made the tensor.

    Args:
        run: The recorder that set the mark.
        node: The node whose value is the tensor, or is a collection that holds the tensor. None
            says that the tensor was made without the network's input.
        version: How often the tensor had been written to when it was marked. A higher number later
            shows that it was overwritten since.
        keys: The keys that lead from a collection to the tensor in it. Empty if the tensor itself
            is the node's value.
    """

    __slots__ = ("keys", "node", "run", "version", "written")

    def __init__(
        self, run: Recorder, node: fx.Node | None, version: int, keys: tuple[object, ...] = ()
    ) -> None:
        self.run = run
        self.node = node
        self.version = version
        self.keys = keys
        # Whether a leaf module has overwritten the tensor.
        self.written = False

    def __deepcopy__(self, memo: object) -> _Mark:
        return self


class Recorder(TorchFunctionMode):
    """Records one run of a copy of a network as a graph.

    `run` runs the network. Its operations on tensors become nodes of `graph`.

    Args:
        model: The copy, which shares the network's parameters.
        look: Called with the name of each new node and its value. None calls nothing.

    Attributes:
        graph: The fx graph, as `Traced` describes it.
        outputs: For each node, the paths of the modules that return its value, innermost first.
        opaque: Paths of the modules whose operations cannot be seen, with the reason.
        constants: Tensors that the forward makes itself, by their names in the graph.
        untracked: Names of constants of unknown origin, with the path of the module that uses each.
        branches: Paths of the modules whose forward reads numbers of a tensor into Python.
        size_dependent: Whether the forward asked for the size of a tensor.
        failed: The path of the innermost module that raised an error. Empty if none did.
    """

    def __init__(self, model: nn.Module, look: Callable[[str, object], None] | None = None) -> None:
        super().__init__()
        self.model = model
        self.look = look

        # What is recorded.
        self.graph = fx.Graph()
        self.outputs: dict[fx.Node, list[str]] = {}
        self.opaque: dict[str, str] = {}
        self.constants: dict[str, Tensor] = {}
        self.untracked: dict[str, str] = {}
        self.branches: list[str] = []
        self.size_dependent = False
        self.failed = ""

        # The paths of the network's modules, and the names of their tensors, by id. A module or
        # tensor with several names gets the first.
        modules = tree(model)
        self.paths: dict[int, str] = {}
        self.named: dict[int, str] = {}
        for path, module in modules.items():
            self.paths.setdefault(id(module), path)
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self.named.setdefault(id(tensor), dotted(path, name))
        # A convolution may hold a module that pads its input. It becomes a single node all the
        # same.
        holders = (module for module in modules.values() if module._modules)
        self.convolutions = {id(module) for module in holders if own_forwards.computes(module)}
        # The norms, and the modules that are y = act(s x + t) per channel. Some are known only by
        # what they compute, so they are run before anything is recorded.
        self.norms_and_maps = {id(module) for module in modules.values() if site_of(module).is_leaf}

        # The paths of the modules that are running, outermost first.
        self.around: list[str] = []
        # Whether nothing is recorded at the moment, because a module runs that is a single node.
        self.is_paused = False
        # The tensors that have no mark, by id, each with its node and version. The network's own
        # tensors get no mark, which would outlive the run. Keeping a tensor here also keeps its id
        # from being given to another one.
        self._known: dict[int, tuple[Tensor, fx.Node, int]] = {}
        # The last node that wrote to each storage.
        self._writes: dict[StorageWeakRef | None, fx.Node] = {}

    def run(self, example: Example) -> None:
        """Run the network once on `example`, and record its operations in `graph`.

        Args:
            example: The arguments of the call. Their tensors are copied, so a forward that writes
                into its input does not change them.
        """
        arguments = (dict(enumerate(example.args)), example.kwargs)
        names = iter(name for name, _ in named_tensors(arguments))

        # `map` below calls `enter` for one tensor after the other, in the order of `names`.
        def enter(tensor: Tensor) -> Tensor:
            """Add a node for a tensor of the example to the graph, and return a copy of the tensor.

            The node is a placeholder, which is torch.fx's kind of node for an input. The copy is
            marked with it.
            """
            value = tensor.detach().clone()
            # In a name such as `0.2` or `1.mask.x`, 0 stands for the positional arguments and 1 for
            # the keyword arguments. The position or keyword of the argument follows, then the keys
            # inside of it. The placeholder of `1.mask.x` is called `mask_x`.
            argument, *keys = next(names).split(".")[1:]
            name = "_".join((argument, *keys))
            # torch.fx takes no name that begins with a digit.
            if name[0].isdigit():
                name = f"x{name}"
            node = self._add("placeholder", name, (), {}, value)
            # `recording` compares the paths of two records by `place`. The items of a list have the
            # same place, so positions are left out.
            node.meta["place"] = (argument, *(key for key in keys if not key.isdigit()))
            self._set_mark(value, node)
            return value

        entered = example.map(enter)
        with intercepted(self._run_module), self:
            result = entered.call(self.model)

        # A graph ends with a node that reads the only output, or a tuple of all outputs.
        nodes = [self._node_of(tensor) for _, tensor in named_tensors(result)]
        outputs = tuple(node for node in nodes if node is not None)
        returned = outputs[0] if len(outputs) == 1 else outputs
        self._add("output", "output", (returned,), {}, None)

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        """Run a function that the forward calls, and record it if it reads tensors of the graph.

        torch calls this method in place of each of its functions while the recorder is active.

        Args:
            func: The function or method of torch.
            types: The types of the arguments. They are not used.
            args: The positional arguments.
            kwargs: The keyword arguments. None stands for none.
        """
        kwargs = kwargs or {}
        # A module that is one node is running, so its steps are not recorded.
        if self.is_paused:
            return func(*args, **kwargs)

        # A question for a shape or dtype is answered, but is no operation of the graph.
        self.size_dependent = self.size_dependent or spelling.asks_size(func)
        if spelling.is_plain(func):
            return func(*args, **kwargs)

        tensors = [tensor for _, tensor in named_tensors((args, kwargs))]
        if not any(self._is_tracked(tensor) for tensor in tensors):
            return self._run_untracked(func, args, kwargs)

        # The function is named as torch.fx names it. Its arguments become nodes before it may write
        # to them.
        kind, target, positional, named = spelling.spelled(func, args, kwargs)
        positional = self._with_nodes(positional)
        named = self._with_nodes(named)
        versions = [version(tensor) for tensor in tensors]
        result = func(*args, **kwargs)
        overwritten = _written_since(tensors, versions)

        # Without a tensor in the result, Python has read a value. The node then says only that the
        # value of the first argument is read.
        if not overwritten and next(named_tensors(result), None) is None:
            kind = "call_function"
            target = spelling.left
            positional = (next(iter(positional), None), func.__name__)
            named = {}
            # A forward may branch on the number that such a function gives, so the innermost
            # running module is noted.
            if func.__name__ in _BRANCHING_READS:
                self.branches.append(next(reversed(self.around), ""))

        node = self._add(kind, target, positional, named, result)
        return self._mark_results(node, result, tensors, overwritten)

    def _run_untracked(self, func: Function, args: Args, kwargs: Kwargs) -> object:
        """Run a function that reads no parameter, buffer, or value computed from the input.

        Its results are marked as made without the input (`_Mark.node` is None). They become
        constants of the graph if a recorded operation reads them. A parameter or buffer among the
        results gets no mark, because it is found by its name.
        """
        result = func(*args, **kwargs)
        for _, tensor in named_tensors(result):
            if id(tensor) not in self.named:
                self._set_mark(tensor, None)
        return result

    def _add(self, kind: str, target: Any, args: Any, kwargs: Any, value: object) -> fx.Node:
        """Add a node to the graph.

        Args:
            kind: The kind of the node, such as `call_function`.
            target: The function, or the name of the method, module or tensor.
            args: The positional arguments, with nodes in place of tensors.
            kwargs: The keyword arguments, with nodes in place of tensors.
            value: The node's value on the example, whose shape and dtype are noted.
        """
        node = self.graph.create_node(kind, target, args, kwargs)
        # The modules whose forward is running here, outermost first.
        node.meta["inside"] = tuple(self.around)
        node.meta["shape"] = spelling.shapes(value)
        node.meta["dtype"] = getattr(value, "dtype", None)
        if self.look is not None:
            self.look(node.name, value)
        return node

    def _mark_results(
        self, node: fx.Node, result: object, tensors: list[Tensor], overwritten: list[Tensor]
    ) -> object:
        """Note on tensors that a node has overwritten or made them, and return the node's result.

        Args:
            node: The node.
            result: The result of the operation. If it is one of the arguments, it may be replaced
                by a new tensor object.
            tensors: The tensors among the operation's arguments.
            overwritten: The tensors among `tensors` to which the operation wrote.
        """
        is_leaf = node.op == "call_module"
        for tensor in overwritten:
            self._writes[memory(tensor)] = node
            self._set_mark(tensor, node)
            # `written` says that a module overwrote this tensor. A conversion may replace the
            # module by a layer that copies its input. Then a later reader of the tensor would see
            # the old value.
            mark = self._mark_of(tensor)
            if is_leaf and mark is not None:
                mark.written = True

        if isinstance(result, Tensor):
            is_argument = any(result is tensor for tensor in tensors)
            is_overwritten = any(result is tensor for tensor in overwritten)
            if is_argument and (is_leaf or not is_overwritten):
                # A layer or function that returns its input gets a new tensor object on the same
                # memory, for its own node. A function in place returns the old object, which was
                # marked above.
                result = torch.Tensor.detach(result)
            self._set_mark(result, node)
            return result

        # In a collection, each new tensor is marked with the keys that lead to it.
        for keys, tensor in spelling.places(result):
            if not any(tensor is argument for argument in tensors):
                self._set_mark(tensor, node, keys)
        return result

    def _set_mark(
        self, tensor: Tensor, node: fx.Node | None, keys: tuple[object, ...] = ()
    ) -> None:
        """Note on a tensor which node made it.

        Args:
            tensor: The tensor.
            node: The node that made it. None says that it was made without the network's input.
            keys: The keys that lead from the node's value, a collection, to the tensor in it. Empty
                if the tensor itself is the value.
        """
        # A mark is an attribute of the tensor. A parameter or buffer of the network lives longer
        # than this run, and would keep it. So its node is kept in a table of the recorder.
        if id(tensor) in self.named or id(tensor) in self._known:
            if node is not None:
                self._remember(tensor, node)
            return
        setattr(tensor, _MARK, _Mark(self, node, version(tensor), keys))

    def _mark_of(self, tensor: Tensor) -> _Mark | None:
        """Return the note that this recorder hung on a tensor, or None if there is none.

        A mark of another recorder, from an earlier recording, does not count.
        """
        mark: _Mark | None = getattr(tensor, "__dict__", {}).get(_MARK)
        if mark is None or mark.run is not self:
            return None
        return mark

    def _is_rewritten(self, tensor: Tensor, mark: _Mark) -> bool:
        """Whether an operation in the graph wrote to a tensor's memory after the tensor was marked.

        Args:
            tensor: The tensor.
            mark: The tensor's mark, with the tensor's version at that time.
        """
        return mark.version != version(tensor) and memory(tensor) in self._writes

    def _is_tracked(self, tensor: Tensor) -> bool:
        """Whether an operation on a tensor becomes a node of the graph.

        It does if the tensor is a parameter or buffer of the network, was computed from the input,
        or has no mark, so that its origin is unknown. It does not if the tensor was made in forward
        without the input, such as the result of `torch.arange`.
        """
        if id(tensor) in self._known:
            return True
        # A parameter or buffer has no mark.
        mark = self._mark_of(tensor)
        # A tensor that was made without the input may have been overwritten with computed values.
        return mark is None or mark.node is not None or self._is_rewritten(tensor, mark)

    def _node_of(self, tensor: Tensor) -> fx.Node | None:
        """Return the node whose value is the tensor as it is now.

        The graph gets new nodes for a tensor without one: a parameter, a constant, an item of a
        collection, or a tensor that was overwritten.
        """
        # A parameter or buffer becomes a node when it is read for the first time.
        if id(tensor) in self.named and id(tensor) not in self._known:
            self._remember(tensor, self._add("get_attr", self.named[id(tensor)], (), {}, tensor))
        if id(tensor) in self._known:
            return self._known[id(tensor)][1]

        # A tensor that was not computed from the input is a constant. If an operation in the graph
        # has overwritten the constant since, an `after` node stands for the new value.
        mark = self._mark_of(tensor)
        if mark is None or mark.node is None:
            node = self._constant(tensor, of_unknown_origin=mark is None)
            if mark is not None and self._is_rewritten(tensor, mark):
                node = self._add_after(node, self._writes[memory(tensor)], tensor)
                self._remember(tensor, node)
            return node

        # The tensor may be an item of the node's value, a collection. Each key that leads to it
        # becomes a node that takes the item out.
        while mark.keys:
            key, *later_keys = mark.keys
            fetch: Function = operator.getitem
            if isinstance(key, spelling.Attribute):
                fetch = getattr
                key = str(key)
            mark.node = self._add("call_function", fetch, (mark.node, key), {}, tensor)
            mark.keys = tuple(later_keys)

        # A module wrote into the tensor that it was given, and forward now reads that tensor, not
        # the module's result. `overwriting.aliasing_conflicts` reads this note.
        if mark.written:
            mark.node.meta["old_name"] = True
        # If the tensor was overwritten after its node made it, an `after` node has its value.
        if mark.version != version(tensor):
            write = self._writes.get(memory(tensor))
            if write is not None:
                mark.node = self._add_after(mark.node, write, tensor)
            mark.version = version(tensor)
        return mark.node

    def _add_after(self, node: fx.Node, write: fx.Node, tensor: Tensor) -> fx.Node:
        """Add a node for the value that a tensor has after its memory was overwritten.

        The node is a call of `spelling.after`, and is returned.

        Args:
            node: The node that made the tensor.
            write: The node that wrote to the tensor's memory.
            tensor: The tensor with its new value.
        """
        return self._add("call_function", spelling.after, (node, write), {}, tensor)

    def _remember(self, tensor: Tensor, node: fx.Node) -> fx.Node:
        """Note in a table which node has the value of a tensor, and return the node.

        The table is for parameters, buffers and constants, which get no mark.
        """
        self._known[id(tensor)] = (tensor, node, version(tensor))
        return node

    def _constant(self, tensor: Tensor, *, of_unknown_origin: bool) -> fx.Node:
        """Add a tensor as a constant of the graph, and return its node.

        Args:
            tensor: The tensor.
            of_unknown_origin: Whether no operation of this run made the tensor. It may then depend
                on the input unseen, so it is listed in `untracked`.
        """
        name = f"_tensor_constant{len(self.constants)}"
        self.constants[name] = tensor.detach().clone()
        # It is listed with the path of the innermost module whose forward is running.
        if of_unknown_origin:
            self.untracked[name] = next(reversed(self.around), "")
        return self._remember(tensor, self._add("get_attr", name, (), {}, tensor))

    def _with_nodes(self, value: object) -> Any:
        """Return an argument of an operation as a node of the graph takes it.

        Each tensor is replaced by its node, also inside of tuples, lists, dicts and slices. Any
        other value is returned as it is.

        Args:
            value: The argument, or a collection of arguments.
        """
        if isinstance(value, Tensor):
            return self._node_of(value)
        if isinstance(value, slice):
            return slice(
                *(self._with_nodes(entry) for entry in (value.start, value.stop, value.step))
            )
        if isinstance(value, Mapping):
            return {key: self._with_nodes(entry) for key, entry in value.items()}
        # torch.fx takes a torch.Size as a plain tuple.
        if isinstance(value, torch.Size):
            return tuple(value)
        if isinstance(value, tuple | list):
            entries = map(self._with_nodes, value)
            return list(entries) if type(value) is list else tuple(entries)
        return value

    def _run_module(
        self, module: nn.Module, original: Function, args: Args, kwargs: Kwargs
    ) -> object:
        """Run a module that the forward calls, and record it.

        It becomes a single node, or else the modules and functions that its forward calls become
        nodes.

        Args:
            module: The module.
            original: torch's own call of a module, nn.Module.__call__.
            args: The positional arguments.
            kwargs: The keyword arguments.
        """
        # A module that the network does not own has no path. Without parameters and buffers, its
        # operations are recorded like those of any function.
        path = self.paths.get(id(module))
        if path is None and not self.is_paused and (module._parameters or module._buffers):
            remedy = "Keep it in an nn.ModuleList or nn.ModuleDict, or as an attribute"
            raise TraceError(
                f"forward calls a {type(module).__name__} that no state_dict has", remedy=remedy
            )

        # No node is added for the network itself, whose path is "", and none inside of a module
        # that is a single node (`is_paused`).
        if self.is_paused or not path:
            return original(module, *args, **kwargs)

        # If a module fails, `failed` keeps the path of the innermost one.
        try:
            if self._is_leaf(module, path):
                return self._run_leaf(module, path, original, args, kwargs)
            self.around.append(path)
            try:
                result = original(module, *args, **kwargs)
            finally:
                self.around.pop()
        # A user's forward may raise anything. The error goes on, and only its place is noted.
        except Exception:
            self.failed = self.failed or path
            raise

        # Note for the node of the result that this module returns its value.
        if isinstance(result, Tensor) and self._is_tracked(result):
            node = self._node_of(result)
            if node is not None:
                self.outputs.setdefault(node, []).append(path)
        return result

    def _is_leaf(self, module: nn.Module, path: str) -> bool:
        """Whether a call of a module becomes a single node, without the operations inside.

        Norms, torch's own layers and modules without children become one. A scripted module must,
        because its operations cannot be seen. This is noted in `opaque`.
        """
        if isinstance(module, torch.jit.ScriptModule):
            self.opaque[path] = "it is scripted, so its operations cannot be seen"
            return True
        if self._is_norm_or_map(module):
            return True
        # nn.Sequential and the like are torch's own, but the modules in them are the user's.
        if isinstance(module, _CONTAINERS):
            return False

        # torch's own modules, such as nn.MultiheadAttention, are leaves even with children.
        is_childless = not module._modules or id(module) in self.convolutions
        return is_childless or type(module).__module__.startswith("torch.nn")

    def _is_norm_or_map(self, module: nn.Module) -> bool:
        """Whether a module is a norm, or is y = act(s x + t) with s and t per channel."""
        # The answers for the network's own modules were found before the run.
        if id(module) in self.paths:
            return id(module) in self.norms_and_maps
        # Forward may make a module as it runs.
        return site_of(module).is_leaf

    def _run_leaf(
        self, module: nn.Module, path: str, original: Function, args: Args, kwargs: Kwargs
    ) -> object:
        """Run a module that becomes a single node of the graph (a leaf), and add the node.

        Args:
            module: The leaf.
            path: The path of the leaf.
            original: torch's own call of a module.
            args: The positional arguments.
            kwargs: The keyword arguments.
        """
        # A layer that a conversion puts in place of a norm may call its argument by another name.
        if not args and kwargs and self._is_norm_or_map(module):
            remedy = (
                f"Write {path}(x) for {path}({next(iter(kwargs))}=x): what takes its place has"
                " another argument"
            )
            raise TraceError(f"{path} is called by keyword", remedy=remedy)

        # Nothing is recorded while the leaf runs, as the leaf is one node.
        self.is_paused = True
        try:
            tensors = [tensor for _, tensor in named_tensors((args, kwargs))]
            positional = self._with_nodes(args)
            named = self._with_nodes(kwargs)
            versions = [version(tensor) for tensor in tensors]

            # Hooks are taken off for the call. The user's do not run at all, and the network's own
            # run afterwards (`_after_hooks`), so that what they compute is recorded.
            hooks = module._forward_hooks
            module._forward_hooks = type(module._forward_hooks)()
            result = original(module, *args, **kwargs)
            module._forward_hooks = hooks

            # If the module asks for the size of a tensor, this is not seen. A single tensor as
            # result does not tell forward the size. Another result may, so it counts as one that
            # depends on the size.
            overwritten = _written_since(tensors, versions)
            self.size_dependent = self.size_dependent or not isinstance(result, Tensor)
            node = self._add("call_module", path, positional, named, result)
            self.outputs.setdefault(node, []).append(path)
            result = self._mark_results(node, result, tensors, overwritten)
        finally:
            self.is_paused = False
        return self._after_hooks(module, hooks, args, kwargs, result)

    def _after_hooks(
        self,
        module: nn.Module,
        hooks: Mapping[int, Function],
        args: Args,
        kwargs: Kwargs,
        result: object,
    ) -> object:
        """Run the network's own forward hooks on the result of a module that is a single node.

        A hook is the network's own if it is a method of one of its modules. Hooks of the user are
        left out.

        Args:
            module: The module.
            hooks: Its forward hooks, by torch's key of each.
            args: The positional arguments of the module's call.
            kwargs: The keyword arguments of the call.
            result: The result of the call.

        Returns:
            The result of the last hook that returned something, or else `result`.
        """
        for key, hook in hooks.items():
            if id(getattr(hook, "__self__", None)) not in self.paths:
                continue
            takes_kwargs = key in module._forward_hooks_with_kwargs
            arguments = (args, kwargs) if takes_kwargs else (args,)
            changed_result = hook(module, *arguments, result)
            if changed_result is not None:
                result = changed_result
        return result


def _written_since(tensors: list[Tensor], versions: list[int]) -> list[Tensor]:
    """Return the tensors that an operation has written to.

    Args:
        tensors: The tensors among the operation's arguments.
        versions: How often each had been written to before the operation (`spelling.version`).
    """
    pairs = zip(tensors, versions, strict=True)
    return [tensor for tensor, old_version in pairs if version(tensor) != old_version]


class Widening(TorchFunctionMode):
    """A context in which the forward of a network in float64 computes in float64 throughout.

    Forwards may make tensors in float32, which would not fit the others. In a `with` block, such a
    tensor is made in float64. A narrower tensor that the network keeps as a plain attribute, and
    which `model.double()` has not converted, is converted where an operation reads it beside a
    tensor in float64.
    """

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        """Run a function of torch in float64, and return its result in float64.

        torch calls this method in place of each of its functions in the `with` block.

        Args:
            func: The function or method of torch.
            types: The types of the arguments. They are not used.
            args: The positional arguments.
            kwargs: The keyword arguments. None stands for none.
        """
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # Casts are dealt with below. A tensor given as `out` must not be replaced by a copy.
        if name not in _CASTS and "out" not in kwargs:
            args, kwargs = _widened(name, args, kwargs)
        result = func(*args, **kwargs)

        # Functions such as `zeros`, `float` and `softmax` choose the dtype of their result, or take
        # it as an argument. Only their results are made wider.
        if name not in _MAKERS or not isinstance(result, Tensor) or result.dtype not in _NARROW:
            return result

        # A cast such as `x.float()` is not carried out, because casting its result back to float64
        # would not restore the digits. `x` is copied instead, as a cast returns a new tensor.
        if name in _CASTS and isinstance(args[0], Tensor) and args[0].is_floating_point():
            return args[0].to(result.device, torch.float64, copy=True)
        return result.double()


def _widened(name: str, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Return the arguments of a function of torch, in float64 if one of them is in float64.

    Only floating-point tensors are changed. If the function writes into its first argument, that
    argument stays as it is, because a copy would not be seen by others.

    Args:
        name: The name of the function.
        args: The positional arguments.
        kwargs: The keyword arguments.
    """
    dtypes = set(_dtypes((*args, *kwargs.values())))
    if torch.float64 not in dtypes or dtypes.isdisjoint(_NARROW):
        return args, kwargs

    # A function writes into its first argument if it is `x[i] = y`, or has a name such as `add_`.
    writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    written = args[:1] if writes else ()
    read = args[len(written) :]
    return (
        (*written, *(_double(value) for value in read)),
        {key: _double(value) for key, value in kwargs.items()},
    )


def _dtypes(values: Iterable[object]) -> Iterator[torch.dtype]:
    """Yield the dtype of every tensor in a collection of arguments.

    Lists and tuples among the arguments are looked into. Other values are passed over.
    """
    for value in values:
        if isinstance(value, Tensor):
            yield value.dtype
        elif isinstance(value, list | tuple):
            yield from _dtypes(value)


def _double(value: Any) -> Any:
    """Return a value in which every floating-point tensor is in float64.

    Tensors in lists and tuples are converted, too. Any other value is returned as it is.
    """
    if isinstance(value, Tensor):
        return value.double() if value.dtype in _NARROW else value
    if type(value) in (list, tuple):
        return type(value)(_double(entry) for entry in value)
    return value


@contextmanager
def intercepted(call: Callable[..., object]) -> Iterator[None]:
    """In a `with` block, have every call of a module go through a function.

    Args:
        call: Called as call(module, original, args, kwargs) in place of `module(*args, **kwargs)`.
            `original` is torch's own call, nn.Module.__call__. What it returns is the result.
    """
    original = nn.Module.__call__

    def wrapper(module: nn.Module, *args: object, **kwargs: object) -> object:
        return call(module, original, args, kwargs)

    nn.Module.__call__ = wrapper  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]
