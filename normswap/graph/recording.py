"""SEE: a network's forward as a graph, recorded on an example, and again at another size if needed.

A record has the path that forward took. A forward that asks for no size takes the same path at
every size, so one record of a small example is enough. If an input takes another path, that path is
recorded as an alternative (`Traced.alternatives`): a change of a module must be right on both.
"""

import operator
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from normswap.copying import tree, twin
from normswap.errors import TraceError, first_few, first_line, spelled
from normswap.graph.recorder import Recorder, Widening
from normswap.graph.tracing import Traced, inputs, single
from normswap.layers.placeholders import Copy
from normswap.models import calling, network_input
from normswap.models.calling import Example
from normswap.models.modes import callers_dtype, show_heads, undisturbed

# The folders of torch and of this package, as whole paths: a user's folder may have the same name.
_LIBRARY_FOLDERS = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])
)
# The second size of images to record is the first of these that the network takes.
_OTHER_SIZES = ((96, 128), (160, 224))


def record(model: nn.Module, inputs: calling.Inputs = None) -> Traced:
    """Record `model` in eval mode on an example, and once more on an example of another size.

    The model is not changed. Records of other paths through the network (auxiliary heads, the
    user's other batches) are added as alternatives.

    Args:
        model: The network.
        inputs: The inputs of the network, as in `inspect`. By default an example is made from the
            input that the network states.

    Raises:
        SourceError: The network cannot be recorded yet (`network_input.check_shapes`).
        TraceError: The network does not run (the message says where), or something in it cannot
            be seen.
    """
    network_input.check_shapes(model)
    _check_compiled(model)
    _check_closures(model)

    main, first, other_examples = _record_first(model, inputs)
    main.form = first.hollow
    # A tensor of unknown origin is taken for a constant, which another input must confirm.
    if main.untracked:
        _check_constants(model, main, first)

    # Records of other paths are added to the first one.
    _follow_heads(model, main, first)
    _follow_batches(model, main, inputs)
    main.remarks += _uncalled_norms(model, main, first)

    # If forward takes the same path for every input, one record is enough. Rows of features (N, C)
    # or (N, L, C) are the exception: they may come with further dimensions, so another example is
    # recorded.
    if main.input_independent and first.images.ndim > 3:
        main.flexible = True
        return main

    _follow_other_size(model, main, first, other_examples)
    for path in main.branches:
        main.remarks.append(f"{path or 'forward'} looks at values: recorded is the way it took")
    return main


def _check_compiled(model: nn.Module) -> None:
    """Raise TraceError if the network has a layer that torch.compile returned.

    A conversion could not replace such a layer.
    """
    for path, module in tree(model).items():
        if path and (getattr(module, "_compiled_call_impl", None) or hasattr(module, "_orig_mod")):
            remedy = "Convert the network first, then compile the result"
            raise TraceError(f"{path} is compiled (torch.compile)", remedy=remedy)


def _check_closures(model: nn.Module) -> None:
    """Raise TraceError if a hook or a forward is a closure over a module of the network.

    In a copy of the network, the closure would still call the module of the original.
    """
    modules = tree(model)
    module_ids = {id(module) for module in modules.values()}
    for path, module in modules.items():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        for function in (*hooks, vars(module).get("forward")):
            cells = getattr(function, "__closure__", None) or ()
            if any(id(cell.cell_contents) in module_ids for cell in cells):
                kind = "a hook" if function in hooks else "the forward"
                raise TraceError(
                    f"{kind} of {path or 'the network'} is a function that holds a module of the"
                    " network itself",
                    "a copy of the network would still use that one",
                    "Make it a method, or register it after the conversion",
                )


def _record_first(
    model: nn.Module, inputs: calling.Inputs
) -> tuple[Traced, Example, list[Example]]:
    """Record the network on the first example that runs.

    Args:
        model: The network.
        inputs: The user's inputs. None stands for noise of the sizes that the network may take.

    Returns:
        The record, the call that was recorded, and calls at other sizes for a second record.

    Raises:
        TraceError: The network runs on no example.
    """
    if inputs is not None:
        return _record_given(model, inputs)

    # A small example is cheap, and enough if forward asks for no size. Only the first of the small
    # sizes is tried. If there is none, or the network does not run at it, or asks for a size, the
    # usual sizes are tried below.
    sizes = network_input.candidates(model)
    for small_size in network_input.small(sizes[0])[:1]:
        with suppress(TraceError):
            example = network_input.noise(model, small_size, batch=2)
            traced = record_once(model, example)
            if traced.input_independent:
                traced.is_small = True
                return traced, example, []

    # The examples are made one by one, as most networks run at the first size.
    examples = ((size, network_input.noise(model, size)) for size in sizes)
    first_error: TraceError | None = None
    for size, example in chain(examples, network_input.tokens(model)):
        try:
            traced = record_once(model, example)
        except TraceError as error:
            first_error = first_error or error
            continue

        # A row of tokens has no size, (), and no example of another size.
        if not size:
            return traced, example, []
        # A network that takes a row of features (C,) may also take rows with further dimensions in
        # front, such as tokens (L, C). These are the first to be tried for the second record.
        longer_sizes = [other for other in sizes if len(size) == 1 and other[1:] == size]
        longer = [network_input.noise(model, longer_size, batch=3) for longer_size in longer_sizes]
        return traced, example, [*longer, *_resized(network_input.noise(model, size, batch=2))]

    remedy = "Say what it takes: '--input NAME=SHAPE' (in Python `inputs=`)"
    raise first_error or TraceError(
        f"what {type(model).__name__} takes is not known", remedy=remedy
    )


def _record_given(
    model: nn.Module, inputs: calling.Inputs
) -> tuple[Traced, Example, list[Example]]:
    """Record the network on the user's first batch.

    Args:
        model: The network.
        inputs: The user's inputs: a batch, or several.

    Returns:
        The record, the call that was recorded, and calls at other sizes for a second record.
    """
    device = calling.anchor(model).device
    batches = [batch.on(device) for batch in calling.batches(inputs)]

    # One sample is enough, unless the network runs on the whole batch only.
    example = batches[0].first(1)
    try:
        traced = record_once(model, example)
    except TraceError:
        example = batches[0]
        traced = record_once(model, example)

    # For the second record, a batch of another size is the best example, which the user has shown
    # to be right. Then come two samples, resized, and at last two samples as they are.
    pair = batches[0].first(2)
    other_sizes: list[Example] = []
    for batch in batches:
        # The text of a call says the shapes of all its tensors. Calls with equal texts have equal
        # sizes.
        has_other_size = batch.images.shape[1:] != example.images.shape[1:]
        if has_other_size and str(batch) != str(example):
            other_sizes.append(batch.first(2))
    return traced, example, [*other_sizes[:1], *_resized(pair), pair]


def _follow_other_size(
    model: nn.Module, main: Traced, first: Example, other_examples: list[Example]
) -> None:
    """Record the network at another size, and add the record to the first one.

    The record becomes one of `main.others` if its graph is the same, or an alternative if forward
    took another path through its code. `main.flexible` is set if the size was another one.

    Args:
        model: The network.
        main: The first record, which is changed in place.
        first: The call that `main` was recorded on.
        other_examples: Calls to try. The first one on which the network runs is recorded.
    """
    main.flexible = False
    for other in other_examples:
        try:
            second = record_once(model, other)
        except TraceError:
            continue

        # If the outlines are equal, but not the graphs, forward took the same path with other steps
        # on it. Such a record tells nothing new and is dropped.
        if _is_same_graph(main, second):
            main.others.append(second)
        elif _outline(main) != _outline(second):
            main.add_alternative(second)
            main.remarks.append(f"{other} takes another way than {first}; both were followed")
        main.recorded += second.recorded
        main.flexible = other.images.shape[1:] != first.images.shape[1:]
        break

    if not main.flexible:
        main.remarks.append(f"recorded at one size only, {first}")


def _follow_heads(model: nn.Module, main: Traced, example: Example) -> None:
    """Record the network with its auxiliary heads, which run only in training.

    This is done only if the forward in eval mode has left a BatchNorm uncalled. The record is added
    to `main` if it calls such a BatchNorm.

    Args:
        model: The network.
        main: The first record, which is changed in place.
        example: The call that `main` was recorded on.
    """
    uncalled = [id(site.module) for site in main.sites if site.is_batchnorm and not site.called]
    if not uncalled:
        return

    try:
        second = record_once(model, example, heads=True)
    except TraceError:
        return
    if any(norm_id in second.calls for norm_id in uncalled):
        main.add_alternative(second)
        main.heads = True
        main.remarks.append("auxiliary heads, which only training runs, were followed, too")


def _follow_batches(model: nn.Module, main: Traced, inputs: calling.Inputs) -> None:
    """Add a record for each of the user's batches that takes another path.

    A batch may take another path because of an argument that is no tensor, or because of values
    that the forward reads.

    Args:
        model: The network.
        main: The first record, to which the others are added.
        inputs: The user's inputs. With None there is nothing to follow.
    """
    if inputs is None:
        return

    # The first batch is recorded in `main` already. `plain` are the arguments that are no tensors.
    batches = calling.batches(inputs)
    seen_arguments = {batch.plain for batch in batches[:1]}
    for batch in batches[1:]:
        # With arguments that were seen before, only the values of tensors could lead another way.
        if batch.plain in seen_arguments and not main.branches:
            continue
        seen_arguments.add(batch.plain)
        try:
            traced = record_once(model, batch.on(calling.anchor(model).device))
        except TraceError:
            continue

        known_paths = [_outline(other) for other in (main, *main.alternatives)]
        if _outline(traced) not in known_paths:
            main.add_alternative(traced)
            main.remarks.append(f"{batch} takes another way than {batches[0]}; both were followed")


def _uncalled_norms(model: nn.Module, main: Traced, example: Example) -> Iterator[str]:
    """Yield a remark on the norms that were never called, if another call may reach them.

    Another call may do so if forward has arguments that kept their defaults here, or that are no
    tensors, or if it reads numbers of a tensor and branches on them. Otherwise nothing is yielded.

    Args:
        model: The network.
        main: The record, with all its alternatives.
        example: The call that was recorded.
    """
    uncalled = [site.path for site in main.sites if site.is_norm and not site.called]
    if not uncalled:
        return

    defaults = calling.defaults(model, example)
    plain = calling.plain_arguments(model, example)
    if defaults:
        names = ", ".join(defaults)
        yield f"never called: {first_few(uncalled)}; forward had the default of {names}"
    elif plain:
        values = ", ".join(f"{name}={value!r:.40}" for name, value in plain.items())
        yield f"never called: {first_few(uncalled)}; forward had only {values}"
    elif main.branches:
        yield f"never called: {first_few(uncalled)}"


def _resized(example: Example) -> Iterator[Example]:
    """Yield copies of a call with its maps or series at other sizes, then the call itself.

    There is one copy for each of `_OTHER_SIZES`.

    Args:
        example: The call of a network.
    """
    for size in _OTHER_SIZES:
        yield example.map(partial(_at_other_size, size=size))
    yield example


def _at_other_size(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Return a tensor at another height and width, or another length.

    Args:
        x: Maps (..., H, W) or a series (N, C, L). Any other tensor is returned as it is.
        size: The height and width that maps get. Maps with fewer pixels than 128 x 160 are enlarged
            by 32 x 64 instead. A series is enlarged by 32.
    """
    if x.ndim < 3 or not x.is_floating_point():
        return x
    height, width = x.shape[-2:]
    if x.ndim < 4:
        return F.interpolate(x, width + 32)

    # F.interpolate takes (N, C, H, W). So all dimensions between N and H are merged, and then split
    # again.
    if height * width < 128 * 160:
        size = (height + 32, width + 64)
    resized: Tensor = F.interpolate(x.flatten(1, -3), size).unflatten(1, x.shape[1:-2])
    return resized


def _check_constants(model: nn.Module, first: Traced, example: Example) -> None:
    """Raise TraceError if a tensor that was taken for a constant depends on the input.

    A tensor is taken for one if no recorded operation made it, for example one from NumPy. The
    network is recorded again on other values, and the tensor must stay the same.

    Args:
        model: The network.
        first: The record that is checked.
        example: The call that was recorded.
    """
    # The second input has other values, and the same size.
    second = record_once(model, example.map_floats(lambda tensor: 0.9 * tensor.flip(-1)))
    for name, path in first.untracked.items():
        before = first.constants[name]
        after = second.constants.get(name)
        # vmap wraps its tensors, whose values cannot be compared.
        if torch._C._functorch.is_functorch_wrapped_tensor(before):
            raise TraceError(
                f"the forward of {path or type(model).__name__} calls torch.func (vmap)",
                "what happens in there cannot be seen",
            )
        if after is None or before.shape != after.shape or not torch.equal(before, after):
            raise TraceError(
                f"the forward of {path or type(model).__name__} leaves PyTorch, so what it computes"
                " cannot be followed",
                "it calls NumPy, a scripted function or a custom operator",
                "Use torch operations there",
            )


def _is_same_graph(first: Traced, second: Traced) -> bool:
    """Whether two records of a network are equal graphs.

    They are if their nodes in order are the same operations, in the same modules, and read the
    values of the same nodes.

    Args:
        first: A record.
        second: Another one, such as a record on an input of another size.
    """
    if len(first.nodes) != len(second.nodes):
        return False

    for one, other in zip(first.nodes, second.nodes, strict=True):
        same_call = one.op == other.op and one.target == other.target
        if not same_call or one.meta["inside"] != other.meta["inside"]:
            return False
        # Both must read the values of the same nodes, which are told by their positions.
        positions = [first.index(source) for source in inputs(one)]
        if positions != [second.index(source) for source in inputs(other)]:
            return False
    return True


def _outline(traced: Traced) -> object:
    """Return a value that is equal for two records if forward took the same path in both.

    Returns:
        The calls of modules in order, and the edges of the graph as a set.
    """

    def label(node: fx.Node) -> object:
        """Return what a node does, without its name, which may differ between two records.

        It is the place of an input among the arguments, the path of a module or tensor, or a
        function and the modules around it.
        """
        if node.op == "placeholder":
            return node.meta["place"]
        if node.op in ("call_module", "get_attr"):
            return node.target
        return str(node.target), node.meta["inside"]

    calls = [node.target for node in traced.nodes if node.op == "call_module"]
    edges: set[object] = set()
    for node in traced.nodes:
        edges.update((label(source), label(node)) for source in inputs(node))
    return calls, edges


@torch.no_grad()
def record_once(
    model: nn.Module,
    example: Example,
    look: Callable[[str, object], None] | None = None,
    *,
    heads: bool = False,
) -> Traced:
    """Record one forward of a copy of the network in eval mode.

    Args:
        model: The network, which is not changed.
        example: The call to record.
        look: Called with the name of each node of the graph and its value. None calls nothing.
        heads: Whether auxiliary heads run, as in training (`modes.show_heads`).

    Raises:
        TraceError: The network does not run on the example. The message says where it fails.
    """
    copied = _copy_to_record(model, heads=heads)
    recorder = Recorder(copied, look)
    try:
        with _as_its_user_runs_it(model):
            recorder.run(example)
    except TraceError:
        raise
    # The user's forward may raise anything.
    except Exception as error:
        raise _does_not_run(model, example, recorder.failed, error) from error

    # The record names the modules of the network itself, not those of the copy.
    modules = tree(model)
    _drop_products_with_one(recorder.graph, recorder.outputs, modules)
    traced = Traced(
        graph=recorder.graph,
        modules=modules,
        outputs=recorder.outputs,
        opaque=recorder.opaque,
        constants=recorder.constants,
    )
    traced.recorded.append(str(example))
    traced.untracked = recorder.untracked
    traced.size_dependent = recorder.size_dependent
    traced.branches = list(dict.fromkeys(recorder.branches))
    return traced


def _does_not_run(
    model: nn.Module, example: Example, failed_path: str, error: Exception
) -> TraceError:
    """Return a TraceError that explains why the forward of a network failed.

    Args:
        model: The network.
        example: The call that failed.
        failed_path: The path of the innermost module that raised the error, or "".
        error: The error.
    """
    headline = f"{type(model).__name__} does not run on an input of size {example}"
    if failed_path:
        headline += f", at {failed_path}"

    # Mixed dtypes are the likely cause.
    dtypes = _dtypes(model, example)
    if len(dtypes) > 1:
        why = f"the network and its input are of {' and '.join(dtypes)}: {reason(error)}"
        return TraceError(headline, why, "Cast them to one: model.float(), x.float()")

    size = spelled("input_size", metavar="C,H,W")
    remedy = f"Say what it takes: `{size}`, or `--input NAME=SHAPE` (in Python `inputs=`)"
    return TraceError(headline, reason(error), remedy)


def _dtypes(model: nn.Module, example: Example) -> list[str]:
    """Return the names of the dtypes of a network and of the images it is called with.

    More than one name may mean that the two do not fit together. Integer tensors of the network are
    left out, because they are counters or indices, which any network may have.

    Args:
        model: The network.
        example: The call.

    Returns:
        Names such as `float32`, each once.
    """
    own = (*nn.Module.parameters(model), *nn.Module.buffers(model))
    numbers = [tensor for tensor in own if tensor.is_floating_point() or tensor.is_complex()]
    names = [str(tensor.dtype).removeprefix("torch.") for tensor in (*numbers, example.images)]
    return list(dict.fromkeys(names))


def _copy_to_record(model: nn.Module, *, heads: bool) -> nn.Module:
    """Return a copy of a network to be recorded, which shares its parameters.

    The copy differs from the network where its forward would skip a step that the graph should
    have.

    Args:
        model: The network.
        heads: Whether auxiliary heads run, as in training.
    """
    copied = twin(model)
    if heads:
        show_heads(copied)
    if isinstance(getattr(copied, "drop_rate", None), float | int):
        # timm skips F.dropout if `drop_rate` is 0, and the graph would not show its place. In eval
        # mode dropout does nothing, so any rate above 0 will do.
        copied.__dict__["drop_rate"] = 0.5
    return copied


@contextmanager
def _as_its_user_runs_it(model: nn.Module) -> Iterator[None]:
    """Set up a `with` block in which a copy of a network can be run and recorded.

    The copy runs uncompiled, and with the default dtype that its user has set. What its forward
    writes into the network is undone at the end of the block.

    Args:
        model: The network, whose parameters the copy shares.
    """
    with ExitStack() as stack:
        # The copy shares the network's parameters, so a forward must leave them unchanged.
        stack.enter_context(undisturbed(model))
        # What the user compiled would hide its steps.
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        # In float64, tensors that the forward makes in float32 would not fit the others.
        if calling.anchor(model).dtype == torch.float64:
            stack.enter_context(Widening())
        # Tensors without a stated dtype get the one that the user has set.
        stack.enter_context(callers_dtype())
        yield


def _drop_products_with_one(
    graph: fx.Graph, outputs: dict[fx.Node, list[str]], modules: Mapping[str, nn.Module]
) -> None:
    """Remove the nodes of `Copy` modules and of products with 1 from the graph.

    They change nothing. A node whose result has another dtype than its input stays.

    Args:
        graph: The graph, which is changed in place.
        outputs: For each node, the paths of the modules that return its value. The paths of a node
            that is removed go to the node that takes its place.
        modules: The modules of the network, by path.
    """
    for node in list(graph.nodes):
        # `values` is what is left of the factors without those that are 1.
        if node.op == "call_module" and isinstance(modules.get(str(node.target)), Copy):
            values = [node.args[0]]
        elif node.target in (operator.mul, torch.mul) and len(node.args) == 2 and not node.kwargs:
            values = [factor for factor in node.args if not _is_one(factor)]
        else:
            continue

        value = single(values)
        if isinstance(value, fx.Node) and value.meta["dtype"] == node.meta["dtype"]:
            node.replace_all_uses_with(value)
            outputs.setdefault(value, []).extend(outputs.pop(node, []))
            graph.erase_node(node)


def _is_one(factor: object) -> bool:
    """Whether a factor of a product is the number 1.0. A tensor, or the integer 1, is not."""
    return isinstance(factor, float) and factor == 1


def reason(error: Exception) -> str:
    """Return the first line of an error's message, and where the user's code raised it.

    The place is the innermost line of the traceback that is neither torch's nor normswap's. It is
    left out if there is none.
    """
    message = first_line(error)
    # The innermost frame comes last.
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_LIBRARY_FOLDERS):
            return f"{message} (at {frame.filename}:{frame.lineno}, `{frame.line}`)"
    return message
