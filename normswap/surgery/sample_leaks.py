"""PROVE, for private and federated training: a step of training keeps the samples of a batch apart.

A copy of the result trains on two small batches that have one sample in common, the shared sample.
The random numbers are the same in both runs. The outputs of the shared sample and the gradient of
its input must be the same, too: whatever differs was taken from the other samples. A step must not
change a buffer either. It would be a statistic that gets no noise, as private training needs, and
that no server of federated training averages.

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

# The index of the shared sample in the batch: the one that has the same values in both runs. It is
# not the first sample, so that a shift along the batch is seen in either direction.
SHARED = 1
# By how much numbers may differ because of rounding, relative to the largest number of a tensor.
_ROUNDING = 1e-9
_ROUNDING_OF_FLOAT32 = 1e-5
# How far parameters are moved, relative to themselves. Zeros get normal noise of this deviation.
_SPREAD = 0.1
# How many reasons, or names of buffers, a refusal lists.
_LISTED = 3


def check(network: Network, result: nn.Module, proof: TrainingProof, purpose: str) -> None:
    """Check by a run in training mode that a result can be trained for a purpose.

    Args:
        network: The source, whose first example gives the batches of the run.
        result: The converted network, which is not changed.
        proof: The properties that the purpose asks for.
        purpose: The name of the purpose ("opacus" or "federated"), for the messages.

    Raises:
        RefusedError: Samples are mixed, a buffer changes, the trainer refuses a layer, or the
            network does not run in training mode, so that nothing is proved.
    """
    # Each check returns its findings: a sentence for each module that is to blame, by path. These
    # two ask whether samples stay apart and whether nothing but parameters changes.
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
    # run only if nothing was found so far. The validator is the trainer's own check of the layers.
    if proof.rows_are_samples and not findings:
        findings = trial.moved_rows()
    if proof.validator is not None and not findings:
        findings = proof.validator(duplicate(result, {}).train())
    if not findings:
        return

    why = by_reason(findings, "forward", _LISTED)
    raise RefusedError(f"cannot convert to {purpose}", why, remedy)


@dataclass(frozen=True)
class _TrainingRun:
    """What was recorded in one step of training on a fresh copy, and in a forward after it.

    Args:
        outputs: The outputs of the step, by name.
        listed: Whether the forward returns a list with an entry for each sample.
        later: The outputs of the forward after the step, by name. The same copy runs on the
            `later` batch of the `_TrainingPair`, with other random numbers.
        gradients: The gradient of every input of the step, arranged as the call has its inputs.
        rows: The first argument of each layer with trainable parameters, by the layer's path: one
            tensor for each call of the layer.
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
    """One call of a torch function in a forward, or of a module that torch.jit compiled.

    Args:
        name: The name of the function, as people write it.
        path: The path of the module whose forward calls it, or of the compiled module.
        live: The tensors that it returned, with their autograd history.
        values: Copies of these tensors from right after the call, as they may be written to later.
    """

    name: str
    path: str
    live: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


@dataclass(frozen=True)
class _TrainingPair:
    """The two batches of a trial run: one for a training step, and one for a forward after it.

    Args:
        call: The batch that is trained on.
        later: The same samples in another order, for the forward after the step.
    """

    call: Example
    later: Example

    def changed(self, rows: Tensor) -> _TrainingPair:
        """Return both batches of the pair with other values in some samples.

        Args:
            rows: Which samples are changed: a bool for each, (N,).
        """
        return _TrainingPair(
            with_other_values(self.call, rows), with_other_values(self.later, rows)
        )


class _LeakTrial:
    """Runs of training on batches that have some samples in common, and what differs between them.

    Args:
        model: A copy of the result. Each run trains a fresh copy of it for one step.
        call: The batch.
        rounding: By how much numbers may differ because of rounding, relative to the largest number
            of a tensor.
    """

    def __init__(self, model: nn.Module, call: Example, rounding: float) -> None:
        # The indices of the samples. `SHARED` is that of the shared sample.
        rows = torch.arange(call.count)
        self.model = model
        self.count = call.count
        self.rounding = rounding
        # The batches themselves. The later one has the samples in another order.
        self.calls = _TrainingPair(call, with_rows(call, rows.roll(1)))
        # The same batches with other values in all samples but the shared one, then in the shared
        # sample alone, then in all samples (`rows >= 0` marks all).
        self.others_changed = self.calls.changed(rows != SHARED)
        self.shared_changed = self.calls.changed(rows == SHARED)
        self.all_changed = self.calls.changed(rows >= 0)

    @classmethod
    def of(cls, network: Network, result: nn.Module, purpose: str) -> _LeakTrial:
        """Return a trial of a copy of the result that runs, and that would show a leak.

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
        """Return a trial on the first batch that a copy of the result runs on.

        Its outputs may be NaN or infinite.

        Args:
            network: The source, whose first example gives the batch.
            result: The converted network.
            unproved: The sentence that an error begins with.
            spread: Whether the copy's parameters are moved a little first, so that a path behind a
                factor of zero is seen as well.

        Raises:
            RefusedError: The copy runs on no batch.
        """
        # The copy is in float64 if the device has it. There rounding is small.
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
                # `like` returns the batch on the model's device and in its dtype.
                trial = cls(model, batch.like(model), rounding)
                # Reading these cached properties runs the network, which may fail here.
                _ = trial.original_run, trial.others_changed_run
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
        """Whether all outputs of the training step on the batch itself are finite."""
        return all(bool(value.isfinite().all()) for value in self.original_run.outputs.values())

    @property
    def depends_on_samples(self) -> bool:
        """Whether some output changes if all samples but the shared one get other values.

        The entries of the changed samples are among the outputs, so some output should change. If
        none does, the trial proves nothing, as a leak between samples would not show either.
        """
        pairs = (
            (self.original_run.outputs, self.others_changed_run.outputs),
            (self.original_run.later, self.others_changed_run.later),
        )
        return any(self._any_moved(first, second) for first, second in pairs)

    @cached_property
    def original_run(self) -> _TrainingRun:
        """The record of a training step on the batch itself, and of the forward after it."""
        return _run_of_training(self.model, self.calls)

    @cached_property
    def others_changed_run(self) -> _TrainingRun:
        """The record of a training step in which all samples but one have other values.

        The sample at the index `SHARED` has its own values. Whatever differs from `original_run` in
        that sample was taken from the other samples.
        """
        return _run_of_training(self.model, self.others_changed)

    def changed_state(self) -> dict[str, str]:
        """Find the buffers and frozen parameters that a step of training changes.

        Returns:
            A sentence for each module that has any, by the module's path.
        """
        before = _state(self.model)
        after = _state(self.original_run.model)
        after_others_changed = _state(self.others_changed_run.model)

        # The names of the changed tensors in each module, by the module's path.
        changed: dict[str, list[str]] = {}
        for name, tensor in after.items():
            # A forward may make a buffer at its first call, as a cache. The buffer is a constant if
            # a batch of other samples gives the same values, so it is compared with these.
            old = before.get(name)
            if old is None or old.shape != tensor.shape:
                old = after_others_changed.get(name)
            if old is None or not _same_values(old, tensor):
                path, _, own_name = name.rpartition(".")
                changed.setdefault(path, []).append(own_name)

        modules = tree(self.model)
        reasons: dict[str, str] = {}
        for path, own_names in changed.items():
            reasons[path] = (
                f"a step of training changes what a {type(modules[path]).__name__} keeps beside its"
                f" parameters ({', '.join(own_names[:_LISTED])})"
            )
        return reasons

    def mixed_samples(self) -> dict[str, str]:
        """Find a module whose forward mixes samples.

        Returns:
            One entry: a sentence that tells the operation and its effect, by the module's path. The
            path is empty if no module is known to be the cause. Without a leak the dict is empty.
        """
        # First the outputs of the step are compared, then those of the forward after it, then the
        # gradients.
        leaks = self._leaking_outputs(
            self.original_run.outputs, self.others_changed_run.outputs, later=False
        )
        no_leak_in_step = not leaks
        if no_leak_in_step:
            leaks = self._leaking_outputs(
                self.original_run.later, self.others_changed_run.later, later=True
            )
        is_in_later_outputs = no_leak_in_step and bool(leaks)

        gradient = 0.0
        if not leaks:
            gradient = self._moved_gradient()
        if not leaks and not gradient:
            return {}

        # What the leak does, in words.
        if leaks:
            name, share = next(iter(leaks.items()))
            output = f"output {name}" if name else "the output"
            consequence = f"{output} of a sample moves by {100 * share:.3g} %"
        else:
            consequence = f"the gradient of a sample moves by {100 * gradient:.3g} %"
        consequence += " when only the other samples change"

        # Where it happens.
        operation = self._first_mixing(later=is_in_later_outputs)
        if operation is not None:
            kind = type(tree(self.model)[operation.path]).__name__
            return {operation.path: f"{operation.name} (in a {kind}) mixes samples: {consequence}"}
        # No operation of the later forward mixes samples, so a module kept numbers of the earlier
        # batch.
        if is_in_later_outputs:
            path = _keeper(self.original_run.model, self.others_changed_run.model)
            return {path: f"{consequence} of an earlier batch"}
        return {"": consequence}

    def moved_rows(self) -> dict[str, str]:
        """Find trainable layers whose input does not have sample i in row i.

        Opacus takes the gradient of row i for the gradient of sample i.

        Returns:
            A sentence that tells what is wrong with the layer's input, by the layer's path. Layers
            whose input cannot be seen are among them.
        """
        findings = {}
        for path, module in tree(self.model).items():
            if _has_trainable(module) and isinstance(module, torch.jit.ScriptModule):
                findings[path] = (
                    "it is compiled by torch.jit, so no hook sees its input, and the gradient of a"
                    " row is not known to be that of a sample"
                )

        for path, first_inputs in self.original_run.rows.items():
            second_inputs = self.others_changed_run.rows.get(path, [])
            for first_input, second_input in zip(first_inputs, second_inputs, strict=False):
                # An input that stays the same when samples change does not hold samples. Inputs of
                # two shapes cannot be compared.
                has_same_shape = first_input.shape == second_input.shape
                if not has_same_shape or not bool(self._moved(first_input, second_input).any()):
                    continue

                if len(first_input) != self.count:
                    findings[path] = (
                        f"it gets {len(first_input)} rows for {self.count} samples, so the gradient"
                        " of a row is not that of a sample"
                    )
                # Only the other samples were changed, so the shared sample's row must not change.
                elif bool(self._moved(first_input, second_input)[SHARED].any()):
                    findings[path] = (
                        "row i of its input is not sample i, so the gradient of a row is not that"
                        " of a sample"
                    )

        return findings

    def _leaking_outputs(
        self,
        outputs: Mapping[str, Tensor],
        others_changed: Mapping[str, Tensor],
        *,
        later: bool,
    ) -> dict[str, float]:
        """Return the outputs of the shared sample that change when only the other samples change.

        The shared sample (`SHARED`) has the same values in both runs. The other samples do not.

        Args:
            outputs: The outputs of the run on the batch itself, by name.
            others_changed: The outputs of the run in which the other samples have other values, by
                name.
            later: Whether these are outputs of the forward after the step. Otherwise they are those
                of the step.

        Returns:
            The relative L2 of the change, by the output's name. It is 1 if the second run lacks the
            output or gives it another shape. Outputs that do not change are left out.
        """
        leaks: dict[str, float] = {}
        for name, value in outputs.items():
            other = others_changed.get(name)
            # In a list with an entry for each sample, the names of outputs begin with the index of
            # the sample, such as "1.boxes". The entries of other samples may change.
            if self.original_run.listed and name.partition(".")[0] != str(SHARED):
                continue
            if other is None or other.shape != value.shape:
                leaks[name] = 1.0
                continue

            # Only numbers that belong to the shared sample must stay the same: all numbers of its
            # entry in a list, or its row of a batch. In an output without rows, the numbers must
            # not depend on several samples.
            dim = _sample_dim(value, self.count)
            if self.original_run.listed:
                moved = self._moved(value, other)
            elif dim is None:
                moved = self._mixed_without_rows(name, value, other, later=later)
            else:
                moved = self._moved(value, other).select(dim, SHARED)
                value = value.select(dim, SHARED)
                other = other.select(dim, SHARED)

            if bool(moved.any()):
                leaks[name] = _relative_change(value, other)
        return leaks

    def _mixed_without_rows(
        self, name: str, value: Tensor, others_changed: Tensor, *, later: bool
    ) -> Tensor:
        """Mark the numbers that mix samples, in an output without a sample dimension.

        A single number for the batch may be a sum over samples, as a loss is, which is no mixing.
        For a sum f of the shared sample a and the other samples b, a change of a changes f by the
        same amount whatever b is: f(a, b) - f(a', b) = f(a, b') - f(a', b').

        Args:
            name: The name of the output.
            value: The output f(a, b) of the batch itself.
            others_changed: The output f(a, b') of the run with other values in the other samples.
            later: Whether it is an output of the forward after the step.

        Returns:
            A bool for each number of the output.
        """
        # f(a', b), where only the shared sample is changed. If that run lacks the output, f(a, b')
        # is taken in its place.
        shared_changed = self._changed_outputs("shared", later=later).get(name, others_changed)
        if shared_changed.shape != value.shape:
            return torch.ones_like(value, dtype=torch.bool)

        # A number that changes with the shared sample, and with the others, depends on both. Only a
        # single number, and no truth value, may be a sum over samples.
        moved = self._moved(value, others_changed) & self._moved(value, shared_changed)
        if value.numel() > 1 or value.dtype == torch.bool or not bool(moved.any()):
            return moved

        # f(a', b'), where all samples are changed. If that run lacks the output, f(a, b) is taken
        # in its place. The two changes by a may differ by rounding.
        all_changed = self._changed_outputs("all", later=later).get(name, value)
        change = value - shared_changed
        change_beside_others = others_changed - all_changed
        size = change.abs() + change_beside_others.abs()
        rest = change - change_beside_others
        return rest.abs() > self.rounding * (size + value.abs())

    @cached_property
    def _outputs_of_changed(self) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
        """The outputs of two runs of training in which some samples have other values.

        In the run "shared" only the sample at the index `SHARED` has other values, in the run "all"
        all samples have. Each key has a pair: the outputs of the training step by name, and the
        outputs of the forward after the step by name.
        """
        runs = {
            "shared": _run_of_training(self.model, self.shared_changed),
            "all": _run_of_training(self.model, self.all_changed),
        }
        return {which: (run.outputs, run.later) for which, run in runs.items()}

    def _changed_outputs(self, which: str, *, later: bool) -> dict[str, Tensor]:
        """Return the outputs of a run with other values in some samples, by name.

        Args:
            which: The samples that have other values: "shared" or "all".
            later: Whether the outputs of the forward after the step are returned. Otherwise they
                are those of the step.
        """
        outputs_of_step, later_outputs = self._outputs_of_changed[which]
        return later_outputs if later else outputs_of_step

    def _moved_gradient(self) -> float:
        """Return how far the gradient of a sample's input changes when only other samples change.

        It is the relative L2 in the first input tensor that changes by more than rounding, or 0.
        The sample is the one that has the same values in both runs (`SHARED`).
        """
        original = values_of_sample(self.original_run.gradients, SHARED)
        others_changed = values_of_sample(self.others_changed_run.gradients, SHARED)
        for gradient, other in zip(original, others_changed, strict=True):
            if bool(self._moved(gradient, other).any()):
                return _relative_change(gradient, other)
        return 0.0

    def _first_mixing(self, *, later: bool) -> _Operation | None:
        """Return the first operation of the forward that mixes samples.

        An operation mixes if a number that it returns depends on the shared sample (`SHARED`) and
        on others. If none does, the first operation that puts another sample into the shared
        sample's row is returned, or None if none does that either. Operations on whose values an
        output depends are preferred, as a value that reaches no output is not the cause.

        Args:
            later: Whether the forward after the step is looked at, in place of that of the step.
        """
        operations, outputs = _watched(self.model, self.calls, later=later)
        operations_others_changed, _ = _watched(self.model, self.others_changed, later=later)
        operations_shared_changed, _ = _watched(self.model, self.shared_changed, later=later)

        # The three runs make the same operations in the same order.
        mixing = []
        reordering = []
        for operation, with_others_changed, with_shared_changed in zip(
            operations, operations_others_changed, operations_shared_changed, strict=False
        ):
            for live, value, others_changed, shared_changed in zip(
                operation.live,
                operation.values,
                with_others_changed.values,
                with_shared_changed.values,
                strict=False,
            ):
                # A shape that depends on the samples mixes them, too.
                if not value.shape == others_changed.shape == shared_changed.shape:
                    mixing.append((operation, live))
                    continue
                # A number that changes with the others, and with the shared sample, mixes them. One
                # that changes with the others alone, in the shared sample's row, came from another
                # row.
                moved = self._moved(value, others_changed)
                if bool((moved & self._moved(value, shared_changed)).any()):
                    mixing.append((operation, live))
                elif value.ndim and len(value) == self.count and bool(moved[SHARED].any()):
                    reordering.append((operation, live))

        candidates = mixing or reordering
        for operation, live in candidates:
            if _passes(outputs, live):
                return operation
        return candidates[0][0] if candidates else None

    def _any_moved(self, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
        """Whether any output of one run differs from another run's by more than rounding.

        An output that is missing in the second run, or has another shape there, differs.

        Args:
            first: The outputs of one run, by name.
            second: The outputs of another run, by name.
        """
        for name, value in first.items():
            other = second.get(name)
            if other is None or other.shape != value.shape or bool(self._moved(value, other).any()):
                return True
        return False

    def _moved(self, first: Tensor, second: Tensor) -> Tensor:
        """Mark the numbers that differ by more than rounding: a bool for each number.

        Args:
            first: The tensor in one run.
            second: The tensor in another run, of the same shape.
        """
        if not (first.is_floating_point() or first.is_complex()):
            return first != second
        # Rounding is measured against the largest finite number of the tensor. A number that is
        # finite in one run only differs, too.
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


def _run_of_training(model: nn.Module, calls: _TrainingPair) -> _TrainingRun:
    """Run a fresh copy forward and backward on a batch, then forward on the later batch.

    No optimizer moves the parameters.

    Args:
        model: The network, which is not changed.
        calls: The batch to train on, and the later one.
    """
    copied = _fresh(model)
    call = calls.call

    # Hooks keep the inputs of the layers that have trainable parameters of their own.
    rows: dict[str, list[Tensor]] = {}

    def keep_rows(path: str, _module: nn.Module, args: tuple[object, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].ndim:
            rows.setdefault(path, []).append(args[0].detach().clone())

    handles = []
    for path, module in tree(copied).items():
        # A compiled module takes no hooks. `moved_rows` refuses those that have parameters.
        if _has_trainable(module) and not isinstance(module, torch.jit.ScriptModule):
            handles.append(module.register_forward_pre_hook(partial(keep_rows, path)))

    # The step. The inputs are leaves, so that they get gradients.
    leaves = call.map_floats(lambda tensor: tensor.detach().clone().requires_grad_())
    with _training(copied, seed=0):
        with hooked(handles):
            # A forward may write into its input. Autograd forbids that for a leaf.
            result = leaves.call_on_copies(copied)
        outputs = _outputs(result)
        gradients = _gradients(_loss(outputs, call.count), leaves)

    # The forward after the step.
    with _training(copied, seed=1), torch.no_grad():
        later = _outputs(calls.later.call_on_copies(copied))

    return _TrainingRun(
        outputs={name: value.detach() for name, value in outputs.items()},
        listed=_is_listed(result, call.count),
        later=later,
        gradients=gradients,
        rows=rows,
        model=copied,
    )


def _has_trainable(module: nn.Module) -> bool:
    """Whether a module has trainable parameters of its own."""
    own_parameters = nn.Module.parameters(module, recurse=False)
    return any(parameter.requires_grad for parameter in own_parameters)


def _gradients(loss: Tensor, leaves: Example) -> Example:
    """Return the gradients of a loss with respect to a call's inputs, arranged as the call.

    An input on which the loss does not depend gets zeros.

    Args:
        loss: The loss, one number.
        leaves: The call whose tensors were the inputs.
    """
    inputs = [tensor for tensor in leaves.tensors() if tensor.requires_grad]
    by_id: dict[int, Tensor | None] = {}
    if loss.requires_grad and inputs:
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
        by_id = {id(leaf): gradient for leaf, gradient in zip(inputs, gradients, strict=True)}

    def gradient_of(leaf: Tensor) -> Tensor:
        gradient = by_id.get(id(leaf))
        return torch.zeros_like(leaf) if gradient is None else gradient

    return leaves.map(gradient_of)


def _watched(
    model: nn.Module, calls: _TrainingPair, *, later: bool
) -> tuple[list[_Operation], dict[str, Tensor]]:
    """Return every operation of a forward in training mode, in order, and the outputs.

    Args:
        model: The network, which is not changed.
        calls: The batch to train on, and the later one.
        later: Whether the network runs on the later batch, with its random numbers.
    """
    copied = _fresh(model)
    watch = _Watch(copied)
    call = calls.later if later else calls.call

    # The seeds are those of `_run_of_training`: 0 for the step, 1 for the forward after it.
    leaves = call.map_floats(lambda tensor: tensor.detach().clone().requires_grad_())
    with _training(copied, seed=int(later)), hooked(watch.hooks()):
        # The copies are made before the watch begins, as they are no operations of the forward.
        copies = leaves.map(torch.clone)
        with watch:
            result = copies.call(copied)
    return watch.operations, _outputs(result)


class _Watch(TorchFunctionMode):
    """Records every call of a torch function in one forward, and the module that makes it.

    Args:
        model: The copy of a network that is watched. `hooks` changes its compiled modules.

    Attributes:
        operations: The calls in order, each as an `_Operation`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.modules = tree(model)
        # The paths of the modules that run now, the innermost last.
        self.around = [""]
        self.operations: list[_Operation] = []

    def hooks(self) -> Iterator[torch.utils.hooks.RemovableHandle]:
        """Register the hooks that keep track of which module runs, and yield their handles.

        A module that torch.jit compiled takes no hooks, and nothing inside is seen. In its place
        the network calls `_run_compiled`, which records the whole forward as one operation.
        """
        # A module that has several paths goes by the first one.
        distinct: dict[nn.Module, str] = {}
        for path, module in self.modules.items():
            distinct.setdefault(module, path)
        for module, path in distinct.items():
            if not isinstance(module, torch.jit.ScriptModule):
                yield module.register_forward_pre_hook(partial(self._enter, path))
                yield module.register_forward_hook(self._leave, always_call=True)
            # A compiled list of modules has no forward.
            elif hasattr(module, "forward"):
                vars(module)["forward"] = partial(self._run_compiled, path, module.forward)

    def _enter(self, path: str, *_: object) -> None:
        """Put the path of a module whose forward begins behind those of the modules around it."""
        self.around.append(path)

    def _leave(self, *_: object) -> None:
        """Remove the path of the innermost running module, whose forward ends."""
        self.around.pop()

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call the torch function, and record the call if it returns tensors."""
        result = func(*args, **(kwargs or {}))
        # The last path in `around` is that of the innermost module, whose forward makes the call.
        self._record(_name(func), self.around[-1], result)
        return result

    def _run_compiled(
        self, path: str, forward: Callable[..., object], *args: object, **kwargs: object
    ) -> object:
        """Run the forward of a module that torch.jit compiled, and record it as one operation.

        Args:
            path: The path of the module.
            forward: Its compiled forward.
            args: The arguments of the call.
            kwargs: The keyword arguments of the call.
        """
        # A function that the compiler was told to ignore is seen, and belongs to this module.
        self._enter(path)
        try:
            result = forward(*args, **kwargs)
        finally:
            self._leave()
        self._record("the forward that torch.jit compiled", path, result)
        return result

    def _record(self, name: str, path: str, result: object) -> None:
        """Add an operation to the record, if it returned tensors.

        Args:
            name: The name of the operation.
            path: The path of the module whose forward it is part of.
            result: What it returned.
        """
        tensors = tuple(tensor for _, tensor in named_tensors(result))
        if tensors:
            # A later operation may write into the tensors, so their numbers are copied now.
            values = tuple(tensor.detach().clone() for tensor in tensors)
            self.operations.append(_Operation(name, path, tensors, values))


def _name(function: Callable[..., object]) -> str:
    """Return the name of a torch function as people write it: F.batch_norm, Tensor.mean."""
    name: str = resolve_name(function) or getattr(function, "__name__", repr(function))
    for long, short in (("torch.nn.functional.", "F."), ("torch.Tensor.", "Tensor.")):
        name = name.replace(long, short)
    return name


def _passes(outputs: Mapping[str, Tensor], value: Tensor) -> bool:
    """Whether some output depends on a value, as autograd records it.

    Args:
        outputs: The outputs by name, with their history.
        value: The tensor that an operation returned, with its history.
    """
    # One number for each output, as autograd differentiates numbers. `abs` makes it real.
    totals = [output.abs().sum() for output in outputs.values() if output.requires_grad]
    if not totals or not value.requires_grad:
        return False
    gradients = torch.autograd.grad(totals, value, retain_graph=True, allow_unused=True)
    return gradients[0] is not None


def _fresh(model: nn.Module) -> nn.Module:
    """Return a copy of a network that shares its trainable parameters, and nothing else.

    A run without an optimizer does not change trainable parameters, so they need no copy. It may
    change any other tensor, such as a buffer.
    """
    parameters = nn.Module.parameters(model)
    shared = {id(parameter): parameter for parameter in parameters if parameter.requires_grad}
    return duplicate(model, shared)


@contextmanager
def _training(model: nn.Module, seed: int) -> Iterator[None]:
    """Context manager: set training mode, turn gradients on, and seed all random numbers.

    It yields nothing. At the end the states of the random number generators are restored, so the
    user's draws are not affected. The network stays in training mode.

    Args:
        model: A copy of the network.
        seed: The seed of torch's, numpy's and Python's random numbers.
    """
    # A tensor of the network, which has its device and dtype.
    tensor = calling.anchor(model)
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    model.train()

    # What is entered or registered here is undone at the end, in reverse. Tensors that the forward
    # makes get the caller's default dtype, or float64 in a network in float64 (`Widening`).
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
    """Return dense copies of the tensors in what a forward returned, by name."""
    return {name: running.dense(tensor) for name, tensor in named_tensors(result)}


def _is_listed(result: object, count: int) -> bool:
    """Whether a forward returned a list with an entry for each sample, as detectors do.

    A list of several outputs for the whole batch may happen to have the same length. It is told by
    its tensors, which have the samples in dimension 0.
    """
    if not isinstance(result, list | tuple) or len(result) != count:
        return False
    return all(_sample_dim(tensor, count) != 0 for _, tensor in named_tensors(result))


def _loss(outputs: Mapping[str, Tensor], count: int) -> Tensor:
    """Return a loss that is a sum over samples, provided that the outputs keep samples apart.

    It is the sum of squares of the outputs. An output without a sample dimension may be a sum over
    samples already, whose square would mix the samples, so it is added without squaring.

    Args:
        outputs: The outputs of the forward, by name.
        count: The number of samples.
    """
    loss = torch.zeros(())
    for value in outputs.values():
        if not value.requires_grad:
            continue
        # A complex number counts as two real ones.
        real = torch.view_as_real(value) if value.is_complex() else value
        if _sample_dim(value, count) is not None:
            real = real.square()
        loss = loss.to(real) + real.sum()
    return loss


def _sample_dim(value: Tensor, count: int) -> int | None:
    """Return the dimension of an output that counts the samples, or None if there is none.

    It is the first dimension if it has the size `count`. Otherwise it is the dimension of this
    size, if there is only one.
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
        # A buffer may be registered as None.
        for name, tensor in {**frozen, **module._buffers}.items():
            if tensor is not None:
                state[dotted(path, name)] = tensor.detach()

    return state


def _keeper(first: nn.Module, second: nn.Module) -> str:
    """Return the path of the first module that keeps numbers of a batch in a plain attribute.

    It is the first module with an attribute, which is no buffer, that has other numbers in the two
    copies. The path is empty if there is none.

    Args:
        first: A copy of the network, after one batch.
        second: A copy of the network, after a batch of other values.
    """
    second_modules = tree(second)
    for path, module in tree(first).items():
        # `_buffers`, `_parameters` and torch's other attributes begin with an underscore.
        attributes = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        other_attributes = vars(second_modules[path])
        for name, tensor in dict(named_tensors(attributes)).items():
            other = other_attributes.get(name)
            if isinstance(other, Tensor) and not _same_values(tensor, other):
                return path
    return ""


def _same_values(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same shape and numbers. NaN counts as 0, so it equals itself."""
    return first.shape == second.shape and torch.equal(first.nan_to_num(), second.nan_to_num())


def _relative_change(value: Tensor, other: Tensor) -> float:
    """Return the relative L2 |other - value| / |value| of two tensors of the same shape."""
    wide = torch.complex128 if value.is_complex() else torch.float64
    apart = (other.to(wide) - value.to(wide)).norm()
    return float(apart / value.to(wide).norm().clamp_min(1e-300))
