"""Run a network for comparison: in eval mode, outputs by name, also in float64 without a copy."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from normswap.copying import to_double, tree
from normswap.errors import VerificationError, explained, first_line
from normswap.graph.anatomy import Anatomy
from normswap.graph.recorder import Widening
from normswap.models import calling, network_input
from normswap.models.calling import Example, form, named_tensors
from normswap.models.modes import callers_dtype, hooked, undisturbed, with_heads
from normswap.models.network_input import runs
from normswap.proof.distance import Outputs

# For a module of a result, the function that builds it anew in float64.
Replacements: TypeAlias = dict[nn.Module, Callable[[], nn.Module]]
# The outputs for an image alone may differ from those in its batch by this share of their size:
# half precision rounds.
_NEAR = 0.02
# Outputs are looked for in so many levels of lists, dicts and records.
_LEVELS = 12


class Source(Protocol):
    """The attributes of a network record that a comparison needs to know of the source.

    The source is the network that a result is compared with. `surgery.Network` has them.
    """

    @property
    def module(self) -> nn.Module: ...
    @property
    def seed(self) -> int: ...
    @property
    def coarsest_dtype(self) -> torch.dtype: ...
    @property
    def has_double(self) -> bool: ...
    @property
    def anatomy(self) -> Anatomy: ...
    @property
    def calls(self) -> list[Example]: ...
    @property
    def examples(self) -> list[Example]: ...
    @property
    def short_example(self) -> Example: ...
    @property
    def described(self) -> str: ...


@torch.no_grad()
def run(
    model: nn.Module,
    example: Example,
    paths: Sequence[str] = (),
    *,
    entrances: Sequence[str] = (),
    heads: bool = False,
) -> tuple[Outputs, Outputs]:
    """Run a network in eval mode, and return its outputs and values inside it.

    Args:
        model: The network.
        example: The call.
        paths: The modules whose outputs are returned, too.
        entrances: The modules whose first inputs are returned, too, under the name
            `entrance(path)`.
        heads: Whether auxiliary heads run as in training (`modes.with_heads`).

    Returns:
        The network's outputs by name, and the values inside by path. If forward calls a module
        several times, its values are concatenated in one dimension.
    """
    values: Outputs = {}

    # `site` is a key of `values`. A second value of the same site is put behind the first.
    def keep_value(site: str, value: object) -> None:
        if not isinstance(value, Tensor):
            return
        # Without the copy, an in-place activation behind the module would overwrite the value.
        value = value.clone()
        if site in values:
            value = torch.cat([values[site].flatten(), value.flatten()])
        values[site] = value

    def keep(path: str, _module: nn.Module, _args: object, output: object) -> None:
        keep_value(path, output)

    def keep_input(path: str, _module: nn.Module, args: tuple[object, ...]) -> None:
        keep_value(entrance(path), args[0] if args else None)

    present = tree(model)
    handles = [
        present[path].register_forward_hook(partial(keep, path))
        for path in dict.fromkeys(paths)
        if path in present
    ]
    handles += [
        present[path].register_forward_pre_hook(partial(keep_input, path))
        for path in dict.fromkeys(entrances)
        if path in present
    ]

    # The network runs in eval mode. What its forward writes to it is undone, and the tensors that
    # it makes have the caller's default dtype.
    with hooked(handles), with_heads(model) if heads else undisturbed(model), callers_dtype():
        output = example.call_on_copies(model)
    return outputs_of(output), values


def with_other_values(example: Example) -> Iterator[Example]:
    """Yield the example with other values, the most different ones first.

    At first every tensor is mirrored along its last axis, and floating-point values are multiplied
    by 0.7. A network may take no mirrored indices or boxes, so then floating-point values alone
    are changed, and at last they are only made smaller.
    """

    def mirrored(tensor: Tensor) -> Tensor:
        return tensor.flip(-1) if tensor.ndim else tensor

    def smaller(tensor: Tensor) -> Tensor:
        return 0.7 * tensor if tensor.ndim else tensor

    yield example.map(mirrored).map_floats(smaller)
    yield example.map_floats(lambda tensor: smaller(mirrored(tensor)))
    yield example.map_floats(smaller)


def entrance(path: str) -> str:
    """Return the key under which `run` returns the input of the module at `path`."""
    return f"the input of {path}"


def outputs_of(output: object) -> Outputs:
    """Return the tensors that a forward returned, and its numbers and arrays as tensors, by name.

    They are copies: a network may return a tensor that its next run writes into.

    Args:
        output: What the network's forward returns.
    """
    outputs: Outputs = {}

    def put(name: str, value: Tensor) -> None:
        # {"a.b": x} and {"a": {"b": y}} have the same name. The second gets another one, so that
        # both are compared.
        while name in outputs:
            name += "'"
        outputs[name] = value

    for name, tensor in named_tensors(output, depth=_LEVELS):
        put(name, dense(tensor))
    for name, number in calling.named_numbers(output, depth=_LEVELS):
        # The numbers of Python have 64 bits, and keep all of them. Of ints and bools torch chooses
        # the dtype.
        exact = {float: torch.float64, complex: torch.complex128}.get(type(number))
        put(name, torch.tensor(number, dtype=exact))
    for name, array in calling.named_arrays(output, depth=_LEVELS):
        put(name, array)
    return outputs


def unread(output: object) -> list[str]:
    """Return the names of the values in an output that may be results and that are not compared.

    Args:
        output: What the network's forward returns.
    """
    return list(calling.unread(output, depth=_LEVELS))


def dense(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, dense if it is sparse."""
    return tensor.clone() if tensor.layout == torch.strided else tensor.to_dense()


def both(
    source: nn.Module,
    result: nn.Module,
    example: Example,
    paths: Sequence[str] = (),
    tails: Sequence[str] = (),
    first: Example | None = None,
) -> tuple[tuple[Outputs, Outputs], tuple[Outputs, Outputs]] | None:
    """Run source and result on a call.

    Args:
        source: The source.
        result: The converted network.
        example: The call.
        paths: The modules of both networks whose outputs are returned, too.
        tails: Further modules of the source whose outputs are returned at the first call.
        first: The first of all calls. By default it is the call itself.

    Returns:
        For the source and for the result, the outputs and the values inside, as `run` returns them.
        None if the source does not run on this call, whose input size is not that of the first.

    Raises:
        VerificationError: One of the networks does not run, or the source gives no output.
    """
    first = first or example
    source_paths = (*paths, *tails) if example is first else paths
    try:
        outputs = run(source, example, source_paths)
    # The forward is the user's, and may raise anything.
    except Exception as error:
        # The source need not take another size than the first one. Such a call is left out.
        if example is first or example.images.shape[1:] == first.images.shape[1:]:
            raise VerificationError(
                f"the source does not run on {example}", first_line(error)
            ) from None
        return None

    if not outputs[0]:
        remedy = "Its forward has to return what it computes"
        raise VerificationError("the source gives no tensor", "there is nothing to compare", remedy)

    with explained(VerificationError, f"the result does not run on {example}"):
        return outputs, run(result, example, paths)


def outputs_double(model: nn.Module, example: Example) -> Outputs:
    """Return the network's outputs in float64.

    If possible, one module at a time gets float64 tensors, so that the network never exists twice.
    Otherwise, where a forward reads another module's tensors, a copy in float64 is run.

    Args:
        model: The network, in its own dtype.
        example: The call, in float64.
    """
    outputs = by_parts(model, example)
    if outputs is not None:
        return outputs
    double = to_double(model)
    # In this context, tensors that a forward makes in float32 are made in float64.
    with Widening():
        return run(double, example)[0]


def by_parts(
    model: nn.Module,
    example: Example,
    replacements: Replacements | None = None,
    tensors: Mapping[int, Tensor] | None = None,
) -> Outputs | None:
    """Return the network's outputs in float64, by casting one module at a time to float64.

    A module has float64 tensors only while its forward runs, so the network never exists twice.
    The result is None if the run fails, for instance because a forward mixes dtypes, or a module
    calls itself.

    Args:
        model: The network, in its own dtype.
        example: The call, in float64.
        replacements: For some modules of the network, the function that builds the module anew in
            float64. The tensors of all other modules are cast.
        tensors: Float64 tensors that are used in place of casts, by the `id` of the network's own
            tensors.
    """
    casts = _CastsWhileRunning(replacements or {}, tensors or {})
    handles = casts.hooks(model)
    # In the context `Widening`, tensors that a forward makes in float32 are made in float64.
    try:
        with hooked(handles), Widening():
            return run(model, example)[0]
    except (RuntimeError, KeyError):
        return None
    # After an error inside a forward its module still has float64 tensors, as no hook gave it its
    # own ones back.
    finally:
        casts.restore_all()


def _outside_function_modes(work: Callable[..., None]) -> Callable[..., None]:
    """Decorate a function so that no `TorchFunctionMode` sees the calls of torch in it.

    A mode that watches every call costs more than the call.
    """

    def unwatched(*args: object) -> None:
        with torch._C.DisableTorchFunction():
            work(*args)

    return unwatched


class _CastsWhileRunning:
    """Gives each module of a network float64 tensors while its forward runs.

    Args:
        replacements: For some modules, the function that builds the module anew in float64.
        tensors: Float64 tensors that are used in place of casts, by the `id` of the network's own
            tensors.
    """

    def __init__(self, replacements: Replacements, tensors: Mapping[int, Tensor]) -> None:
        self.replacements = replacements
        self.tensors = tensors
        # The own tensors of each module that runs now. It gets them back afterwards.
        self.own_tensors: dict[nn.Module, dict[str, Tensor]] = {}
        # The tensors of modules that were built in float64, by the `id` of the network's own. Each
        # waits here until the module that owns it runs, which may be inside the replaced one.
        self.built: dict[int, Tensor] = {}

    def hooks(self, model: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
        """Register hooks that give each module float64 tensors while its forward runs.

        Args:
            model: The network, whose modules get the hooks.

        Returns:
            The handles that remove the hooks.
        """
        owners = [
            module for module in nn.Module.modules(model) if module._parameters or module._buffers
        ]
        # The hooks that build come first, as hooks run in the order in which they are registered.
        handles = [module.register_forward_pre_hook(self._build) for module in self.replacements]
        for owner in owners:
            handles += [
                owner.register_forward_pre_hook(self._use_double),
                owner.register_forward_hook(self._restore),
            ]
        return handles

    @_outside_function_modes
    def _build(self, module: nn.Module, _args: object) -> None:
        """Build the float64 replacement of a module, before the module's forward.

        Its tensors wait in `built` until the modules that own their counterparts run.
        """
        doubles = dict(_tensors(self.replacements[module]()))
        self.built.update(
            {id(own): doubles[name].detach() for name, own in _tensors(module) if name in doubles}
        )

    @_outside_function_modes
    def _use_double(self, module: nn.Module, _args: object) -> None:
        """Give a module float64 tensors, before its forward: those that were built, or casts."""
        tensors_of_module = {**module._parameters, **module._buffers}
        floats = {
            name: tensor
            for name, tensor in tensors_of_module.items()
            if tensor is not None and tensor.is_floating_point()
        }

        # The module gets these very objects back after its forward, so that tied tensors stay tied
        # and what waits for a parameter's gradient (DistributedDataParallel) goes on waiting.
        self.own_tensors[module] = floats
        # Tensors that `_build` has made come first, as they are made for this one run. Then come
        # those that the caller gave (`tensors`). All others are cast.
        for name, tensor in floats.items():
            double_tensor = self.built.pop(id(tensor), self.tensors.get(id(tensor)))
            if double_tensor is None:
                double_tensor = tensor.data.double()
            if name in module._parameters:
                double_tensor = nn.Parameter(double_tensor, requires_grad=False)
            _put(module, name, double_tensor)

    @_outside_function_modes
    def _restore(self, module: nn.Module, *_: object) -> None:
        """Give a module its own tensors back, after its forward."""
        for name, tensor in self.own_tensors.pop(module).items():
            _put(module, name, tensor)

    def restore_all(self) -> None:
        """Give the modules that still have float64 tensors, after an error, their own ones back."""
        for module in list(self.own_tensors):
            self._restore(module)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a module by name, a shared one under each name."""
    yield from nn.Module.named_parameters(module, remove_duplicate=False)
    yield from nn.Module.named_buffers(module, remove_duplicate=False)


def noise(
    model: nn.Module,
    size: Sequence[int],
    *,
    batch: int = 2,
    seed: int = 0,
    ran: Collection[str] = (),
) -> list[Example]:
    """Return calls with N(0, 1) inputs (batch, C, H, W) at small sizes: 64 and 97 pixels.

    If the network does not run on the first size, the result is a single call, of the next size
    that it runs on: 97 pixels, or at last `size` itself.

    Args:
        model: The network.
        size: The size (C, H, W) that is tried last.
        batch: The number of samples of the first call. The second has one.
        seed: The seed of the noise.
        ran: The calls that the network is known to run on, each as `str(call)`. They are returned
            without a trial run.

    Raises:
        VerificationError: The network runs on none of these calls.
    """
    # A tensor of the network, whose device and dtype the noise gets.
    like = calling.anchor(model)
    generator = torch.Generator().manual_seed(seed)
    # A call with empty tensors, which shows how images are given to the network.
    empty_call = form(model)
    why = ""

    first, *others = dict.fromkeys([*network_input.small(size), tuple(size)])
    for shape in (first, *others):
        call = empty_call.of(torch.randn(batch, *shape, generator=generator).to(like))
        # The forward is the user's, and may raise anything.
        try:
            # The first sample alone is tried first, as it costs less. A network whose forward fixes
            # the number of images runs on the whole batch only.
            if str(call) not in ran and not runs(model, call.first(1)):
                run(model, call)
        except Exception as error:
            why = first_line(error)
            continue

        # The image of the second size is not tried: if the network does not take it, `both` leaves
        # it out of the comparison.
        calls = [call]
        if shape == first and others:
            image = torch.randn(1, *others[0], generator=generator).to(like)
            calls.append(empty_call.of(image))
        return calls

    raise VerificationError(f"the network does not run on an input of size {tuple(size)}", why)


def runs_on_one(model: nn.Module, example: Example) -> bool:
    """Whether the network's outputs for the first sample alone are those that it has in the batch.

    They are not if forward fixes the number of samples, or mixes samples. For a batch that has one
    sample or cannot be cut, it is true.

    Args:
        model: The network.
        example: The batch.
    """
    # `first` returns the example itself if it has one sample only, or cannot be cut.
    alone = example.first(1)
    if alone is example:
        return True

    try:
        outputs, _ = run(model, alone)
    # A user's forward may raise anything.
    except Exception:
        return False

    # The rows of the batch's outputs that belong to the first sample.
    whole, _ = run(model, example)
    first_rows: Outputs = {}
    for name, value in whole.items():
        if name in outputs and outputs[name].ndim == value.ndim:
            first_rows[name] = value[: len(outputs[name])] if value.ndim else value

    return outputs.keys() == first_rows.keys() and all(
        _is_near(value, first_rows[name]) for name, value in outputs.items()
    )


def _is_near(value: Tensor, other: Tensor) -> bool:
    """Whether two tensors differ by at most a fiftieth of their size, as a relative L2."""
    if value.shape != other.shape:
        return False
    wide = torch.complex128 if value.is_complex() else torch.float64
    difference = (value.to(wide) - other.to(wide)).nan_to_num(0.0)
    return bool(difference.norm() <= _NEAR * value.to(wide).nan_to_num(0.0).norm())


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in the place of a parameter or buffer of a module.

    Args:
        module: The module that owns the tensor.
        name: The name of a parameter or buffer of the module.
        tensor: The tensor that takes its place.
    """
    table: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
    table[name] = tensor
