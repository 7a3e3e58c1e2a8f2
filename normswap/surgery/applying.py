"""DO: carry out a plan. No decisions are made here.

A step of a plan has edits. An edit names a path, the class of the layer that is placed there, and
the modules (`reads`) whose tensors the new layer absorbs. Every new layer is built from the
untouched model. Then the model is copied with the new layers in place. So edits have no order, the
source is never written to, and a tensor that is replaced is never copied.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from timm import layers as timm_layers
from torch import nn
from torch.nn.utils import parametrize

from normswap import copying, schemes
from normswap.errors import PlanError, first_line
from normswap.layers import placeholders
from normswap.layers.planned_layer import Held, PlannedLayer, planned_layers
from normswap.models import calling
from normswap.plan import AbsorbMode, Edit, Step
from normswap.proof.comparison import Claims
from normswap.proof.running import Replacements
from normswap.sites.site import site_of
from normswap.surgery import deploying, learning

# The attributes of torch's layers that state numbers of channels or features.
_WIDTHS = ("in_channels", "out_channels", "in_features", "out_features", "num_features")


def apply(model: nn.Module, steps: Sequence[Step], *, double: bool = False) -> nn.Module:
    """Return a new model of the same class, to which the steps of a plan are applied.

    Args:
        model: The source, which is not changed.
        steps: The steps of a plan, in order.
        double: Whether the new model is in float64. Then no value is rounded to less on the way.

    Raises:
        PlanError: An edit names a path, a layer or an argument that does not exist.
    """
    for step in steps:
        model = apply_step(model, step, double=double)
    return model


def apply_step(model: nn.Module, step: Step, *, double: bool = False) -> nn.Module:
    """Return a new model of the same class, to which one step of a plan is applied.

    Args:
        model: The model before the step, which is not changed.
        step: One step of a plan.
        double: Whether the new model is in float64. Then no value is rounded to less on the way.

    Raises:
        PlanError: An edit names a path, a layer or an argument that does not exist.
    """
    duplicate = copying.to_double if double else copying.duplicate

    # The new layer for each old module, by the old module's `id`. When the model is copied, the new
    # layer is taken in place of a copy of the old module.
    memo: copying.Memo = {}
    # The paths of norms in whose place a layer of another class stands.
    gone: list[str] = []
    # Paths and new values of parameters and plain numbers (a dropout rate). They are set on the
    # copy at the end.
    attributes: list[tuple[str, object]] = []

    # Innermost paths come first: a module that stays is copied with the new layers inside it.
    for edit in sorted(step.edits, key=lambda edit: -edit.path.count(".")):
        old = find(model, edit.path, f"step '{step.scheme}'")
        reads = [_module(model, path, f"edit of {edit.path}") for path in edit.reads]
        like = _like(model, old, reads, double=double)
        if double:
            reads = _in_double(reads)

        if not isinstance(old, nn.Module):
            attributes.append((edit.path, _replacement(edit, old, reads, like)))
            continue

        original = old
        if edit.keep:
            # The old module stays inside the new layer. It is copied with the new layers in it,
            # which `memo` has.
            old = duplicate(old, memo)
        elif double and not layer_of(edit).CASTS:
            # The old module is only read. Layers with `CASTS` read it in float64 themselves, others
            # are given a float64 copy.
            old = duplicate(old, {})

        new = memo[id(original)] = _replacement(edit, old, reads, like)
        if isinstance(new, nn.Module):
            # Which parameters are trainable, the mode, and the widths are taken over.
            learning.follow(model, edit, original, reads, new)
            _keep_widths(original, new)
        # Methods that fuse norms must find nothing to do around this path (`keep_as_deployed`).
        if site_of(original).is_norm and not isinstance(new, type(original)):
            gone.append(edit.path)

    result = duplicate(model, memo)
    for path, value in attributes:
        parent, _, name = path.rpartition(".")
        setattr(result.get_submodule(parent), name, value)

    deploying.keep_as_deployed(result, gone)
    return result


def _keep_widths(old: nn.Module, new: nn.Module) -> None:
    """Set attributes such as `num_features` on a new layer, with the values of the old one.

    Other code reads these numbers of channels: timm's blocks read the `in_channels` of a branch,
    other blocks the `num_features` of a norm. Attributes that the new layer has are not changed.

    Args:
        old: The module that stood at the path.
        new: The module that stands there now.
    """
    for name in _WIDTHS:
        width = getattr(old, name, None)
        if isinstance(width, int) and not hasattr(new, name):
            setattr(new, name, width)


def _like(
    model: nn.Module, old: Held, reads: Sequence[nn.Module], *, double: bool = False
) -> torch.Tensor:
    """Return an empty tensor with the dtype and device that a new layer gets.

    They are those of the first floating-point tensor of the replaced module. If it has none, the
    modules in `reads` are asked, and then the network (`calling.anchor`). The parts of a network
    may have different dtypes.

    Args:
        model: The network.
        old: The module, parameter or number at the edit's path.
        reads: The other modules whose tensors the new layer uses, such as a folded norm.
        double: Whether the tensor is in float64, whatever the network's dtype is.
    """
    tensors: list[torch.Tensor] = [old] if isinstance(old, nn.Parameter) else []
    for module in (old, *reads):
        if isinstance(module, nn.Module):
            tensors += (*nn.Module.parameters(module), *nn.Module.buffers(module))

    floats = (tensor for tensor in tensors if tensor.is_floating_point())
    tensor = next(floats, None)
    if tensor is None:
        tensor = calling.anchor(model)
    return torch.empty(0, dtype=torch.float64 if double else tensor.dtype, device=tensor.device)


def _in_double(reads: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the given modules, with a float64 copy in place of each parametrized module.

    The weight of a parametrized module (`torch.nn.utils.parametrize`, such as weight norm) is
    computed when it is read. In float32 that would round it. The stored tensors of the other
    modules have the same values in every precision, so these are returned as they are.
    """
    widened: list[nn.Module] = []
    for module in reads:
        if parametrize.is_parametrized(module):
            module = copying.to_double(module)
        widened.append(module)
    return widened


def doubles(
    model: nn.Module, result: nn.Module, step: Step
) -> tuple[Replacements, dict[int, torch.Tensor]]:
    """Return what a step placed in its result, in float64: the arguments of `running.by_parts`.

    Args:
        model: The network before the step.
        result: The network after the step.
        step: The step.

    Returns:
        For each module that the step placed in the result, a function that builds the module in
        float64. Then the parameters that the step set, in float64, each by the `id` of the
        parameter in the result.
    """
    # A path of the model may have moved in the result (`_path_after`).
    depths = {edit.path: edit.depth for edit in step.edits}
    replacements: Replacements = {}
    tensors: dict[int, torch.Tensor] = {}

    for edit in step.edits:
        old = find(model, edit.path, f"step '{step.scheme}'")
        reads = [_module(model, path, f"edit of {edit.path}") for path in edit.reads]
        like = _like(model, old, reads, double=True)
        reads = _in_double(reads)
        new_path = _path_after(edit.path, depths)

        # A module is built when its forward begins. A parameter is built at once.
        if isinstance(old, nn.Module):
            placed_module = result.get_submodule(new_path)
            replacements[placed_module] = partial(_layer_in_double, edit, old, reads, like)
            continue
        value = _replacement(edit, old, reads, like)
        if isinstance(value, torch.Tensor):
            tensors[id(find(result, new_path, "the result"))] = value.detach()

    return replacements, tensors


def _layer_in_double(
    edit: Edit, old: nn.Module, reads: list[nn.Module], like: torch.Tensor
) -> nn.Module:
    """Return the module that an edit of the plan puts in the place of `old`, built in float64.

    `running.by_parts` runs the result with the tensors of these modules in place of its own.

    Args:
        edit: The edit, which names the path, the class of the new layer and its arguments.
        old: The module at the edit's path, before the step.
        reads: The other modules whose tensors the new layer uses, such as a folded norm.
        like: An empty float64 tensor on the layer's device.
    """
    if edit.keep:
        # The old module stays inside the new layer. `by_parts` casts it to float64 when it runs, so
        # it need not be built here, and an identity takes its place.
        old = nn.Identity()
    elif not layer_of(edit).CASTS:
        # Layers with `CASTS` read the old module in float64 themselves.
        old = copying.to_double(old)
    new = _replacement(edit, old, reads, like)
    assert isinstance(new, nn.Module)
    return new


def find(model: nn.Module, path: str, who: str) -> Held:
    """Return the module, parameter or plain number (a dropout rate) at a dotted path.

    Args:
        model: The network.
        path: The path.
        who: The subject of the error's sentence, such as "plan" or "step 'folded'".

    Raises:
        PlanError: There is nothing at the path, or something else, such as a bool or a method.
    """
    value: object = model
    for name in path.split("."):
        # Each name but the last must lead to a module, and none may be one of Python's own, such as
        # `__class__`.
        may_lead_on = isinstance(value, nn.Module) and not name.startswith("__")
        if not may_lead_on or not hasattr(value, name):
            raise PlanError(f"{who} names {path!r:.200}, which is not in {type(model).__name__}")
        value = getattr(value, name)

    # To Python a bool is an int, too. But no edit replaces one.
    is_flag = isinstance(value, bool)
    if is_flag or not isinstance(value, nn.Module | float | int | nn.Parameter):
        kind = type(value).__name__
        raise PlanError(f"{who} names {path!r:.200}, which is no module but a {kind}")
    return value


def _module(model: nn.Module, path: str, who: str) -> nn.Module:
    """Return the module at a path. A parameter there is returned as the gamma of a new LayerScale.

    So an edit can absorb a plain parameter that scales channels as it absorbs a LayerScale.

    Args:
        model: The network.
        path: The path.
        who: The subject of the error's sentence.

    Raises:
        PlanError: There is no module and no such parameter at the path.
    """
    module = find(model, path, who)
    if isinstance(module, nn.Parameter) and module.ndim:
        scale = timm_layers.LayerScale(module.numel())
        scale.gamma = nn.Parameter(module.detach().flatten(), module.requires_grad)
        return scale
    if not isinstance(module, nn.Module):
        raise PlanError(f"{who} names {path!r}, which is no module but a {type(module).__name__}")
    return module


def renames(model: nn.Module, step: Step) -> Iterator[tuple[str, str]]:
    """Yield the old and the new full name of each tensor that a step renames.

    Args:
        model: The network before the step.
        step: The step.
    """
    for edit in step.edits:
        # A layer class may rename the tensors that it takes over. If layers are put around the
        # module, its tensors are called `inner.NAME`, with one `inner` for each of them.
        names = layer_of(edit).NAMES
        if not edit.depth and not names:
            continue
        for name in _module(model, edit.path, "plan").state_dict():
            new_name = "inner." * edit.depth + names.get(name, name)
            if new_name != name:
                yield f"{edit.path}.{name}", f"{edit.path}.{new_name}"


def claims(steps: Sequence[Step], earlier: Sequence[Step] = ()) -> Claims:
    """Return at which residual blocks an exact result claims to have the source's values.

    Args:
        steps: The steps from the source to the result.
        earlier: The steps that led to the source. If one of them rescaled the residual stream, a
            step from the source on may undo that, which changes the values at blocks again.
    """
    every_step = [*earlier, *steps]
    rescales = not all(schemes.of(step).scheme.keeps_blocks for step in every_step)

    # If a layer absorbs a norm or a LayerScale, the values between the two change, though the
    # network computes the same. Each pair is in the order of the forward: what is absorbed precedes
    # the layer or follows it. The terms of a sum have no order, so both pairs are taken.
    changed_between: list[tuple[str, str]] = []
    for step in steps:
        for edit in step.edits:
            for path, absorption in edit.absorbed:
                if absorption.way.precedes or absorption.way is AbsorbMode.SUM:
                    changed_between.append((path, edit.path))
                if not absorption.way.precedes:
                    changed_between.append((edit.path, path))

    return Claims(
        keeps_blocks=not rescales and not centres_streams(every_step),
        changed_between=tuple(changed_between),
    )


def centres_streams(steps: Sequence[Step]) -> bool:
    """Whether the steps take the mean out of a residual stream, as `rmsnorm` does."""
    edits = itertools.chain.from_iterable(step.edits for step in steps)
    return any(edit.args.get("centred") for edit in edits)


def layer_of(edit: Edit, name: str = "") -> type[PlannedLayer]:
    """Return the class of the layer that an edit places, or of another layer by its name.

    Args:
        edit: The edit of a plan.
        name: The name of a layer class. The empty name stands for the edit's own layer.

    Raises:
        PlanError: No layer has that name.
    """
    layers = planned_layers()
    name = name or edit.layer
    if name not in layers:
        raise PlanError(
            f"edit of {edit.path} names an unknown layer {name!r}", f"known: {', '.join(layers)}"
        )
    return layers[name]


def check_gone(source: nn.Module, result: nn.Module, step: Step) -> None:
    """Raise PlanError if a BatchNorm that the step replaces is still in the result.

    Args:
        source: The network before the step.
        result: The network after the step.
        step: The step.
    """
    # Edits that leave the module in place, or put another norm there, are left out. So are edits
    # of parameters and numbers.
    edits = [edit for edit in step.edits if not (edit.keep or layer_of(edit).KEEPS_NORM)]
    gone = {edit.path for edit in edits if isinstance(find(source, edit.path, "plan"), nn.Module)}
    depths = {edit.path: edit.depth for edit in step.edits}

    still: list[str] = []
    for path in gone:
        old = source.get_submodule(path)
        new = result.get_submodule(_path_after(path, depths))
        if site_of(old).is_batchnorm and site_of(new).is_batchnorm:
            still.append(path)
    if still:
        raise PlanError(f"{len(still)} norms of the plan are still there", still[0])


def placed(result: nn.Module, step: Step) -> dict[str, nn.Module]:
    """Return the module that each edit of a step placed in the result, by the edit's path.

    An edit says what is put in the place of one module, parameter or number of the network. Edits
    of parameters and plain numbers place no module, and are left out.
    """
    # If the step puts layers around a module, the paths inside it are other ones in the result.
    depths = {edit.path: edit.depth for edit in step.edits}
    modules = copying.tree(result)
    new_paths = {edit.path: _path_after(edit.path, depths) for edit in step.edits}
    return {path: modules[new_path] for path, new_path in new_paths.items() if new_path in modules}


def _path_after(path: str, depths: Mapping[str, int]) -> str:
    """Return the path that a module has after the step.

    If a layer is put around a module that stays, the module becomes the layer's `inner`. So with a
    layer around `stages.0`, the path `stages.0.norm` becomes `stages.0.inner.norm`. The path
    `stages.0` itself is then that of the layer around.

    Args:
        path: The path before the step.
        depths: How many layers the step puts around the module at a path, by this path.
    """
    parts = path.split(".")
    # The paths of the modules on the way: `a`, `a.b` and `a.b.c` for `a.b.c`.
    prefixes = [".".join(parts[: i + 1]) for i in range(len(parts))]
    modules_around = [
        name + ".inner" * depths.get(prefix, 0)
        for name, prefix in zip(parts[:-1], prefixes, strict=False)
    ]
    return ".".join([*modules_around, parts[-1]])


def _replacement(edit: Edit, old: Held, reads: list[nn.Module], like: torch.Tensor) -> Held:
    """Build what an edit of the plan puts at its path: a layer, a parameter or a plain number.

    Args:
        edit: The edit, which names the path, the class of the new layer and its arguments.
        old: The module, parameter or number that is replaced. A module that stays (`edit.keep`) is
            put into the new layer.
        reads: The other modules whose tensors the new layer uses, such as a folded norm.
        like: An empty tensor with the dtype and device of the new layer.

    Raises:
        PlanError: The layer cannot be built from what stands there, or with the edit's arguments.
    """
    # Only some layer classes (`TENSORS`) build a parameter in the place of a parameter.
    layer = layer_of(edit)
    if isinstance(old, nn.Parameter) and old.ndim and not layer.TENSORS:
        raise PlanError(
            f"edit of {edit.path} names no module but a Parameter", f"{edit.layer} cannot sit there"
        )

    try:
        with torch.no_grad():
            # The further layers of the edit, which run after the first one. They replace nothing,
            # so they are built from an identity.
            later_layers = [
                layer_of(edit, follower.layer).replacing(nn.Identity(), like=like, **follower.args)
                for follower in edit.then
            ]

            # If the old module stays, it runs first and the edit's own layer after it. Otherwise
            # the edit's own layer takes its place.
            if edit.keep:
                new = old
                own = layer.replacing(nn.Identity(), *reads, like=like, **edit.arguments)
                later_layers.insert(0, own)
            else:
                new = layer.replacing(old, *reads, like=like, **edit.arguments)

            # Each is chained to all that come before it.
            for next_layer in later_layers:
                if not isinstance(new, nn.Module) or not isinstance(next_layer, nn.Module):
                    raise TypeError("only layers follow one another")
                new = placeholders.chained(new, next_layer)

            # If the edit asks for it, layers that write into their input are changed, so that they
            # return a new tensor.
            if edit.out_of_place and isinstance(new, nn.Module):
                new = placeholders.out_of_place(new)
            return new
    # The arguments may be anything that JSON has, and the layer another package's.
    except (
        TypeError,
        ValueError,
        RuntimeError,
        AttributeError,
        ArithmeticError,
        LookupError,
        AssertionError,
        MemoryError,
    ) as error:
        why = f"{edit.layer}.replacing: {first_line(error)}"
        raise PlanError(f"edit of {edit.path} does not fit", why) from error
