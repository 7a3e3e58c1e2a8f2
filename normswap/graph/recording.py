"""SEE: a network's forward as a graph, recorded on an example, and again on another size if the
size may matter.

A record has the path that forward took. A forward that asks for no size takes the same path at
every size, so one record of a small example is enough. Nodes of another path are kept, too
(`Traced.alternative_nodes`): a change of a module must be right on both.
"""

import operator
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from normswap.copying import tree, twin
from normswap.errors import TraceError, first_line, spelled
from normswap.graph.recorder import Recorder, Widening
from normswap.graph.tracing import Traced, inputs, single
from normswap.layers import affine
from normswap.layers.placeholders import Copy
from normswap.models import calling, network_input
from normswap.models.calling import Example
from normswap.models.modes import show_heads, undisturbed
from normswap.models.weight_files import some

# Folders of torch and of this package, whole paths: a user's folder may have one of their names.
_NOT_THEIRS = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])
)
# The second size of images to record is the first of these that the network takes.
_OTHERS = ((96, 128), (160, 224))


def record(model: nn.Module, inputs: calling.Inputs = None) -> Traced:
    """Record `model`, which is not changed, in eval mode, on an example and on another size of it.

    `inputs`: as in `inspect`. Raises SourceError: it cannot be looked at yet
    (`network_input.check_shapes`); TraceError: it does not run, and where; or something in it
    cannot be seen.
    """
    network_input.check_shapes(model)
    _check_compiled(model)
    _check_closures(model)
    main, first, other_examples = _first(model, inputs)
    main.form = first.hollow
    if main.untracked:
        _check_constants(model, main, first)
    _follow_heads(model, main, first)
    _follow_ways(model, main, inputs)
    main.remarks += _left_out(model, main, first)
    # Rows of features may come in more dimensions.
    if main.input_independent and first.images.ndim > 3:
        main.flexible = True
        return main
    flexible = False
    for other in other_examples:
        try:
            second = record_once(model, other)
        except TraceError:
            continue
        if _same(main, second):
            main.others.append(second)
        elif _outline(main) != _outline(second):
            main.add_alternative(second)
            main.remarks.append(f"{other} takes another way than {first}; both were followed")
        main.recorded += second.recorded
        flexible |= other.images.shape[1:] != first.images.shape[1:]
        break
    main.flexible = flexible
    if not flexible:
        main.remarks.append(f"recorded at one size only, {first}")
    main.remarks += [
        f"{path or 'forward'} looks at values: recorded is the way it took"
        for path in main.branches
    ]
    return main


def _check_compiled(model: nn.Module) -> None:
    """Raise TraceError where a layer is compiled: it cannot be replaced."""
    for path, module in tree(model).items():
        if path and (getattr(module, "_compiled_call_impl", None) or hasattr(module, "_orig_mod")):
            remedy = "Convert the network first, then compile the result"
            raise TraceError(f"{path} is compiled (torch.compile)", remedy=remedy)


def _check_closures(model: nn.Module) -> None:
    """Raise TraceError where a hook or a forward is a closure over a module of the network, which a
    copy would call.
    """
    modules = tree(model)
    own = {id(module) for module in modules.values()}
    for path, module in modules.items():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        for function in (*hooks, vars(module).get("forward")):
            cells = getattr(function, "__closure__", None) or ()
            if any(id(cell.cell_contents) in own for cell in cells):
                kind = "a hook" if function in hooks else "the forward"
                raise TraceError(
                    f"{kind} of {path or 'the network'} is a function that holds a module of the"
                    " network itself",
                    "a copy of the network would still use that one",
                    "Make it a method, or register it after the conversion",
                )


def _first(model: nn.Module, inputs: calling.Inputs) -> tuple[Traced, Example, list[Example]]:
    if inputs is not None:
        device = calling.anchor(model).device
        batches = [batch.on(device) for batch in calling.batches(inputs)]
        short = batches[0].first(1)
        try:
            traced = record_once(model, short)
        except TraceError:
            short = batches[0]
            traced = record_once(model, short)
        shapes = {str(short)}
        apart = [
            b.first(2)
            for b in batches
            if b.images.shape[1:] != short.images.shape[1:] and str(b) not in shapes
        ]
        return traced, short, [*apart[:1], *_resized(batches[0].first(2)), batches[0].first(2)]
    first_error: TraceError | None = None
    sizes = network_input.candidates(model)
    for small in network_input.small(sizes[0])[:1]:
        with suppress(TraceError):
            example = network_input.noise(model, small, batch=2)
            traced = record_once(model, example)
            if traced.input_independent:
                return traced, example, []
    # Most networks run at the first size: the other examples are not made then.
    examples = ((size, network_input.noise(model, size)) for size in sizes)
    for size, example in chain(examples, network_input.tokens(model)):
        try:
            traced = record_once(model, example)
        except TraceError as error:
            first_error = first_error or error
            continue
        if not size:
            return traced, example, []
        ranked = [
            network_input.noise(model, other, batch=3)
            for other in sizes
            if len(size) == 1 and other[1:] == size
        ]
        return traced, example, [*ranked, *_resized(network_input.noise(model, size, batch=2))]
    remedy = "Say what it takes: '--input NAME=SHAPE' (in Python `inputs=`)"
    raise first_error or TraceError(
        f"what {type(model).__name__} takes is not known", remedy=remedy
    )


def _follow_heads(model: nn.Module, main: Traced, example: Example) -> None:
    """Record training mode, too, where it alone reaches some BatchNorms: those of auxiliary heads."""
    left = [id(module) for module in main.modules.values() if affine.is_batchnorm(module)]
    left = [key for key in left if key not in main.calls]
    if not left:
        return
    try:
        second = record_once(model, example, heads=True)
    except TraceError:
        return
    if any(key in second.calls for key in left):
        main.add_alternative(second)
        main.heads = True
        main.remarks.append("auxiliary heads, which only training runs, were followed, too")


def _follow_ways(model: nn.Module, main: Traced, inputs: calling.Inputs) -> None:
    """Add records of the user's batches that take another way, because of an argument or of values."""
    if inputs is None:
        return
    batches = calling.batches(inputs)
    arguments = {batch.plain for batch in batches[:1]}
    for batch in batches[1:]:
        if batch.plain in arguments and not main.branches:
            continue
        arguments.add(batch.plain)
        try:
            way = record_once(model, batch.on(calling.anchor(model).device))
        except TraceError:
            continue
        if all(_outline(way) != _outline(other) for other in (main, *main.alternatives)):
            main.add_alternative(way)
            main.remarks.append(f"{batch} takes another way than {batches[0]}; both were followed")


def _left_out(model: nn.Module, main: Traced, example: Example) -> Iterator[str]:
    """A remark on norms that no forward called, where a default argument or a value may be the
    reason.
    """
    norms = [
        path
        for path, module in main.modules.items()
        if affine.is_norm(module) and id(module) not in main.calls
    ]
    defaults = calling.defaults(model, example)
    if norms and defaults:
        yield f"never called: {some(norms)}; forward had the default of {', '.join(defaults)}"
    elif norms and main.branches:
        yield f"never called: {some(norms)}"


def _resized(example: Example) -> Iterator[Example]:
    """The example with its maps or series at other sizes, and itself."""
    for side in _OTHERS:
        yield example.map(partial(_other, side=side))
    yield example


def _other(x: Tensor, side: tuple[int, int]) -> Tensor:
    if x.ndim < 3 or not x.is_floating_point():
        return x
    height, width = x.shape[-2:]
    if x.ndim < 4:
        return F.interpolate(x, width + 32)
    size = side if height * width >= 128 * 160 else (height + 32, width + 64)
    resized: Tensor = F.interpolate(x.flatten(1, -3), size).unflatten(1, x.shape[1:-2])
    return resized


def _check_constants(model: nn.Module, first: Traced, example: Example) -> None:
    """Raise TraceError where a tensor of unknown origin differs on another input of the same size."""
    second = record_once(model, example.map_floats(lambda t: 0.9 * t.flip(-1)))
    for name, path in first.untracked.items():
        a = first.constants[name]
        b = second.constants.get(name)
        if torch._C._functorch.is_functorch_wrapped_tensor(a):
            where = path or type(model).__name__
            raise TraceError(
                f"the forward of {where} calls torch.func (vmap)",
                "what happens in there cannot be seen",
            )
        if b is None or a.shape != b.shape or not torch.equal(a, b):
            raise TraceError(
                f"the forward of {path or type(model).__name__} leaves PyTorch, so what it computes"
                " cannot be followed",
                "it calls NumPy, a scripted function or a custom operator",
                "Use torch operations there",
            )


def _same(first: Traced, second: Traced) -> bool:
    if len(first.nodes) != len(second.nodes):
        return False
    return all(
        a.op == b.op
        and a.target == b.target
        and a.meta["inside"] == b.meta["inside"]
        and [first.index(i) for i in inputs(a)] == [second.index(i) for i in inputs(b)]
        for a, b in zip(first.nodes, second.nodes, strict=True)
    )


def _outline(traced: Traced) -> object:

    def label(node: fx.Node) -> object:
        if node.op == "placeholder":
            return node.meta["place"]
        return (
            node.target
            if node.op in ("call_module", "get_attr")
            else (str(node.target), node.meta["inside"])
        )

    calls = [node.target for node in traced.nodes if node.op == "call_module"]
    return calls, {(label(source), label(node)) for node in traced.nodes for source in inputs(node)}


@torch.no_grad()
def record_once(
    model: nn.Module,
    example: Example,
    look: Callable[[str, object], None] | None = None,
    *,
    heads: bool = False,
) -> Traced:
    """Record one forward, with `heads` as in training (`modes.with_heads`); raises TraceError where
    it does not run.
    """
    copied = twin(model)
    if heads:
        show_heads(copied)
    if isinstance(getattr(copied, "drop_rate", None), float | int):
        # timm calls F.dropout only `if self.drop_rate`.
        copied.__dict__["drop_rate"] = 0.5
    recorder = Recorder(copied, look)
    try:
        with ExitStack() as stack:
            # The twin has the network's own parameters.
            stack.enter_context(undisturbed(model))
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if calling.anchor(model).dtype == torch.float64:
                stack.enter_context(Widening())
            recorder.run(example)
    except TraceError:
        raise
    except Exception as error:
        where = f"{type(model).__name__} does not run on an input of size {example}"
        size = spelled("input_size", metavar="C,H,W")
        remedy = f"Say what it takes: `{size}`, or `--input NAME=SHAPE` (in Python `inputs=`)"
        why = reason(error)
        floats = (
            t
            for t in (*model.parameters(), *model.buffers())
            if t.is_floating_point() or t.is_complex()
        )
        dtypes = dict.fromkeys(
            str(tensor.dtype).removeprefix("torch.") for tensor in (*floats, example.images)
        )
        if len(dtypes) > 1:
            why = f"the network and its input are of {' and '.join(dtypes)}: {why}"
            remedy = "Cast them to one: model.float(), x.float()"
        raise TraceError(
            ", at ".join(filter(None, (where, recorder.failed))), why, remedy
        ) from error
    modules = tree(model)
    _leave_out_ones(recorder.graph, recorder.outputs, modules)
    traced = Traced(recorder.graph, modules, recorder.outputs, recorder.opaque, recorder.constants)
    traced.recorded.append(str(example))
    traced.untracked = recorder.untracked
    traced.size_dependent = recorder.size_dependent
    traced.branches = list(dict.fromkeys(recorder.branches))
    return traced


def _leave_out_ones(
    graph: fx.Graph, outputs: dict[fx.Node, list[str]], modules: Mapping[str, nn.Module]
) -> None:
    """Remove copies and products with 1 from the graph, but those that change the dtype."""
    for node in list(graph.nodes):
        if node.op == "call_module" and isinstance(modules.get(str(node.target)), Copy):
            values = [node.args[0]]
        elif node.target in (operator.mul, torch.mul) and len(node.args) == 2 and not node.kwargs:
            values = [
                factor for factor in node.args if not (isinstance(factor, float) and factor == 1)
            ]
        else:
            continue
        value = single(values)
        if isinstance(value, fx.Node) and value.meta["dtype"] == node.meta["dtype"]:
            node.replace_all_uses_with(value)
            outputs.setdefault(value, []).extend(outputs.pop(node, []))
            graph.erase_node(node)


def reason(error: Exception) -> str:
    """The reason, with the last line of the model's own code that led to it."""
    message = first_line(error)
    user_frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not f.filename.startswith(_NOT_THEIRS)
    ]
    if not user_frames:
        return message
    return (
        f"{message} (at {user_frames[-1].filename}:{user_frames[-1].lineno},"
        f" `{user_frames[-1].line}`)"
    )
