"""The comparison in float64, where rounding hides no mistake.

Networks are compared on the first image, or on a small batch as it is.
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

# If the last digit in float64 changes the output by more than this, a choice fell otherwise: among
# nearly equal scores, for instance.
_CHOICE = 1e-6


def _not_again(_example: Example) -> Precise | None:
    """Stand for `Precise.again` where no other call is compared."""
    return None


@dataclass(frozen=True)
class Precise:
    """A comparison of source and result in float64.

    Args:
        error: How far the result is off. None where source or result do not run in float64.
        reference: The source's outputs in float64.
        own_change: How far the source's outputs move when the input, or the weights, change in
            their last digit.
        hangs_on: The cause of a large `own_change`, for reports.
        impossible: Why source or result do not run in float64. Empty where both do.
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
    """Stand for `parts` of `compare_double` where the result has no cheaper run in float64."""
    return None


def compare_double(
    source: Source,
    make: Callable[[], nn.Module],
    parts: Callable[[Example], Outputs | None] = _by_no_parts,
) -> Precise | None:
    """Compare source and result in float64, on few samples or else on the whole first batch.

    Returns None if the network is in float64 already, or its device has no float64 (MPS).

    Args:
        source: The source.
        make: A function that builds the result in float64, without rounding to less on the way.
        parts: A function that takes an example in float64 and returns the result's outputs at less
            cost than `make`, or None. If these outputs differ from the source's, or there are none,
            the network of `make` is compared. The default always returns None.
    """
    if not source.has_double:
        return None

    # Whoever reads the comparison may repeat it on another call.
    def again(other: Example) -> Precise | None:
        double_example = other.map_floats(Tensor.double)
        # The forward is the user's: it may ask for one dtype.
        try:
            expected = outputs_double(source.module, double_example)
        except Exception:
            return None
        return _against(source, double_example, expected, make, parts)

    # A forward that fixes the number of images runs on the whole batch only.
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
    """Compare the result with the source's outputs in float64.

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
    # are none (an infinite error), the result is built and run.
    error = error_of(reference, parts(example) or {})
    if not error.relative_l2 <= allowance.FLOAT64_BASE:
        result = make()
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

    # Before a larger error counts as a mistake, it is asked how far rounding moves the source.
    own_change, hangs_on = _own_change(source.module, example, reference)
    return Precise(error, reference, own_change, hangs_on)


def _own_change(source: nn.Module, example: Example, reference: Outputs) -> tuple[float, str]:
    """Return how far the last digit moves the source in float64, and the cause if it is a choice.

    Args:
        source: The source.
        example: The call, in float64.
        reference: The source's outputs for it, by name.

    Returns:
        The relative L2 of the larger change, by the input's last digit or the weights', and a
        sentence for reports. The sentence is empty unless a choice fell otherwise.
    """
    input_change, weight_change = (
        allowance.apart("float64", example, reference, outputs_double(network, call))
        for network, call in allowance.in_other_digits(source, example, torch.float64)
    )

    hangs_on = ""
    # Rounding grows by a factor of 1e8 in no network that can be trained: a choice fell otherwise.
    if weight_change > _CHOICE and input_change < _CHOICE:
        hangs_on = (
            "changing the last digit of its weights in float64 changes the source's output by"
            f" {weight_change:.0%} of its size: the order of nearly equal scores, or a tie, decides"
        )
    return max(input_change, weight_change), hangs_on
