"""PROVE: run source and result on the same inputs, and measure by how much they differ, and where.

Each output is measured by itself, and the worst counts. So is each residual block, as a network may
hide at its outputs what is wrong inside. `allowance` decides how large an error may be. Where a
layer's class is neither torch's nor timm's, the same must hold at ten times the input's scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from normswap.copying import to_double
from normswap.errors import NormswapError, VerificationError
from normswap.graph.anatomy import Anatomy, Block
from normswap.graph.recorder import Widening
from normswap.graph.tracing import Traced, inputs as inputs_of
from normswap.models.calling import Example
from normswap.models.modes import full_precision, hooked
from normswap.proof import allowance, running
from normswap.proof.distance import Error, Outputs, between, distance
from normswap.proof.doubles import Precise
from normswap.proof.running import Source, both, entrance, run, with_other_values
from normswap.proof.verdict import JudgedError, Judgement, Reason, Report, judge

_AMPLIFIES = Reason(
    "in float64, too, changing the last digit of its input changes the source's output by more"
    " than 1e-10",
    "Its weights amplify rounding too much",
)
_ROUNDING = Reason(
    "changing the last digit of its input or weights changes the source's output as much as the"
    " result does",
    "Its weights amplify rounding: compare both in float64, by model.double()",
)
_NOT_FINITE = Reason(
    "the network itself gives NaN or infinite numbers",
    "Its weights are too large, or it needs other inputs: `inputs=`",
)
_EMPTY = Reason("the outputs are empty: no number was compared")
_SAME_LABELS = "every input gives the same labels, so this check says little"
_CONSTANT = Reason("every input gives the same numbers: nothing was compared")
# If two runs of the source on the same input differ by more than this share of a result's error,
# the source is not repeatable.
_OF_ERROR = 0.1
_KNOWN_CLASSES = ("torch.", "timm.", "torchvision.", "normswap.")
# The input is also multiplied by this. A layer that clamps its values at the end of a format's
# range changes nothing at the scale of noise or images, but does at this multiple.
_LARGER = 10
# An input or a branch that changes the output by a smaller share is worth a remark.
_HARDLY = 1e-4
# In float32 and float64, an output that moves with the input by less than so many times the base
# would not show a mistake.
_VISIBLE = 10
# Channels that are smaller than this share of the largest one are also compared by themselves.
_SMALL = 1e-3


@dataclass(frozen=True)
class Claims:
    """At which residual blocks an exact result claims to have the source's values.

    Args:
        keeps_blocks: Whether it claims this of the blocks at all. It is False if the conversion
            rescales the residual stream, or takes the mean out of it.
        changed_between: Pairs of paths: a layer, and a layer behind it. One of the two absorbed the
            other, so the values between them differ from the source's.
    """

    keeps_blocks: bool = True
    changed_between: tuple[tuple[str, str], ...] = ()

    def keep(self, path: str) -> bool:
        """Whether the result claims to have the source's value at the output of a block.

        It does not if the first layer of a pair in `changed_between` is inside the block and the
        second is not: the block's output then lies between the two, where the values differ.

        Args:
            path: The path of the block. The empty path is the network itself.
        """

        def holds(inner_path: str) -> bool:
            # The network itself, with the empty path, holds every layer.
            return not path or inner_path.startswith(f"{path}.")

        ends_between = any(
            holds(first) and not holds(second) for first, second in self.changed_between
        )
        return self.keeps_blocks and not ends_between


EVERY_BLOCK = Claims()


@full_precision()
def compare_networks(
    source: Source,
    result: nn.Module,
    *,
    exact: bool = True,
    precise: Precise | None = None,
    traced: bool = True,
    claims: Claims = EVERY_BLOCK,
) -> Report:
    """Run both networks in eval mode, on the inputs of the source, and compare their values.

    Args:
        source: The source, with its inputs.
        result: The network that is compared with it.
        exact: Whether the result claims to compute the source's function.
        precise: The comparison in float64, on the beginning of the first batch (`compare_double`).
        traced: Whether errors are also measured at every residual block of the source. Then a
            remark tells of each residual branch that hardly contributes to its block.
        claims: At which residual blocks an exact result claims to have the source's values. By
            default it claims this of every block.

    Raises:
        VerificationError: One of them does not run, or the source differs from run to run.
    """
    # `examples` leaves out superfluous calls, for which it needs the source's recorded graph.
    calls = source.examples if traced else source.calls
    comparison = _Comparison(
        source=source,
        result=result,
        exact=exact,
        precise=precise,
        anatomy=source.anatomy if traced else None,
        claims=claims,
    )
    for example in calls:
        comparison.add(example, calls[0])

    report = comparison.report()
    _require_repeatable(source.module, calls[0], report)
    return report


@dataclass
class _Comparison:
    """Two networks, and what was measured of them so far.

    Args:
        source: The source, and what it is called with.
        result: The network that is compared with it.
        exact: Whether the result claims to compute what the source computes.
        precise: The comparison in float64, if there is one.
        anatomy: The source's recorded graph, if blocks are compared.
        claims: At which residual blocks the result claims to have the source's values.
        outputs: The errors at the outputs, one for each precision and input size.
        sites: The errors that are reported of values inside: at residual blocks and last layers.
        inside: The errors that are judged beside `outputs`, each with its limit: at blocks, last
            layers, labels, small channels, and single outputs in half precision.
        remarks: What the user should know of the measurement.
        blind: The reason that is reported if no value that was compared would have shown a mistake.
        shows_errors: Whether a mistake would be seen at the outputs.
        is_finite: Whether the source's outputs are finite.
        has_same_types: Whether the result's outputs have the dtypes of the source's outputs.
        own_change: How far rounding alone moves the source's outputs, as a relative L2.
        excused: The errors in float32 that rounding may explain, if float64 was not tried.
        unread: The names of values that the source returns and that no comparison reads.
    """

    source: Source
    result: nn.Module
    exact: bool
    precise: Precise | None
    anatomy: Anatomy | None
    claims: Claims
    outputs: list[Error] = field(default_factory=list)
    sites: list[Error] = field(default_factory=list)
    inside: list[JudgedError] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    blind: Reason = _CONSTANT
    shows_errors: bool = True
    is_finite: bool = True
    has_same_types: bool = True
    own_change: float = 0.0
    excused: list[Error] = field(default_factory=list)
    unread: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The source's own precision, such as "float32", and the error in float64 if there is one.
        self.precision = str(self.source.coarsest_dtype).removeprefix("torch.")
        self.double_error = None if self.precise is None else self.precise.error

        # Only a block that is a module of its own can be measured at its output.
        self.blocks: tuple[Block, ...] = ()
        if self.anatomy is not None:
            modules = self.anatomy.traced.modules
            self.blocks = tuple(
                block for block in self.anatomy.blocks if block.path and block.path in modules
            )

        # An approximate detector may find another number of boxes than the source. Its distance is
        # then infinite, which does not make the result wrong, so that error is left out.
        error = self.double_error
        if error is not None and (self.exact or not math.isinf(error.relative_l2)):
            self.outputs.append(error)

    def add(self, example: Example, first: Example) -> None:
        """Run both networks on a call, and measure how far their values are apart.

        Args:
            example: The call.
            first: The first of all calls, at which blocks are compared, too.
        """
        # The values inside are taken at the outputs of the blocks and, of the source alone, at the
        # last modules of their residual branches (`tail`).
        network = self.source.module
        paths = [block.path for block in self.blocks]
        tails = [block.tail for block in self.blocks if block.tail]
        with hooked([network.register_forward_hook(self._note_unread)]):
            pair = both(network, self.result, example, paths, tails, first)
        if pair is None:
            # The source does not take images of this size.
            return

        # The outputs, and the values inside, of the source and of the result.
        (outputs, values), (others, other_values) = pair
        self._add_outputs(example, outputs, others)

        # The values inside are compared at the first call only.
        if example is first:
            self._add_heads(example)
            self._allow_for_distance_to_double(example, outputs)
            for path in paths:
                if path in values and path in other_values:
                    self.sites.append(self._error_at(path, example, values, other_values))
            self.remarks += _remarks(outputs, values, self.blocks)
            self._judge_inside(example, outputs, others)

    def _note_unread(self, _module: nn.Module, _args: object, output: object) -> None:
        """Note what of the source's output no comparison reads, after its forward."""
        self.unread.update(dict.fromkeys(running.unread(output)))

    def _add_outputs(self, example: Example, outputs: Outputs, others: Outputs) -> None:
        """Measure the error at the outputs of one call, and how much of it rounding explains.

        Args:
            example: The call.
            outputs: The source's outputs by name.
            others: The result's outputs by name.
        """
        self.is_finite &= _is_finite(outputs)
        self.has_same_types &= _have_the_same_types(outputs, others)
        error = between(
            example,
            outputs,
            others,
            precision=self.precision,
            exact=self.exact,
            anatomy=self.anatomy,
        )
        self.outputs.append(error)

        # The error that is allowed grows with what rounding alone changes in the source.
        self.own_change = max(self.own_change, self._change_by_rounding(example, outputs, error))
        self._judge_each_output(example, outputs, others)
        # A large error is looked into: in float64 if the source runs in it, or else by how far a
        # changed last digit moves the source's own outputs.
        self._compare_in_double_if_large(example, error)
        self._excuse_if_rounding_explains(example, outputs, error)

    def _judge_each_output(self, example: Example, outputs: Outputs, others: Outputs) -> None:
        """Judge each of several outputs in half precision by a tolerance of its own.

        The tolerance is what half precision alone costs that output of the source. An error above
        the format's rounding is added to `inside` with its tolerance, and judged with the others
        there.

        Args:
            example: The call.
            outputs: The source's outputs by name.
            others: The result's outputs by name.
        """
        # The error of a single output is in `self.outputs` already, so it is not judged here.
        have_same_names = outputs.keys() == others.keys()
        are_several = len(outputs) > 1 and have_same_names
        if not (are_several and self.exact and allowance.is_half(self.precision)):
            return

        for name, value in outputs.items():
            error = self._error_at(name, example, outputs, others)
            if value.is_floating_point() and error.relative_l2 > allowance.base_of(self.precision):
                own_change = self._change_by_rounding(example, {name: value}, error)
                allowed = allowance.of_outputs(self.precision, own_change).most
                # Too large an error here makes the result wrong. But a small one is no proof, as
                # the output may not change with the input: so `shows_errors` is False.
                self.inside.append(JudgedError(error, allowed, shows_errors=False))

    def _compare_in_double_if_large(self, example: Example, error: Error) -> None:
        """Compare a call in float64, too, if its error in the source's precision is large.

        The error in float64 is added to `outputs`. (`compare_double` has already compared the first
        samples of the first call in float64.)

        Args:
            example: The call.
            error: The error of the result's outputs in the source's own precision.
        """
        # An error up to this limit is left to the judgement in the source's own precision.
        limit = allowance.COARSE if allowance.is_half(self.precision) else allowance.FLOAT32_CAP
        if error.relative_l2 <= limit:
            return
        # The result is approximate, or float64 was not tried or did not work at the first call.
        if not self.exact or self.precise is None or self.double_error is None:
            return

        again = self.precise.again(example)
        if again is not None and again.error is not None:
            self.outputs.append(again.error)
            # One judgement is made for all calls, so it takes the worst of them: the largest change
            # by rounding, and the doubt (`hangs_on`) of any call.
            self.precise = replace(
                self.precise,
                own_change=max(self.precise.own_change, again.own_change),
                hangs_on=self.precise.hangs_on or again.hangs_on,
            )

    def _excuse_if_rounding_explains(
        self, example: Example, outputs: Outputs, error: Error
    ) -> None:
        """Add an error in float32 to `excused` if rounding may explain it.

        Such an error does not show that the result is wrong, as the network enlarges rounding. It
        does not show that the result is right, either.

        Args:
            example: The call.
            outputs: The source's outputs by name.
            error: The error of the result's outputs.
        """
        # An approximate result may differ from the source by any amount.
        if not self.exact:
            return
        # If float64 was tried, the tolerance itself allows for rounding (`_change_by_rounding`).
        if error.precision != "float32" or self.precise is not None:
            return
        # An error that passes in every network needs no excuse.
        if error.relative_l2 <= allowance.FLOAT32_BASE:
            return

        # In a detector near ties decide which boxes are chosen. The last digit of the weights may
        # decide a tie that the last digit of the input leaves as it is. `not <=` is also true of
        # NaN.
        own_change = self._change_by_last_digit(example, outputs)
        if not error.relative_l2 <= allowance.STRAYING * own_change:
            by_weights = self._outputs_with_changed_weights(example, outputs)
            weight_change = allowance.apart(self.precision, example, outputs, by_weights)
            own_change = max(own_change, weight_change)

        # Outputs of another shape are infinitely far off. They are excused only if `own_change` is
        # infinite, too: if a last digit changes the shapes of the source's own outputs.
        if error.relative_l2 <= allowance.STRAYING * own_change:
            self.excused.append(error)

    def _error_at(self, site: str, example: Example, values: Outputs, others: Outputs) -> Error:
        """Return the error of one value.

        Args:
            site: The value's name: the path of a module, or the name of an output.
            example: The call, whose input size the error states.
            values: The source's values by name.
            others: The result's values by name.
        """
        measured = distance(values[site], others[site])
        return measured.error(site, self.precision, example.images.shape)

    def _nothing_at(self, site: str, example: Example) -> Error:
        """Return an infinite error, for a value of the source that the result does not have.

        Args:
            site: The value's name: the path of a module, or the name of a last layer's input.
            example: The call, whose input size the error states.
        """
        return Error(site, self.precision, tuple(example.images.shape), math.inf, math.inf)

    def _change_by_rounding(self, example: Example, outputs: Outputs, error: Error) -> float:
        """Return how far rounding alone moves the source's outputs, as a relative L2.

        In three cases it is 0, and the source is not run again: the error is small enough for every
        network, an approximate result is in half precision, or float64 was not tried for a network
        in float32.

        Args:
            example: The call.
            outputs: The source's outputs by name: all of them, or the one that is measured.
            error: The error of the result's outputs.
        """
        module = self.source.module
        is_half = allowance.is_half(error.precision)
        if is_half and self.exact:
            return allowance.cost_of_half(
                module,
                example,
                outputs,
                error,
                has_double=self.source.has_double,
                seed=self.source.seed,
            )

        # If float64 was not tried for a network in float32, `_excuse_if_rounding_explains` looks at
        # rounding instead.
        is_float32_alone = error.precision != "float64" and self.precise is None
        is_small = error.relative_l2 <= allowance.base_of(error.precision)
        if is_half or is_float32_alone or is_small:
            return 0.0
        return self._change_by_last_digit(example, outputs)

    def _change_by_last_digit(self, example: Example, outputs: Outputs) -> float:
        """Return how far the source's outputs move when its input changes in the last digit.

        Args:
            example: The call.
            outputs: The source's outputs by name.
        """
        again = self._outputs_with_changed_input(example, outputs)
        return allowance.apart(self.precision, example, outputs, again)

    def _outputs_with_changed_input(self, example: Example, outputs: Outputs) -> Outputs:
        """Return the source's outputs for a call after its input is changed in the last digit.

        They are `outputs`, those for the call itself, if the source takes no such input: then it is
        not known that rounding moves them.

        Args:
            example: The call.
            outputs: The source's outputs by name.
        """
        ran = _run_if_it_can(self.source.module, [allowance.in_the_last_digit(example)])
        return outputs if ran is None else ran[0]

    def _outputs_with_changed_weights(self, example: Example, outputs: Outputs) -> Outputs:
        """Return the outputs of the source with weights that differ in the last digit.

        They are `outputs`, those of the source itself, if it does not run with such weights.

        Args:
            example: The call.
            outputs: The source's outputs by name.
        """
        changed = allowance.with_other_digits(self.source.module, self.source.coarsest_dtype)
        ran = _run_if_it_can(changed, [example])
        return outputs if ran is None else ran[0]

    @property
    def _compares_heads(self) -> bool:
        """Whether the outputs of auxiliary heads, which only training runs, are compared, too."""
        return self.anatomy is not None and self.anatomy.traced.heads

    def _add_heads(self, example: Example) -> None:
        """Add, to `outputs`, the error of a run in which the heads return what training reads.

        A detector then returns what its heads compute, before it chooses boxes. Nothing is added if
        the source has no heads that only training runs.

        Args:
            example: The first call.
        """
        if not self._compares_heads:
            return
        # With `heads`, a network returns what its heads compute, as in training.
        heads, _ = run(self.source.module, example, heads=True)
        other_heads, _ = run(self.result, example, heads=True)
        self.outputs.append(between(example, heads, other_heads, precision=self.precision))

    def _allow_for_distance_to_double(self, example: Example, outputs: Outputs) -> None:
        """Raise `own_change` to the distance of the source's outputs from its outputs in float64.

        Nothing changes if there is no comparison in float64, or the distance is smaller.

        Args:
            example: The first call.
            outputs: The source's outputs in its own precision, by name.
        """
        if self.precise is None or not self.precise.reference:
            return
        reference = self.precise.reference
        # The float64 run may have seen only the first samples of the batch.
        first_outputs = _outputs_of_first_samples(self.source.module, example, outputs, reference)
        change = allowance.apart(self.precision, example, reference, first_outputs)
        self.own_change = max(self.own_change, change)

    def _judge_inside(self, example: Example, outputs: Outputs, others: Outputs) -> None:
        """Decide whether the outputs would show a mistake, and judge values inside the network.

        If the outputs are labels, or do not change with the input, they may be equal although the
        result is wrong. Then blocks and last layers are compared instead. Sets `shows_errors` and
        `blind`, and adds to `inside`, `sites` and `remarks`.

        Args:
            example: The first call.
            outputs: The source's outputs by name.
            others: The result's outputs by name.
        """
        # `blind` is the reason that is reported if no value below would show a mistake.
        why_blind = _nothing_to_compare(outputs)
        self.blind = why_blind or _CONSTANT

        # A result that need not equal the source is measured at its outputs only.
        if not self.exact:
            self.shows_errors = why_blind is None
            if why_blind is not None:
                self.remarks.insert(0, why_blind.why)
            return

        # An output that stays the same when the input changes would hide a mistake.
        moving = self._moving_outputs(example, outputs)
        constant: list[str] = []
        for name, value in outputs.items():
            if name not in moving and value.numel() and not _are_labels(value):
                constant.append(name or "the output")
        self.shows_errors = bool(moving)

        # A mistake may change the scores and none of the labels made from them. If a detector's
        # heads are compared, it shows there.
        has_labels = any(_are_labels(value) and value.numel() for value in outputs.values())
        labels_hide_errors = has_labels and not self._compares_heads

        # `sites` has the blocks that were measured already. Where outputs would show no error,
        # values inside that move with the input are compared in their place.
        errors = [error for error in self.sites if self.claims.keep(error.site)]
        if constant or labels_hide_errors or not moving:
            errors = self._errors_that_show(example, outputs, has_constant=bool(constant))
        if constant and moving:
            listed = ", ".join(constant[:4])
            self.remarks.append(f"nothing computed shows in some outputs on these inputs: {listed}")

        self.inside += self._with_allowance(example, errors)
        self.sites += [error for error in errors if error not in self.sites]

        # The comparison in float64 covers labels and small channels by its narrow tolerance.
        if self.double_error is None:
            self.inside += self._measured_labels(example, outputs, others)
            small = self._measured_small_channels(example, outputs, others)
            self.inside += small
            self.sites += [each.error for each in small if not each.is_within]

    def _moving_outputs(self, example: Example, outputs: Outputs) -> set[str]:
        """Return the names of the outputs that change visibly when the input changes.

        A change is visible if it is larger than the errors that pass (`_least_visible`). Outputs of
        labels are left out, and so are outputs that are equal to an input.

        Args:
            example: The call.
            outputs: The source's outputs by name.
        """
        inputs = example.tensors()
        numbers = {
            name: value
            for name, value in outputs.items()
            if value.numel()
            and not _are_labels(value)
            and not any(_is_the_same(value, tensor) for tensor in inputs)
        }

        # First the samples of the batch are compared: an output moves if its rows differ from its
        # first row.
        least = self._least_visible()
        first_rows = _of_first_sample(numbers, example.count)
        moving = {
            name
            for name, first_row in first_rows.items()
            if distance(numbers[name], first_row).relative_l2 > least
        }
        if len(moving) == len(numbers):
            return moving

        # The other outputs are compared with those for an input of other values.
        ran = _run_if_it_can(self.source.module, with_other_values(example))
        if ran is None:
            # The network takes no other values. An output without rows to compare counts as one
            # that moves, as nothing shows that it does not.
            return moving | (numbers.keys() - first_rows.keys())
        moved, _ = ran
        for name, value in numbers.items():
            if name in moved and distance(value, moved[name]).relative_l2 > least:
                moving.add(name)
        return moving

    def _least_visible(self) -> float:
        """Return the relative L2 by which an output must move with the input to show a mistake.

        A mistake in an output that moves by less could pass as rounding.
        """
        # The finest precision in which source and result are compared, and its own change.
        finest = "float64" if self.double_error is not None else self.precision
        base = allowance.base_of(finest)
        own_change = self.own_change
        if self.double_error is not None and self.precise is not None:
            own_change = self.precise.own_change

        # The base of half precision is the eps of its dtype, about 1e-3 or more, which is coarse
        # enough. The base of any other precision is multiplied.
        least = base if allowance.is_half(finest) else _VISIBLE * base
        allowed = allowance.of_outputs(finest, own_change).most
        return max(least, allowed)

    def _errors_that_show(
        self, example: Example, outputs: Outputs, *, has_constant: bool
    ) -> list[Error]:
        """Return the errors of values inside the network that change with the input.

        They are measured at the outputs of the blocks whose values the result claims to keep, and
        at the outputs of the last layers. If an output is constant, they are also measured at the
        inputs of the last layers.

        Args:
            example: The call.
            outputs: The source's outputs by name.
            has_constant: Whether an output never moves with the input.
        """
        if not any(value.numel() for value in outputs.values()):
            return []
        network = self.source.module
        try:
            anatomy = self.source.anatomy
        except NormswapError as error:
            self.blind = Reason(f"the outputs show no error, and no layer is seen: {error.what}")
            return []

        # Where values are taken: at the outputs of `paths`, and at the inputs of `entrances`.
        modules = anatomy.traced.modules
        blocks = [
            block.path
            for block in anatomy.blocks
            if block.path in modules and self.claims.keep(block.path)
        ]
        last_layers = _last_layers(anatomy.traced)
        paths = list(dict.fromkeys([*blocks, *last_layers]))
        entrances = last_layers if has_constant else []

        # The values inside of the source, of the result, and of the source on another input. If the
        # source takes no other input, the samples of a value are compared with its first one.
        _, values = run(network, example, paths, entrances=entrances)
        _, others = run(self.result, example, paths, entrances=entrances)
        ran = _run_if_it_can(network, with_other_values(example), paths, entrances=entrances)
        moved = _of_first_sample(values, example.count) if ran is None else ran[1]

        errors: list[Error] = []
        for site in [*paths, *map(entrance, entrances)]:
            moves = site in values and not _is_the_same(values[site], moved.get(site))
            if moves and site in others:
                errors.append(self._error_at(site, example, values, others))
            elif moves and site not in paths:
                # The result lacks the input of a last layer. A mistake before that layer would show
                # nowhere else, so the error counts as infinite.
                errors.append(self._nothing_at(site, example))

        if errors and not self.shows_errors:
            are_labels = all(_are_labels(value) for value in outputs.values())
            self._say_where_proved(_proved_inside(errors, blocks, are_labels=are_labels))
        return errors

    def _say_where_proved(self, sentence: str) -> None:
        """Put a sentence before the other remarks, and drop the remark that all labels are equal.

        Equal labels prove little, but the result is then proved by values inside the network.

        Args:
            sentence: The sentence that says where inside the result was proved.
        """
        if _SAME_LABELS in self.remarks:
            self.remarks.remove(_SAME_LABELS)
        self.remarks.insert(0, sentence)

    def _with_allowance(self, example: Example, errors: Sequence[Error]) -> list[JudgedError]:
        """Return errors at values inside, each with the largest error that is allowed there.

        Every value may be off by the base of the precision (1e-5 in float32). If some value is off
        by more, the source is run again to see how far rounding alone moves these values: by the
        last digit of input and weights, or in half precision by the distance to float64.

        Args:
            example: The call.
            errors: The errors at values inside.
        """
        # Where every error is within the base, the source need not run again. `not <=` is also true
        # of NaN.
        base = allowance.base_of(self.precision)
        off = [error.site for error in errors if not error.relative_l2 <= base]
        if not off:
            return [JudgedError(error, base) for error in errors]

        # A site is the path of a module, measured at its output, or the name of a last layer's
        # input (`entrance`). Here the path of each last layer stands by that name.
        by_entrance = {entrance(path): path for path in _last_layers_of(self.source)}
        entrances = [path for site, path in by_entrance.items() if site in off]
        values, rounded, by_double = self._values_of_other_rounding(example, off, entrances)

        measured: list[JudgedError] = []
        for error in errors:
            changes = [
                distance(values[error.site], other[error.site]).relative_l2
                for other in rounded
                if error.site in other and error.site in values
            ]
            change = max(changes, default=0.0)
            allowed = allowance.of_block(
                self.precision, change, by_double=by_double, decides=not self._is_proved_in_double
            )
            doubt = None
            if error.site in by_entrance:
                # The input of a last layer may differ in a right result, too: exported files have
                # the norm before the classifier folded into the classifier.
                doubt = Reason(f"the outputs are constant, and {error.site} differs")
            measured.append(JudgedError(error, allowed.most, doubt=doubt))
        return measured

    def _values_of_other_rounding(
        self, example: Example, paths: Sequence[str], entrances: Sequence[str]
    ) -> tuple[Outputs, list[Outputs], bool]:
        """Compute the source's values inside again, so that they differ by rounding alone.

        In half precision they are computed in float64, if the source runs in it. Otherwise they are
        computed twice: with another last digit of the input, and of the weights.

        Args:
            example: The call.
            paths: The modules whose outputs are returned. A name that is no module's path is passed
                over.
            entrances: The modules whose inputs are returned.

        Returns:
            The values of the source as it is, by site. Then the values of each run with other
            rounding. Then whether that is a run in float64.
        """
        module = self.source.module

        def inside(model: nn.Module, call: Example) -> Outputs:
            return run(model, call, paths, entrances=entrances)[1]

        values = inside(module, example)
        rounded: list[Outputs] = []
        if allowance.is_half(self.precision) and self.source.has_double:
            # The forward is the user's: it may not run in float64. In the context `Widening`,
            # tensors that it makes in float32 are made in float64.
            with Widening(), suppress(Exception):
                rounded.append(inside(to_double(module), example.map_floats(Tensor.double)))
        by_double = bool(rounded)
        if not by_double:
            moved = allowance.in_other_digits(module, example, self.source.coarsest_dtype)
            for network, call in moved:
                # Nor need it take inputs or weights with other digits.
                with suppress(Exception):
                    rounded.append(inside(network, call))
        return values, rounded, by_double

    @property
    def _is_proved_in_double(self) -> bool:
        """Whether float64 proves the result: outputs that would show a mistake are right there."""
        error = self.double_error
        is_right = error is not None and error.relative_l2 <= allowance.FLOAT64_BASE
        return is_right and self.shows_errors

    def _measured_labels(
        self, example: Example, outputs: Outputs, others: Outputs
    ) -> list[JudgedError]:
        """Return, for each output of labels, the share that differs and the share that may differ.

        Four times (`STRAYING`) as many labels may differ as change in the source when the last
        digit of its input, or of its weights, changes.

        Args:
            example: The call.
            outputs: The source's outputs by name.
            others: The result's outputs by name.
        """
        errors: dict[str, Error] = {}
        for name, value in outputs.items():
            if _are_labels(value) and name in others:
                errors[name] = self._error_at(name, example, outputs, others)

        # Where no label differs, the source need not run again.
        allowed = dict.fromkeys(errors, 0.0)
        if any(error.relative_l2 for error in errors.values()):
            by_input = self._outputs_with_changed_input(example, outputs)
            by_weights = self._outputs_with_changed_weights(example, outputs)
            for name in errors:
                input_change = distance(outputs[name], by_input[name]).relative_l2
                weight_change = distance(outputs[name], by_weights[name]).relative_l2
                allowed[name] = allowance.STRAYING * max(input_change, weight_change)
        return [
            JudgedError(error, allowed[name], shows_errors=False) for name, error in errors.items()
        ]

    def _measured_small_channels(
        self, example: Example, outputs: Outputs, others: Outputs
    ) -> list[JudgedError]:
        """Return the errors of channels that are small beside others of the same output.

        Scores of 1e-3 beside boxes of 640 may be all wrong, and the relative L2 of both together is
        still 1e-6. Each error may be as large as the base, or four times (`STRAYING`) as large as
        the change by the last digit of input or weights.

        Args:
            example: The call.
            outputs: The source's outputs by name.
            others: The result's outputs by name.
        """
        # The small channels of the source, and the same channels of the result.
        parts = _small_parts(outputs, outputs)
        other_parts = _small_parts(outputs, others)
        errors: dict[str, Error] = {}
        for site in parts.keys() & other_parts.keys():
            errors[site] = self._error_at(site, example, parts, other_parts)

        # Where every error is within the base, the source need not run again.
        base = allowance.base_of(self.precision)
        allowed = dict.fromkeys(errors, base)
        if any(error.relative_l2 > base for error in errors.values()):
            for moved_outputs in (
                self._outputs_with_changed_input(example, outputs),
                self._outputs_with_changed_weights(example, outputs),
            ):
                moved = _small_parts(outputs, moved_outputs)
                for site in errors.keys() & moved.keys():
                    change = distance(parts[site], moved[site]).relative_l2
                    allowed[site] = max(allowed[site], allowance.STRAYING * change)
        return [
            JudgedError(error, allowed[site], shows_errors=False) for site, error in errors.items()
        ]

    def report(self) -> Report:
        """Return the measurements and the verdict, which is made from all of them."""
        precise = self.precise
        allowances = [
            allowance.of_outputs("float64", precise.own_change if precise else 0.0),
            # If float64 was tried and failed, the source's own precision decides.
            allowance.of_outputs(
                self.precision,
                self.own_change,
                decides=precise is not None and precise.error is None,
            ),
        ]
        # For a network in float64 both have the same key, and the second is kept.
        allowed = {each.precision: each for each in allowances}
        self._remark_on_precision(allowed[self.precision])

        judgement = self._judgement(allowed)
        reason = judgement.reason or Reason("", "")
        return Report(
            exact=self.exact,
            passed=judgement.passed,
            inputs=self.source.described,
            logits=tuple(self.outputs),
            sites=tuple(self.sites),
            tolerance={each.precision: each.most for each in allowed.values()},
            remarks=tuple(self.remarks),
            unproved=reason.why,
            remedy=reason.remedy,
            allowances={each.precision: str(each) for each in allowed.values()},
            site_tolerance={each.error.site: each.allowed for each in self.inside},
        )

    def _remark_on_precision(self, own: allowance.Allowance) -> None:
        """Add remarks on what each precision proves, and drop errors that prove nothing.

        Args:
            own: What is allowed in the source's own precision.
        """
        precise = self.precise
        has_unstable_shapes = math.isinf(self.own_change)
        if precise is not None and has_unstable_shapes:
            # The source itself gives another number of boxes when its input changes in the last
            # digit, so nothing can be compared in this precision.
            self.remarks.append(
                f"in {self.precision} the outputs change their shape when the input changes in its"
                " last digit"
            )
            # So only errors in float64 are kept. If there are none, the others stay, as nothing
            # else decides.
            doubles = [error for error in self.outputs if error.precision == "float64"]
            self.outputs = doubles or self.outputs
        elif own.is_coarse:
            share = f"{self.own_change:.0%}"
            self.remarks.append(
                f"{self.precision} alone moves the source's output by {share} of its size"
            )

        if precise is not None and precise.impossible:
            self.remarks.append(
                f"proved in {self.precision} only: the network does not run in float64"
                f" ({precise.impossible})"
            )
        # `hangs_on` says that a choice, such as the order of nearly equal scores, decides the
        # outputs.
        if precise is not None and precise.hangs_on:
            self.remarks.append(precise.hangs_on)

    def _judgement(self, allowed: dict[str, allowance.Allowance]) -> Judgement:
        """Return whether the result passes, judged by all errors that were measured.

        Args:
            allowed: What is allowed at the outputs, by precision.
        """
        if not self.is_finite:
            return Judgement(False, _NOT_FINITE)
        if not self.exact:
            return self._judgement_of_approximate()

        in_own_precision = allowed[self.precision]
        shows_errors = self.shows_errors
        if self.double_error is None and in_own_precision.proves_nothing:
            # Without float64 the source's own precision decides, and it would let anything pass.
            shows_errors = False
            self.blind = Reason(
                f"rounding in {self.precision} moves the output by as much as an error would"
            )

        # An error at the outputs that is too large is a mistake only if nothing else explains it.
        # The doubt is about that error alone (`excused`), or about the network.
        general_doubt = self._doubt(allowed["float64"])
        measured: list[JudgedError] = []
        for error in self.outputs:
            doubt = _ROUNDING if error in self.excused else general_doubt
            most = allowed[error.precision].most
            measured.append(JudgedError(error, most, shows_errors, doubt))
        judgement = judge([*measured, *self.inside], self.blind)

        # What passes so far proves nothing if the source returns more than was compared.
        if judgement.passed and self.unread:
            return Judgement(False, _unread(self.unread))

        # It may also fail by its dtypes.
        if judgement.passed and not self.has_same_types:
            self.remarks.append("the outputs have other dtypes than the source's")
            return Judgement(False)

        # Or at ten times the input's scale. Layers of known classes need no such run.
        # Without a recorded graph the classes are not known.
        may_be_foreign = self.anatomy is None or _has_foreign_layers(self.anatomy)
        if judgement.passed and may_be_foreign:
            larger = self._error_of_larger(in_own_precision.most)
            if larger:
                self.outputs.append(larger)
                return Judgement(False)
        return judgement

    def _judgement_of_approximate(self) -> Judgement:
        """Return whether a result that does not claim to be exact passes.

        All errors at its outputs must be finite. If the outputs would show no mistake, and nothing
        inside was compared either, nothing is proved.
        """
        if not all(math.isfinite(error.relative_l2) for error in self.outputs):
            return Judgement(False)
        if self.unread:
            self.remarks.append(_unread(self.unread).why)
        if not self.shows_errors and not self.sites:
            return Judgement(False, self.blind)
        return Judgement(True)

    def _doubt(self, in_double: allowance.Allowance) -> Reason | None:
        """Return why a large error at the outputs need not be a mistake of the result, or None.

        Args:
            in_double: The error that is allowed at the outputs in float64. If it is large, the
                network enlarges rounding until an error says nothing.
        """
        # `hangs_on` is set if a choice, such as the order of nearly equal scores, decides the
        # outputs.
        if self.precise is not None and self.precise.hangs_on:
            remedy = "Give other inputs, or convert the backbone by itself"
            return Reason(self.precise.hangs_on, remedy)
        if in_double.most >= allowance.FLOAT64_CAP:
            return _AMPLIFIES
        return None

    def _error_of_larger(self, allowed: float) -> Error | None:
        """Return the error on ten times the first image if it is too large, or else None.

        Where the source takes no single image, it is measured on ten times the whole batch. The
        result is also None if the source runs on neither, which a remark says, or gives NaN or
        infinite numbers.

        Args:
            allowed: The largest relative L2 error that passes.
        """
        network = self.source.module
        batch = self.source.calls[0]
        for call in (batch.first(1), batch):
            larger = call.map_floats(lambda tensor: _LARGER * tensor)
            ran = _run_if_it_can(network, [larger])
            if ran is not None:
                break
        if ran is None:
            self.remarks.append(f"not compared at {_LARGER} times the input: it does not run there")
            return None
        outputs, _ = ran
        if not all(bool(torch.isfinite(value).all()) for value in outputs.values()):
            return None

        # An error that is too large may still be what rounding makes at this scale.
        others, _ = run(self.result, larger)
        error = between(larger, outputs, others, precision=self.precision)
        if error.relative_l2 > allowed:
            own_change = self._change_by_rounding(larger, outputs, error)
            allowed = max(allowed, allowance.of_outputs(self.precision, own_change).most)
        if error.relative_l2 <= allowed:
            return None

        # Far from its statistics a network may enlarge rounding, so float64 decides where it runs.
        again = None if self.precise is None else self.precise.again(larger)
        if again is None or again.error is None:
            return error
        allowed = allowance.of_outputs("float64", again.own_change).most
        is_right_in_float64 = again.error.relative_l2 <= allowed
        return None if is_right_in_float64 else error


def _unread(names: Iterable[str]) -> Reason:
    """Return why nothing is proved where a network returns values that no comparison reads.

    Args:
        names: Their names in the output. The empty name is the output itself.
    """
    listed = ", ".join(name or "its output" for name in names)
    return Reason(
        f"no comparison reads what the network returns as {listed}",
        "Compare networks whose forward returns tensors, in tuples, dicts or objects",
    )


def _run_if_it_can(
    model: nn.Module,
    calls: Iterable[Example],
    paths: Sequence[str] = (),
    *,
    entrances: Sequence[str] = (),
) -> tuple[Outputs, Outputs] | None:
    """Run a network in eval mode on the first of some calls that it takes, or return None.

    Args:
        model: The network.
        calls: The calls, in the order in which they are tried.
        paths: The modules whose outputs are returned, too.
        entrances: The modules whose inputs are returned, too.

    Returns:
        The outputs by name and the values inside by path, as `running.run` returns them. None if
        the network takes none of the calls.
    """
    for example in calls:
        # The forward is the user's, and may raise anything for numbers that it does not take.
        with suppress(Exception):
            return run(model, example, paths, entrances=entrances)
    return None


def _of_first_sample(values: Outputs, count: int) -> Outputs:
    """Return the values as they would be if each sample had those of the first one.

    Args:
        values: The values by name. Those without a row for each sample are left out.
        count: The number of samples. If it is 1, there is nothing to compare.
    """
    return {
        name: value[:1].expand_as(value)
        for name, value in values.items()
        if value.ndim and len(value) == count > 1
    }


def _proved_inside(errors: Sequence[Error], blocks: Sequence[str], *, are_labels: bool) -> str:
    """Return the sentence that tells where inside the network the result was proved.

    Args:
        errors: The errors that were measured inside, at blocks and last layers.
        blocks: The paths of the residual blocks.
        are_labels: Whether the network's outputs are labels. Otherwise they are constant.
    """
    at_blocks = sum(error.site in blocks for error in errors)
    where = f"{at_blocks} blocks" if at_blocks else "the last layers"
    return f"proved at {where}; the outputs are {'labels' if are_labels else 'constant'}"


def _last_layers_of(source: Source) -> list[str]:
    """Return the paths of a network's last layers, or none if its forward cannot be recorded."""
    try:
        return _last_layers(source.anatomy.traced)
    except NormswapError:
        return []


def _last_layers(traced: Traced) -> list[str]:
    """Return the paths of the last layers: only functions stand between them and the outputs."""
    paths: list[str] = []
    # The graph is walked from the outputs backwards, up to the first layer on each way.
    to_visit = list(inputs_of(traced.nodes[-1]))
    seen = set(to_visit)
    while to_visit:
        node = to_visit.pop()
        if node.op == "call_module":
            paths.append(str(node.target))
            continue
        unseen = [other for other in inputs_of(node) if other not in seen]
        seen.update(unseen)
        to_visit += unseen

    return paths


def _are_labels(value: Tensor) -> bool:
    """Whether a value is labels, masks or counts."""
    return not (value.is_floating_point() or value.is_complex())


def _small_parts(outputs: Outputs, values: Outputs) -> Outputs:
    """Select, from some outputs, the channels that are small in the source's outputs.

    A channel is small if its L2 norm is below a thousandth of the largest channel's norm. Both
    dimension 1 and the last one are tried as channels, as classes are in one of them.

    Args:
        outputs: The source's outputs by name. They decide which channels are small.
        values: The outputs from which the channels are selected: the source's, or those of another
            run. An output whose shape is not the source's is left out.

    Returns:
        The selected channels, by a name that tells output and axis.
    """
    parts: Outputs = {}
    for name, output in outputs.items():
        is_dense = output.is_floating_point() and output.layout == torch.strided
        has_same_shape = name in values and values[name].shape == output.shape
        if not is_dense or not output.numel() or not has_same_shape:
            continue

        # Classes that are masked out are -inf. They count as 0, so that all norms stay finite.
        finite = output.detach().double().nan_to_num(0.0, 0.0, 0.0)
        for axis in {1, output.ndim - 1}:
            if not 0 < axis < output.ndim:
                continue
            sizes = finite.movedim(axis, 0).flatten(1).norm(dim=1)
            is_small = (sizes > 0) & (sizes < _SMALL * sizes.max())
            if bool(is_small.any()):
                site = f"small channels of {name or 'the output'} on axis {axis}"
                parts[site] = values[name].index_select(axis, is_small.nonzero().flatten())

    return parts


def _is_the_same(value: Tensor, other: Tensor | None) -> bool:
    """Whether both values have the same shape and numbers. It is false without a second value."""
    return other is not None and value.shape == other.shape and bool((value == other).all())


def _is_finite(outputs: Outputs) -> bool:
    """Whether the outputs hold no NaN and no +inf, and each holds some finite number.

    -inf stands for a class that is masked out.
    """
    for value in outputs.values():
        if _are_labels(value) or not value.numel():
            continue
        if value.is_complex():
            value = torch.view_as_real(value.resolve_conj())
        if bool((torch.isnan(value) | (value == math.inf)).any()):
            return False
        if not bool(torch.isfinite(value).any()):
            return False
    return True


def _have_the_same_types(outputs: Outputs, others: Outputs) -> bool:
    """Whether outputs of the same name have the same dtype."""
    common = outputs.keys() & others.keys()
    return all(outputs[name].dtype == others[name].dtype for name in common)


def _has_foreign_layers(anatomy: Anatomy) -> bool:
    """Whether forward calls a layer of an unknown package, or one with a forward set on itself.

    Known are the layers of torch, timm, torchvision and normswap.
    """
    layers = [
        module
        for node in anatomy.traced.nodes
        if (module := anatomy.traced.module(node)) is not None
    ]
    for layer in layers:
        is_known = type(layer).__module__.startswith(_KNOWN_CLASSES)
        if not is_known or "forward" in vars(layer):
            return True
    return False


def _outputs_of_first_samples(
    source: nn.Module, example: Example, outputs: Outputs, like: Outputs
) -> Outputs:
    """Return the source's outputs for as many first samples as were run in float64.

    They are cut from the outputs for the whole batch. This cannot be done if forward squeezes a
    batch of one, so that an output in float64 has fewer dimensions than for the whole batch. Then
    the source runs on the first sample.

    Args:
        source: The source.
        example: The batch.
        outputs: The source's outputs for the whole batch, by name.
        like: The source's outputs in float64 for the first samples, by name.
    """
    if any(value.ndim != outputs[name].ndim for name, value in like.items() if name in outputs):
        return run(source, example.first(1))[0]

    first_outputs: Outputs = {}
    for name, value in outputs.items():
        if name in like and value.ndim:
            value = value[: len(like[name])]
        first_outputs[name] = value
    return first_outputs


def _require_repeatable(source: nn.Module, example: Example, report: Report) -> None:
    """Raise VerificationError if two runs of the source alone differ on the same input.

    Args:
        source: The source.
        example: The call.
        report: The report. The source is run only if an exact result did not pass, as its error
            may then be the source's own.
    """
    if report.passed or not report.exact:
        return

    worst_error = report.worst
    once, _ = run(source, example)
    again, _ = run(source, example)
    between_runs = allowance.apart(worst_error.precision, example, once, again)
    if between_runs > _OF_ERROR * worst_error.relative_l2:
        raise VerificationError(
            "the source gives another answer each time that it runs on the same input",
            "so no result of it can be proved",
            "Make what is random, or what is kept from the call before, stand still in eval mode",
        )


def _nothing_to_compare(outputs: Outputs) -> Reason | None:
    """Return why equal outputs of both networks would prove nothing, or None if they would.

    They prove nothing if they are empty, or if every input gives the same numbers.
    """
    values = [value for value in outputs.values() if value.numel()]
    if not values:
        return _EMPTY
    if not any(map(_are_labels, values)) and _is_constant(values):
        return _CONSTANT
    return None


def _is_constant(values: Sequence[Tensor]) -> bool:
    """Whether each output has several rows and all its rows are equal."""
    return all(
        value.ndim and len(value) > 1 and bool((value == value[:1]).all()) for value in values
    )


def _remarks(outputs: Outputs, inside: Outputs, blocks: Sequence[Block]) -> list[str]:
    """Return remarks on outputs and residual branches that hardly change and so prove little.

    Args:
        outputs: The source's outputs by name.
        inside: The source's values at blocks and at the last modules of their branches, by path.
        blocks: The residual blocks.
    """
    remarks: list[str] = []
    is_blind = _nothing_to_compare(outputs) is not None
    if not is_blind and _is_constant([value for value in outputs.values() if value.numel()]):
        remarks.append(_SAME_LABELS)

    # How much the input moves the scores: their distance from the mean over samples, relative to
    # their size. `not >` is also true of NaN.
    floats = [value for value in outputs.values() if value.is_floating_point() and value.ndim > 1]
    if not is_blind and floats and all(len(value) == len(floats[0]) > 1 for value in floats):
        logits = torch.cat([value.flatten(1) for value in floats], 1)
        moves = float((logits - logits.mean(0)).norm() / logits.norm().clamp_min(1e-30))
        if not moves > _HARDLY:
            remarks.append(
                f"the input moves the output by {moves:.0e} of its size only, so this check says"
                " little"
            )

    # How large each residual branch is beside its block's output. The branch is measured at its
    # last module, `tail`.
    for block in blocks:
        if block.tail in inside and block.path in inside:
            share = float(inside[block.tail].norm() / inside[block.path].norm().clamp_min(1e-30))
            if not share > _HARDLY:
                size = f"the residual branch is {share:.0e} of the block's output"
                remarks.append(f"{block.path}: {size}, so this check says nothing about it")

    return remarks
