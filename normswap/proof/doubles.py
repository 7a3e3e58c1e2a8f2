"""The comparison in float64, where rounding hides no mistake.

Networks are compared on the first sample of the first batch or, where that does not do, on all of
it (`Network.short_example`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from normswap.copying import to_double
from normswap.errors import first_line
from normswap.graph.recorder import Widening
from normswap.models.calling import Example
from normswap.proof import allowance
from normswap.proof.distance import Error, Outputs, between
from normswap.proof.running import Source, outputs_double, run

# If a change of the last digit in float64 changes the output by more than this, the network made
# another choice, for instance among nearly equal scores. Rounding alone does not grow so much.
_CHOICE = 1e-6


def _not_again(_example: Example) -> Precise | None:
    """Return None, which says that the comparison in float64 cannot be repeated on other inputs.

    This is the default of the field `Precise.again`.
    """
    return None


@dataclass(frozen=True)
class Precise:
    """A comparison of source and result in float64.

    Args:
        error: The error of the result's outputs. None if the source does not run in float64.
        reference: The source's outputs in float64, by name. Empty if it does not run.
        own_change: How far the source's outputs move when the input, or the weights, change in
            their last digit, as a relative L2. It is 0 where the error is small, as it is not
            needed then.
        hangs_on: A sentence for reports if a choice, such as the order of nearly equal scores,
            causes a large `own_change`. Empty otherwise.
        impossible: Why the source does not run in float64. Empty if it does.
        again: A function that takes other inputs and returns the comparison on them. It returns
            None where the source does not run on them in float64.
    """

    error: Error | None
    reference: Outputs
    own_change: float = 0.0
    hangs_on: str = ""
    impossible: str = ""
    again: Callable[[Example], Precise | None] = field(
        default=_not_again, repr=False, compare=False
    )


def _by_no_parts(_example: Example) -> Outputs | None:
    """Return None, which says that the result has no run in float64 that costs less than a copy.

    This is the default of the argument `parts` of `compare_double`.
    """
    return None


def compare_double(
    source: Source,
    make: Callable[[], nn.Module],
    parts: Callable[[Example], Outputs | None] = _by_no_parts,
) -> Precise | None:
    """Compare source and result in float64, on the source's short example or else the whole batch.

    The whole first batch is taken if the source does not run on the short example alone.

    Args:
        source: The source.
        make: A function that builds the result in float64, without rounding to less on the way.
        parts: A function that takes an example in float64 and returns the result's outputs at less
            cost than `make`, or None. If these outputs differ from the source's, or there are none,
            the network of `make` is compared. The default always returns None.

    Returns:
        The comparison. If the source runs on neither call in float64, it has the reason in
        `impossible`, and no error. None if the network is in float64 already or has no float64
        copy, for instance because its device has no float64 (MPS).
    """
    if not source.has_double:
        return None

    # This becomes `Precise.again`, by which the caller repeats the comparison on another call.
    def again(other: Example) -> Precise | None:
        double_example = other.map_floats(Tensor.double)
        # The forward is the user's: it may ask for one dtype.
        try:
            expected = outputs_double(source.module, double_example)
        except Exception:
            return None
        return _against(source, double_example, expected, make, parts)

    # The short example is tried first, as it costs less. A forward that fixes the number of images
    # runs on the whole batch only.
    whole = source.examples[0]
    short = source.short_example
    candidates = [short] if short is whole else [short, whole]
    why = ""
    for example in candidates:
        # The forward is the user's: it may ask for one dtype, or for its number of images.
        try:
            double_example = example.map_floats(Tensor.double)
            reference = outputs_double(source.module, double_example)
        except Exception as error:
            why = why or first_line(error)
            continue
        precise = _against(source, double_example, reference, make, parts)
        return replace(precise, again=again)

    return Precise(None, {}, impossible=why)


def _against(
    source: Source,
    example: Example,
    reference: Outputs,
    make: Callable[[], nn.Module],
    parts: Callable[[Example], Outputs | None],
) -> Precise:
    """Compare the result with the source's outputs in float64, and return the comparison.

    Args:
        source: The source.
        example: The call, in float64.
        reference: The source's outputs in float64, by name.
        make: A function that builds the result in float64, without rounding to less on the way.
        parts: A function that takes the call and returns the result's outputs in float64 at less
            cost, or None.
    """

    def error_of(expected: Outputs, outputs: Outputs) -> Error:
        return between(example, expected, outputs, precision="float64", anatomy=source.anatomy)

    # The run by parts costs less, and is enough if its outputs are right. If they are not, or there
    # are none (an infinite error), the result is built and run. `not <=` is also true of NaN.
    error = error_of(reference, parts(example) or {})
    if not error.relative_l2 <= allowance.FLOAT64_BASE:
        result = make()
        # In this context, tensors that a forward makes in float32 are made in float64.
        with Widening():
            outputs, _ = run(result, example)
        error = error_of(reference, outputs)

        # A GPU's kernels may round float64 to less: weight_norm's has a float32 root. Then the CPU
        # decides.
        if error.relative_l2 > allowance.FLOAT64_BASE and example.images.device.type != "cpu":
            on_cpu = example.on(torch.device("cpu"))
            expected = outputs_double(to_double(source.module).cpu(), on_cpu)
            error = error_of(expected, outputs_double(to_double(result).cpu(), on_cpu))

    if error.relative_l2 <= allowance.FLOAT64_BASE:
        return Precise(error, reference)

    # A larger error may still be rounding, so how far rounding moves the source is measured, too.
    own_change, hangs_on = _own_change(source.module, example, reference)
    return Precise(error, reference, own_change, hangs_on)


def _own_change(source: nn.Module, example: Example, reference: Outputs) -> tuple[float, str]:
    """Return how far a change of the last digit moves the source's outputs in float64, and why.

    Args:
        source: The source.
        example: The call, in float64.
        reference: The source's outputs for it, by name.

    Returns:
        The relative L2 of the larger change (by the last digit of the input, or of the weights),
        and a sentence for reports if the network made another choice, for instance among nearly
        equal scores. Otherwise the sentence is empty.
    """
    input_change, weight_change = (
        allowance.apart("float64", example, reference, outputs_double(network, call))
        for network, call in allowance.in_other_digits(source, example, torch.float64)
    )

    hangs_on = ""
    # In no network that can be trained does rounding grow by a factor of 1e8. So if the weights'
    # last digit changes the output by as much, and the input's does not, another choice was made.
    if weight_change > _CHOICE and input_change < _CHOICE:
        hangs_on = (
            "changing the last digit of its weights in float64 changes the source's output by"
            f" {weight_change:.0%} of its size: the order of nearly equal scores, or a tie, decides"
        )
    return max(input_change, weight_change), hangs_on
