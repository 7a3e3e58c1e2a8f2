"""PROVE, for private and federated training: a step of training keeps the samples of a batch apart.

A copy of the result trains on two small batches that have one sample in common, the kept one. The
random numbers are the same in both runs. The outputs of the kept sample and the gradient of its
input must be the same, too: whatever differs was taken from the other samples. A buffer that the
step changes is a statistic that gets no noise and that no server averages.

The copy's parameters are moved a little first, so that a path behind a factor of zero, such as a
SkipInit scalar before training, is seen as well. The arithmetic is float64 where the device has
it. There a network that keeps samples apart differs by rounding at most.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from normswap.copying import dotted, duplicate, tree
from normswap.errors import RefusedError, by_reason, first_line, spelled
from normswap.graph.recorder import Widening
from normswap.layers.seeding import seeded
from normswap.models import calling
from normswap.models.calling import Example, named_tensors
from normswap.models.modes import callers_dtype, hooked
from normswap.proof import running
from normswap.schemes.scheme import TrainingProof
from normswap.surgery.changed_samples import (
    trial_batches,
    values_of_sample,
    with_other_values,
    with_rows,
)
from normswap.surgery.network import Network

# The kept sample is the second, so that a shift along the batch is seen in either direction.
KEPT = 1
# What may differ by rounding, relative to the largest number of a tensor.
_ROUNDING = 1e-9
_ROUNDING_OF_FLOAT32 = 1e-5
# How far parameters are moved, relative to themselves; zeros get normal noise of this deviation.
_SPREAD = 0.1
# The reasons that are listed in a refusal.
_LISTED = 3


def check(network: Network, result: nn.Module, proof: TrainingProof, purpose: str) -> None:
    """Check by a run in training mode that a result can be trained for a purpose.

    Args:
        network: The source, whose first example gives the batches of the run.
        result: The converted network, which is not changed.
        proof: The properties that the purpose asks for.
        purpose: The name of the purpose, for the messages.

    Raises:
        RefusedError: Samples are mixed, a buffer changes, the trainer refuses a layer, or the
            network does not run in training mode, so that nothing is proved.
    """
    # Samples stay apart, and nothing but parameters changes.
    trial = _LeakTrial.of(network, result, purpose)
    findings = {**trial.changed_state(), **trial.mixed_samples()}
    remedy = ""
    if findings:
        groupnorm = spelled("to", metavar="groupnorm")
        remedy = (
            "Put there what looks at one sample at a time and has no buffers (F.group_norm,"
            f" F.layer_norm), or a BatchNorm module, which '{groupnorm}' replaces"
        )

    # A network that mixes samples fails the next two checks as well, for the same cause. So they
    # run only if nothing was found so far.
    if proof.rows_are_samples and not findings:
        findings = trial.moved_rows()
    if proof.validator is not None and not findings:
        findings = proof.validator(duplicate(result, {}).train())
    if not findings:
        return

    why = by_reason(findings, "forward", _LISTED)
    raise RefusedError(f"cannot convert to {purpose}", why, remedy)


@dataclass(frozen=True)
class _Step:
    """What one step of training on a fresh copy gave.

    Args:
        outputs: The outputs by name.
        listed: Whether the forward returns a list with an entry for each sample.
        later: The outputs of a second run of the same copy, on the later batch of a
            `_TrainingPair` and with other random numbers.
        gradients: The gradient of every input, in the form of the call.
        rows: The first input of each layer that learns, by path: one for each call of the layer.
        model: The copy after both runs.
    """

    outputs: dict[str, Tensor]
    listed: bool
    later: dict[str, Tensor]
    gradients: Example
    rows: dict[str, list[Tensor]]
    model: nn.Module


@dataclass(frozen=True)
class _Operation:
    """One call of a torch function in a forward.

    Args:
        name: The name of the function, as people write it.
        path: The path of the module whose forward calls it.
        live: The tensors that it returned, with their history.
        values: The numbers of these tensors, as they were then.
    """

    name: str
    path: str
    live: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


@dataclass(frozen=True)
class _TrainingPair:
    """The batches of a trial: one to train on, and one for the forward that follows.

    Args:
        call: The batch that is trained on.
        later: The same samples in another order.
    """

    call: Example
    later: Example

    def changed(self, rows: Tensor) -> _TrainingPair:
        """Return the batches with other values in some samples.

        Args:
            rows: Which samples are changed: a bool for each, (N,).
        """
        return _TrainingPair(
            with_other_values(self.call, rows), with_other_values(self.later, rows)
        )


class _LeakTrial:
    """Steps of training on batches that have some samples in common.

    Args:
        model: The copy of the result that is trained. Each step trains a fresh copy of it.
        call: The batch.
        rounding: What may differ by rounding, relative to the largest number of a tensor.
    """

    def __init__(self, model: nn.Module, call: Example, rounding: float) -> None:
        rows = torch.arange(call.count)
        self.model = model
        self.count = call.count
        self.rounding = rounding
        # The later batch has the samples in another order. Each of the other pairs of batches has
        # other values in all samples but the kept one, in the kept one, or in all samples.
        self.calls = _TrainingPair(call, with_rows(call, rows.roll(1)))
        self.others_changed = self.calls.changed(rows != KEPT)
        self.kept_changed = self.calls.changed(rows == KEPT)
        self.all_changed = self.calls.changed(rows >= 0)

    @classmethod
    def of(cls, network: Network, result: nn.Module, purpose: str) -> _LeakTrial:
        """Return a trial of a copy of the result on the first batch that it runs on.

        Args:
            network: The source, whose first example gives the batch.
            result: The converted network.
            purpose: The name of the purpose, for errors.

        Raises:
            RefusedError: The copy runs on no batch, or its outputs are not finite or depend on no
                sample.
        """
        unproved = f"nothing proves that training for {purpose} keeps samples apart"
        # If the moved parameters give NaN or infinite numbers, the result's own are used.
        trial = cls._that_runs(network, result, unproved, spread=True)
        if not trial.is_finite:
            trial = cls._that_runs(network, result, unproved, spread=False)
        if not trial.is_finite:
            raise RefusedError(unproved, "its outputs in training mode are not finite")
        if not trial.depends_on_samples:
            raise RefusedError(unproved, "no output in training mode depends on the samples")
        return trial

    @classmethod
    def _that_runs(
        cls, network: Network, result: nn.Module, unproved: str, *, spread: bool
    ) -> _LeakTrial:
        """Return a trial on the first batch that the copy runs on, finite or not.

        Args:
            network: The source, whose first example gives the batch.
            result: The converted network.
            unproved: The sentence that an error begins with.
            spread: Whether the copy's parameters are moved a little first.

        Raises:
            RefusedError: The copy runs on no batch.
        """
        record = network.after(result)
        model = record.doubled().module if record.has_double else duplicate(result, {})
        if spread:
            _spread_parameters(model)
        double = calling.anchor(model).dtype == torch.float64
        rounding = _ROUNDING if double else _ROUNDING_OF_FLOAT32

        why = ""
        for batch in trial_batches(network.examples[0]):
            # The forward is the user's and may raise anything.
            try:
                trial = cls(model, batch.like(model), rounding)
                # To read these properties runs the steps.
                _ = trial.first, trial.second
            except Exception as error:
                why = f"in training mode it does not run on {batch}: {first_line(error)}"
                continue
            return trial
        remedy = (
            f"Give `{spelled('inputs', metavar='BATCH')}`: a batch of two samples or more with all"
            " that its forward takes in training mode"
        )
        raise RefusedError(unproved, why, remedy)

    @property
    def is_finite(self) -> bool:
        """Whether all numbers of the outputs are finite."""
        return all(bool(value.isfinite().all()) for value in self.first.outputs.values())

    @property
    def depends_on_samples(self) -> bool:
        """Whether some output moves when all samples but the kept one are changed.

        It has to, as the outputs hold the answers for the changed samples. If none moves, the trial
        would see no leak.
        """
        pairs = (
            (self.first.outputs, self.second.outputs),
            (self.first.later, self.second.later),
        )
        return any(self._any_moved(first, second) for first, second in pairs)

    @cached_property
    def first(self) -> _Step:
        """The step on the batch itself."""
        return _step(self.model, self.calls)

    @cached_property
    def second(self) -> _Step:
        """The step on the batch whose other samples are changed."""
        return _step(self.model, self.others_changed)

    def changed_state(self) -> dict[str, str]:
        """Find buffers and frozen parameters that a step changes.

        Returns:
            A sentence that tells what changed in a module, by the module's path.
        """
        before = _state(self.model)
        after = _state(self.first.model)
        after_others_changed = _state(self.second.model)

        names: dict[str, list[str]] = {}
        for name, tensor in after.items():
            # A forward may make a buffer at its first call, as a cache. That is a constant if the
            # batch with other samples gives the same values, so it is compared with those.
            old = before.get(name)
            if old is None or old.shape != tensor.shape:
                old = after_others_changed.get(name)
            if old is None or not _same_values(old, tensor):
                path, _, own = name.rpartition(".")
                names.setdefault(path, []).append(own)

        modules = tree(self.model)
        reasons: dict[str, str] = {}
        for path, own_names in names.items():
            reasons[path] = (
                f"a step of training changes what a {type(modules[path]).__name__} keeps beside its"
                f" parameters ({', '.join(own_names[:_LISTED])})"
            )
        return reasons

    def mixed_samples(self) -> dict[str, str]:
        """Find a module whose forward mixes samples.

        Returns:
            A sentence that tells the operation and its effect, by the module's path. The path is
            empty if no module is known to be the cause. Without a leak the dict is empty.
        """
        # First the outputs of the step are compared, then those of the batch after it, then the
        # gradients.
        outputs = self._leaking_outputs(self.first.outputs, self.second.outputs)
        later = not outputs
        if later:
            outputs = self._leaking_outputs(self.first.later, self.second.later)

        gradient = 0.0
        if not outputs:
            gradient = self._moved_gradient()
        if not outputs and not gradient:
            return {}

        # What the leak does, in words.
        if outputs:
            name, share = next(iter(outputs.items()))
            output = f"output {name}" if name else "the output"
            consequence = f"{output} of a sample moves by {100 * share:.3g} %"
        else:
            consequence = f"the gradient of a sample moves by {100 * gradient:.3g} %"
        consequence += " when only the other samples change"

        # Where it happens.
        operation = self._first_mixing(later=later and bool(outputs))
        if operation is not None:
            kind = type(tree(self.model)[operation.path]).__name__
            return {operation.path: f"{operation.name} (in a {kind}) mixes samples: {consequence}"}
        # No operation of the forward mixes, so the other samples came with an earlier batch.
        if later and outputs:
            path = _keeper(self.first.model, self.second.model)
            return {path: f"{consequence} of an earlier batch"}
        return {"": consequence}

    def moved_rows(self) -> dict[str, str]:
        """Find trainable layers that get an input whose row i is not sample i.

        Opacus takes the gradient of row i for that of sample i.

        Returns:
            A sentence that tells what is wrong with a layer's input, by the layer's path.
        """
        findings = {}
        for path, inputs in self.first.rows.items():
            for read, other_read in zip(inputs, self.second.rows.get(path, []), strict=False):
                # An input that stays the same when samples change has no rows of samples. Inputs of
                # two shapes cannot be compared.
                has_same_shape = read.shape == other_read.shape
                if not has_same_shape or not bool(self._moved(read, other_read).any()):
                    continue

                if len(read) != self.count:
                    findings[path] = (
                        f"it gets {len(read)} rows for {self.count} samples, so the gradient of"
                        " a row is not that of a sample"
                    )
                # Only the other samples were changed, so the row of the kept one must not move.
                elif bool(self._moved(read, other_read)[KEPT].any()):
                    findings[path] = (
                        "row i of its input is not sample i, so the gradient of a row is not that"
                        " of a sample"
                    )

        return findings

    def _leaking_outputs(
        self, first: Mapping[str, Tensor], second: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """Return the outputs that differ for the kept sample, which is the same in both runs.

        Each has the relative L2 of the difference. It is 1 if a run lacks the output, or the shapes
        differ.

        Args:
            first: The outputs of the run on the batch itself, by name.
            second: The outputs of the run whose other samples are changed, by name.
        """
        leaks: dict[str, float] = {}
        for name, value in first.items():
            other = second.get(name)
            # In a list with an entry for each sample, the names of outputs begin with the index of
            # the sample. The entries of other samples may differ.
            if self.first.listed and name.partition(".")[0] != str(KEPT):
                continue
            if other is None or other.shape != value.shape:
                leaks[name] = 1.0
                continue

            # Only the kept sample's part of an output has to stay. An entry of a list is its part.
            dim = _sample_dim(value, self.count)
            if self.first.listed:
                moved = self._moved(value, other)
            elif dim is None:
                moved = self._mixed_without_rows(
                    name, value, other, later=first is self.first.later
                )
            else:
                moved = self._moved(value, other).select(dim, KEPT)
                value = value.select(dim, KEPT)
                other = other.select(dim, KEPT)

            if bool(moved.any()):
                leaks[name] = _relative_change(value, other)
        return leaks

    def _mixed_without_rows(
        self, name: str, value: Tensor, others_changed: Tensor, *, later: bool
    ) -> Tensor:
        """Mark the numbers that depend on several samples, in an output without a sample dimension.

        One number for the batch may be a sum over samples, as a loss is. A sum f of a sample a and
        of others b satisfies f(a, b) - f(a', b) = f(a, b') - f(a', b').

        Args:
            name: The name of the output.
            value: The output f(a, b) of the batch itself.
            others_changed: The output f(a, b') with the other samples changed.
            later: Whether it is the output of the batch after the step.
        """
        # f(a', b), where the sample itself is changed and the others are not. Of each pair in
        # `_others`, False takes the output of the step, and True that of the batch after it. If a
        # run lacks the output, f(a, b') or below f(a, b) is taken in its place.
        kept_changed = self._others["kept"][later].get(name, others_changed)
        if kept_changed.shape != value.shape:
            return torch.ones_like(value, dtype=torch.bool)

        # A number that moves with the sample and with the others depends on both. Several numbers,
        # or a truth value, are no sum over samples.
        moved = self._moved(value, others_changed) & self._moved(value, kept_changed)
        if value.numel() > 1 or value.dtype == torch.bool or not bool(moved.any()):
            return moved

        # f(a', b'), where everything is changed. If f is a sum, changing a changes it by the same
        # amount beside b and beside b', except for rounding.
        all_changed = self._others["all"][later].get(name, value)
        change = value - kept_changed
        change_beside_others = others_changed - all_changed
        size = change.abs() + change_beside_others.abs()
        rest = change - change_beside_others
        return rest.abs() > self.rounding * (size + value.abs())

    @cached_property
    def _others(self) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
        """The outputs with the kept sample changed ("kept"), and with all samples changed ("all").

        Each is a pair: the outputs of the step, and those of the batch after it.
        """
        steps = {
            "kept": _step(self.model, self.kept_changed),
            "all": _step(self.model, self.all_changed),
        }
        return {name: (step.outputs, step.later) for name, step in steps.items()}

    def _moved_gradient(self) -> float:
        """Return the relative L2 by which the gradient of the kept sample's input moves, or 0."""
        kept = values_of_sample(self.first.gradients, KEPT)
        others = values_of_sample(self.second.gradients, KEPT)
        for gradient, other in zip(kept, others, strict=True):
            if bool(self._moved(gradient, other).any()):
                return _relative_change(gradient, other)
        return 0.0

    def _first_mixing(self, *, later: bool) -> _Operation | None:
        """Return the first operation with a result that depends on the kept sample and on others.

        If there is none, it is the first that puts another sample into the kept sample's row, and
        None if there is none of these either. Operations whose values reach an output, as its
        gradient tells, come before others: values that reach no output are not the cause.

        Args:
            later: Whether the batch after the step is looked at.
        """
        operations, outputs = _watched(self.model, self.calls, later=later)
        others, _ = _watched(self.model, self.others_changed, later=later)
        kept, _ = _watched(self.model, self.kept_changed, later=later)

        # The three runs make the same operations in the same order.
        mixing = []
        reordering = []
        for operation, with_others, with_kept in zip(operations, others, kept, strict=False):
            for live, value, others_changed, kept_changed in zip(
                operation.live,
                operation.values,
                with_others.values,
                with_kept.values,
                strict=False,
            ):
                if not value.shape == others_changed.shape == kept_changed.shape:
                    mixing.append((operation, live))
                    continue
                moved = self._moved(value, others_changed)
                if bool((moved & self._moved(value, kept_changed)).any()):
                    mixing.append((operation, live))
                elif value.ndim and len(value) == self.count and bool(moved[KEPT].any()):
                    reordering.append((operation, live))

        candidates = mixing or reordering
        for operation, live in candidates:
            if _passes(outputs, live):
                return operation
        return candidates[0][0] if candidates else None

    def _any_moved(self, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
        """Whether any output of two runs differs by more than rounding.

        Args:
            first: The outputs of one run.
            second: The outputs of another run.
        """
        for name, value in first.items():
            other = second.get(name)
            if other is None or other.shape != value.shape or bool(self._moved(value, other).any()):
                return True
        return False

    def _moved(self, first: Tensor, second: Tensor) -> Tensor:
        """Mark the numbers that differ by more than rounding.

        Args:
            first: The tensor in one run.
            second: The tensor in another run.
        """
        if not (first.is_floating_point() or first.is_complex()):
            return first != second
        size = first.abs().nan_to_num(0, 0, 0).amax() if first.numel() else first.new_zeros(())
        apart = (first - second).abs() > self.rounding * size
        return apart | (first.isfinite() != second.isfinite())


@torch.no_grad()
def _spread_parameters(model: nn.Module) -> None:
    """Move a copy's parameters a little, in place, so that no factor of a path is zero.

    SkipInit, for instance, begins training with a factor of zero, behind which no leak would show.
    """
    generator = torch.Generator().manual_seed(0)
    for parameter in nn.Module.parameters(model):
        if not parameter.is_floating_point():
            continue
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        noise = _SPREAD * noise.to(parameter)
        parameter.copy_(torch.where(parameter == 0, noise, parameter * (1 + noise)))


def _step(model: nn.Module, calls: _TrainingPair) -> _Step:
    """Train a fresh copy for a step, forward and backward, then run the later batch.

    Args:
        model: The network, which is not changed.
        calls: The batch to train on, and the later one.
    """
    copied = _fresh(model)
    call = calls.call
    rows: dict[str, list[Tensor]] = {}

    def keep_rows(path: str, _module: nn.Module, args: tuple[object, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].ndim:
            rows.setdefault(path, []).append(args[0].detach().clone())

    handles = []
    for path, module in tree(copied).items():
        if any(
            parameter.requires_grad for parameter in nn.Module.parameters(module, recurse=False)
        ):
            handles.append(module.register_forward_pre_hook(partial(keep_rows, path)))

    leaves = call.map_floats(lambda tensor: tensor.detach().clone().requires_grad_())
    with _training(copied, seed=0):
        with hooked(handles):
            # A forward may write into its input, which it must not do to a leaf.
            result = leaves.call_on_copies(copied)
        outputs = _outputs(result)
        gradients = _gradients(_loss(outputs, call.count), leaves)

    with _training(copied, seed=1), torch.no_grad():
        later = _outputs(calls.later.call_on_copies(copied))

    return _Step(
        outputs={name: value.detach() for name, value in outputs.items()},
        listed=_is_listed(result, call.count),
        later=later,
        gradients=gradients,
        rows=rows,
        model=copied,
    )


def _gradients(loss: Tensor, leaves: Example) -> Example:
    """Return the loss's gradients, arranged as `leaves`; zeros where the loss ignores a leaf."""
    inputs = [tensor for tensor in leaves.tensors() if tensor.requires_grad]
    found: dict[int, Tensor | None] = {}
    if loss.requires_grad and inputs:
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
        found = {id(leaf): gradient for leaf, gradient in zip(inputs, gradients, strict=True)}

    def gradient_of(leaf: Tensor) -> Tensor:
        gradient = found.get(id(leaf))
        return torch.zeros_like(leaf) if gradient is None else gradient

    return leaves.map(gradient_of)


def _watched(
    model: nn.Module, calls: _TrainingPair, *, later: bool
) -> tuple[list[_Operation], dict[str, Tensor]]:
    """Return every operation of a forward in training mode, in order, and the outputs.

    Args:
        model: The network, which is not changed.
        calls: The batch to train on, and the later one.
        later: Whether the later batch is run.
    """
    copied = _fresh(model)
    watch = _Watch(copied)
    call = calls.later if later else calls.call

    leaves = call.map_floats(lambda tensor: tensor.detach().clone().requires_grad_())
    with _training(copied, seed=int(later)), hooked(watch.hooks()):
        entered = leaves.map(torch.clone)
        with watch:
            result = entered.call(copied)
    return watch.operations, _outputs(result)


class _Watch(TorchFunctionMode):
    """Keeps every operation of one forward, with the module whose forward makes it.

    Args:
        model: The network that is watched.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.modules = tree(model)
        # The paths of the modules that run now, the innermost last.
        self.around = [""]
        self.operations: list[_Operation] = []

    def hooks(self) -> Iterator[torch.utils.hooks.RemovableHandle]:
        """Register the hooks that follow which module runs, and yield their handles."""
        # A module with several paths is followed by its first one.
        distinct: dict[nn.Module, str] = {}
        for path, module in self.modules.items():
            if path and not isinstance(module, torch.jit.ScriptModule):
                distinct.setdefault(module, path)
        for module, path in distinct.items():
            yield module.register_forward_pre_hook(partial(self._enter, path))
            yield module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, path: str, *_: object) -> None:
        self.around.append(path)

    def _leave(self, *_: object) -> None:
        self.around.pop()

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        tensors = tuple(tensor for _, tensor in named_tensors(result))
        if tensors:
            values = tuple(tensor.detach().clone() for tensor in tensors)
            self.operations.append(_Operation(_name(func), self.around[-1], tensors, values))

        return result


def _name(function: Callable[..., object]) -> str:
    """Return the name of a torch function as people write it: F.batch_norm, Tensor.mean."""
    name: str = resolve_name(function) or getattr(function, "__name__", repr(function))
    for long, short in (("torch.nn.functional.", "F."), ("torch.Tensor.", "Tensor.")):
        name = name.replace(long, short)
    return name


def _passes(outputs: Mapping[str, Tensor], value: Tensor) -> bool:
    """Whether some output depends on a value, as its gradient tells.

    Args:
        outputs: The outputs by name, with their history.
        value: The tensor that an operation returned, with its history.
    """
    totals = [output.abs().sum() for output in outputs.values() if output.requires_grad]
    if not totals or not value.requires_grad:
        return False
    gradients = torch.autograd.grad(totals, value, retain_graph=True, allow_unused=True)
    return gradients[0] is not None


def _fresh(model: nn.Module) -> nn.Module:
    """Return a copy that shares the trainable parameters, and has copies of all other tensors."""
    parameters = nn.Module.parameters(model)
    shared = {id(parameter): parameter for parameter in parameters if parameter.requires_grad}
    return duplicate(model, shared)


@contextmanager
def _training(model: nn.Module, seed: int) -> Iterator[None]:
    """Run the body of a `with` in training mode, with gradients on and random numbers of a seed.

    It yields nothing. Afterwards the states of the random number generators are restored, so the
    user's draws are not affected. The network stays in training mode.

    Args:
        model: A copy of the network.
        seed: The seed of torch's, numpy's and Python's random numbers.
    """
    tensor = calling.anchor(model)
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    model.train()

    with ExitStack() as stack:
        stack.callback(random.setstate, python_state)
        stack.callback(np.random.set_state, numpy_state)
        stack.enter_context(seeded(tensor.device, seed=seed))
        stack.enter_context(callers_dtype())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(Widening() if tensor.dtype == torch.float64 else nullcontext())
        random.seed(seed)
        np.random.seed(seed)
        yield


def _outputs(result: object) -> dict[str, Tensor]:
    """Return dense copies of the tensors that a forward returns, by name."""
    return {name: running.dense(tensor) for name, tensor in named_tensors(result)}


def _is_listed(result: object, count: int) -> bool:
    """Whether a forward returns a list with an entry for each sample, as detectors do."""
    if not isinstance(result, list | tuple) or len(result) != count:
        return False
    return all(_sample_dim(tensor, count) != 0 for _, tensor in named_tensors(result))


def _loss(outputs: Mapping[str, Tensor], count: int) -> Tensor:
    """Return a loss that is a sum over samples if the outputs keep samples apart.

    It is the sum of squares of the outputs. An output without a sample dimension may be a sum over
    samples already, whose square would mix the samples, so it is added without squaring.
    """
    loss = torch.zeros(())
    for value in outputs.values():
        if not value.requires_grad:
            continue
        real = torch.view_as_real(value) if value.is_complex() else value
        if _sample_dim(value, count) is not None:
            real = real.square()
        loss = loss.to(real) + real.sum()
    return loss


def _sample_dim(value: Tensor, count: int) -> int | None:
    """Return the dimension of the samples, or None if none is known to be theirs.

    It is the first if that has the size `count`, or else the only dimension of that size.
    """
    dims = [dim for dim, size in enumerate(value.shape) if size == count]
    if dims[:1] == [0] or len(dims) == 1:
        return dims[0]
    return None


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a network that no optimizer moves: buffers and frozen parameters."""
    state = {}
    for path, module in tree(model).items():
        frozen = {
            name: parameter
            for name, parameter in module._parameters.items()
            if parameter is not None and not parameter.requires_grad
        }
        for name, tensor in {**frozen, **module._buffers}.items():
            if tensor is not None:
                state[dotted(path, name)] = tensor.detach()

    return state


def _keeper(first: nn.Module, second: nn.Module) -> str:
    """Return the path of the first module that keeps numbers of a batch in a plain attribute.

    The two batches left other numbers in this attribute. The path is empty if there is no such
    module.

    Args:
        first: A copy of the network, after a first batch.
        second: A copy of the network, after another batch.
    """
    others = tree(second)
    for path, module in tree(first).items():
        # Plain attributes hold what is no buffer. Names with an underscore are torch's own.
        attributes = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        other_attributes = vars(others[path])
        for name, tensor in dict(named_tensors(attributes)).items():
            other = other_attributes.get(name)
            if isinstance(other, Tensor) and not _same_values(tensor, other):
                return path
    return ""


def _same_values(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same shape and numbers, where NaN equals NaN and 0."""
    return first.shape == second.shape and torch.equal(first.nan_to_num(), second.nan_to_num())


def _relative_change(value: Tensor, other: Tensor) -> float:
    """Return |other - value| / |value|, or 1 if the shapes differ."""
    if value.shape != other.shape:
        return 1.0
    wide = torch.complex128 if value.is_complex() else torch.float64
    apart = (other.to(wide) - value.to(wide)).norm()
    return float(apart / value.to(wide).norm().clamp_min(1e-300))
