"""Run a network for comparison: in eval mode, outputs by name, also in float64 without a copy."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeAlias

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
# An image alone gives what it gives in its batch, up to this share: half precision rounds.
_NEAR = 0.02
# Outputs are looked for in so many levels of lists, dicts and records.
_LEVELS = 12


class Source(Protocol):
    """What a comparison asks of the network that a result is compared with (`surgery.Network`)."""

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
    """Run a network in eval mode, and return what it gives, outside and inside.

    Args:
        model: The network.
        example: The call.
        paths: The modules whose outputs are returned, too.
        entrances: The modules whose inputs are returned, too, as `entrance(path)`.
        heads: Whether auxiliary heads run as in training (`modes.with_heads`).

    Returns:
        The network's outputs by name, and the values inside by path. The values of a module that
        forward calls several times stand in one row.
    """
    values: Outputs = {}

    # A second value of the same site is put behind the first, in one row.
    def keep_value(site: str, value: object) -> None:
        if not isinstance(value, Tensor):
            return
        # An in-place activation would overwrite the value.
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

    with hooked(handles), with_heads(model) if heads else undisturbed(model), callers_dtype():
        output = example.call_on_copies(model)
    return outputs_of(output), values


def with_other_values(example: Example) -> Example:
    """Return the example with its values mirrored, and floating-point values 0.7 times as large."""

    def change(tensor: Tensor) -> Tensor:
        if not tensor.ndim:
            return tensor
        mirrored = tensor.flip(-1)
        return 0.7 * mirrored if tensor.is_floating_point() else mirrored

    return example.map(change)


def entrance(path: str) -> str:
    """Return the name of a module's input among the values of a run."""
    return f"the input of {path}"


def outputs_of(output: object) -> Outputs:
    """Return the tensors in what a network gives, and its plain numbers as tensors, by name.

    They are copies: a network may give a tensor that its next run writes into.

    Args:
        output: What the network's forward returns.
    """
    outputs: Outputs = {}

    def put(name: str, value: Tensor) -> None:
        # {"a.b": x} and {"a": {"b": y}} have the same name, and both are compared.
        while name in outputs:
            name += "'"
        outputs[name] = value

    for name, tensor in named_tensors(output, depth=_LEVELS):
        put(name, dense(tensor))
    for name, number in calling.named_numbers(output, depth=_LEVELS):
        exact = torch.float64 if isinstance(number, float) else None
        put(name, torch.tensor(number, dtype=exact))
    return outputs


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
    """Return what `run` gives for both networks: outputs and values inside, of each.

    The result is None where the source runs on the first call, but not on this size of input.

    Args:
        source: The source.
        result: The converted network.
        example: The call.
        paths: The modules of both networks whose outputs are returned, too.
        tails: Further modules of the source whose outputs are returned at the first call.
        first: The first of all calls. By default it is the call itself.

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
    with Widening():
        return run(double, example)[0]


def by_parts(
    model: nn.Module,
    example: Example,
    replacements: Replacements | None = None,
    tensors: Mapping[int, Tensor] | None = None,
) -> Outputs | None:
    """Return the outputs in float64 from casting one module at a time, or None if that fails.

    A module has float64 tensors only while its forward runs, so the network never exists twice.
    This fails, for instance, if a forward mixes dtypes, or if a module calls itself.

    Args:
        model: The network, in its own dtype.
        example: The call, in float64.
        replacements: For some modules of the network, the function that builds the module anew in
            float64. The tensors of all other modules are cast.
        tensors: Float64 tensors by the identity of the tensors that they stand for.
    """
    # The own tensors of the modules that run now, and float64 tensors that were built and are not
    # lent yet, by the identity of the tensors that they stand for.
    lent: dict[nn.Module, dict[str, Tensor]] = {}
    ready: dict[int, Tensor] = {}

    # Before a replaced module runs, it is built in float64.
    @_unseen
    def make(module: nn.Module, _args: object) -> None:
        assert replacements is not None
        doubles = dict(_tensors(replacements[module]()))
        ready.update(
            {id(old): doubles[name].detach() for name, old in _tensors(module) if name in doubles}
        )

    # A module gets float64 tensors when its forward begins: those that were built, or casts.
    @_unseen
    def lend(module: nn.Module, _args: object) -> None:
        tensors_of_module = {**module._parameters, **module._buffers}
        floats = {
            name: tensor
            for name, tensor in tensors_of_module.items()
            if tensor is not None and tensor.is_floating_point()
        }

        lent[module] = {name: tensor.data for name, tensor in floats.items()}
        for name, tensor in floats.items():
            double_tensor = ready.pop(id(tensor), (tensors or {}).get(id(tensor)))
            if double_tensor is None:
                double_tensor = tensor.data.double()
            _put(module, name, double_tensor)

    # It gets its own tensors back when its forward ends.
    @_unseen
    def back(module: nn.Module, *_: object) -> None:
        for name, tensor in lent.pop(module).items():
            _put(module, name, tensor)

    owners = [
        module for module in nn.Module.modules(model) if module._parameters or module._buffers
    ]
    handles = [module.register_forward_pre_hook(make) for module in replacements or {}]
    for owner in owners:
        handles += [owner.register_forward_pre_hook(lend), owner.register_forward_hook(back)]

    # After an error inside a forward its module still has float64 tensors, as no hook gave it its
    # own ones back. `finally` does that.
    try:
        with hooked(handles), Widening():
            return run(model, example)[0]
    except (RuntimeError, KeyError):
        return None
    finally:
        for module in list(lent):
            back(module)


def _unseen(work: Callable[..., None]) -> Callable[..., None]:
    """Return a function that does the same while torch's function modes are off.

    A mode that watches every call costs more than the call.
    """

    def alone(*args: object) -> None:
        with torch._C.DisableTorchFunction():
            work(*args)

    return alone


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
    """Return calls with N(0, 1) inputs (batch, C, H, W), at 64 and at 97 pixels.

    Where a small size fails, there is one call, of the next size that the network runs on.

    Args:
        model: The network.
        size: The size (C, H, W) that is tried last.
        batch: The number of samples of the first call. The second has one.
        seed: The seed of the noise.
        ran: The calls that the network is known to run on, as `str(call)`. They are not tried.

    Raises:
        VerificationError: The network runs on none of these calls.
    """
    like = calling.anchor(model)
    generator = torch.Generator().manual_seed(seed)
    called = form(model)
    why = ""

    first, *others = dict.fromkeys([*network_input.small(size), tuple(size)])
    for shape in (first, *others):
        call = called.of(torch.randn(batch, *shape, generator=generator).to(like))
        # The forward is the user's, and may raise anything.
        try:
            # A network whose forward fixes the number of images runs on the whole batch only.
            if str(call) not in ran and not runs(model, call.first(1)):
                run(model, call)
        except Exception as error:
            why = first_line(error)
            continue

        # `both` leaves the image of the second size out if the network does not take it.
        calls = [call]
        if shape == first and others:
            image = torch.randn(1, *others[0], generator=generator).to(like)
            calls.append(called.of(image))
        return calls

    raise VerificationError(f"the network does not run on an input of size {tuple(size)}", why)


def runs_on_one(model: nn.Module, example: Example) -> bool:
    """Whether the network gives for the first sample alone what it gives for it in the batch.

    A forward may fix its number of samples (`reshape(-1, 36)`), or mix them.

    Args:
        model: The network.
        example: The batch.
    """
    alone = example.first(1)
    if alone is example:
        return True

    try:
        outputs, _ = run(model, alone)
    # A user's forward may raise anything.
    except Exception:
        return False

    whole, _ = run(model, example)
    rows: Outputs = {}
    for name, value in whole.items():
        if name in outputs and outputs[name].ndim == value.ndim:
            rows[name] = value[: len(outputs[name])] if value.ndim else value

    return outputs.keys() == rows.keys() and all(
        _is_near(value, rows[name]) for name, value in outputs.items()
    )


def _is_near(value: Tensor, other: Tensor) -> bool:
    """Whether two tensors differ by a fiftieth of their size at most."""
    if value.shape != other.shape:
        return False
    wide = torch.complex128 if value.is_complex() else torch.float64
    difference = (value.to(wide) - other.to(wide)).nan_to_num(0.0)
    return bool(difference.norm() <= _NEAR * value.to(wide).nan_to_num(0.0).norm())


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Give a module another tensor under a name. A parameter keeps its identity.

    Args:
        module: The module that owns the tensor.
        name: The name of a parameter or buffer of the module.
        tensor: The new values.
    """
    parameter = module._parameters.get(name)
    if parameter is not None:
        parameter.data = tensor
    else:
        module._buffers[name] = tensor
