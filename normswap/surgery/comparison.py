"""PROVE: run source and result on the same inputs, and measure by how much they differ, and where.

Exact conversions must agree to a relative L2 error of 1e-5 in float32 at the logits, and of 1e-12
in float64, where a correct fold is off by 1e-14 and a wrong eps by 1e-4. In half precision three
times what the format's own rounding costs the source is allowed: itself in that precision against
its float64 values. Where a change of its input in the last digit moves the output of a source in
float32 by more than the tolerance (a chaotic network), four times that is allowed, and float64
decides; in float64 32 times that is allowed, up to 1e-8. Each output is measured by itself, and the
worst counts. The error of labels, masks and counts is the share of entries that differ. Where a
layer's class is neither torch's nor timm's, the same must hold at ten times the input's scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from normswap.copying import duplicate, to_double
from normswap.errors import (
    NormswapError,
    VerificationError,
    WrongResultError,
    first_line,
    spelled,
)
from normswap.graph.anatomy import Anatomy, Block
from normswap.graph.recorder import Widening
from normswap.graph.tracing import Traced, inputs as inputs_of
from normswap.models import network_input
from normswap.models.calling import Example, Inputs
from normswap.models.modes import full_precision
from normswap.surgery.network import Network
from normswap.surgery.report import Error, Report
from normswap.surgery.running import Outputs, both, outputs_double, run, runs

FLOAT32_TOLERANCE = 1e-5
FLOAT64_TOLERANCE = 1e-12
# A change of the output by more than this, for the last digit in float64, is another choice.
_CHOICE = 1e-6
# In float64 32 times the change that the last digit of the input makes is allowed, and never more
# than 1e-8.
_MOST64 = 1e-8
_CONDITION = 32
# In float32 four times that is allowed; of a block never more than this, however it strays.
_STRAYING = 4
_MOST_OF_A_BLOCK = 0.05
# Where the network does not run in float64, which would decide, never more than this.
_MOST32 = 1e-4
# Three times what half precision costs the source is allowed: ten networks under eight schemes were
# off by up to 2.1.
ROUNDING = 3
# Inputs, different in the last digit, that are run where one says too little about rounding.
_MOVED = 8
# Of fewer outputs one error may be several times their mean, so the largest counts.
_FEW = 8
# Where rounding alone changes more of the output than this share, half precision proves little.
_COARSE = 0.1
# Where two runs of the source differ by this share of a result's error, the source is not
# repeatable.
_OF_ERROR = 0.1
# A tolerance of so much of the output's size lets anything pass.
_PROVES_NOTHING = 0.5
_AMPLIFIES = (
    "in float64, too, changing the last digit of its input changes the source's output by more"
    " than 1e-10"
)
_KNOWN_CLASSES = ("torch.", "timm.", "torchvision.", "normswap.")
# A clamp at the end of a format's range changes nothing at the scale of noise or images, but at
# this multiple.
_LARGER = 10
# An input or a branch that changes the output by a smaller share proves nothing.
_HARDLY = 1e-4


def verify(
    source: nn.Module | Network,
    result: nn.Module,
    inputs: Inputs = None,
    *,
    input_size: Sequence[int] | None = None,
    exact: bool = True,
    seed: int | None = None,
) -> Report:
    """Measure how far `result` is from `source`, in their own precision; neither is changed.

    Args:
        source: The network that `result` is compared with, or its record.
        result: The network that is measured.
        inputs: The inputs that both run on: a tensor, a tuple of arguments, a dict of keywords, or
            a list of batches of these. By default they are N(0, 1) noise.
        input_size: The largest size (C, H, W) of the noise. By default it is the network's own.
        exact: Whether both should compute the same. If not, the report passes if the numbers are
            finite.
        seed: The seed of the noise.

    Returns:
        The distances by precision and input size, what is allowed, and whether that is kept.
    """
    network = Network.of(source, inputs=inputs, size=input_size, seed=seed)
    return compare(network, network_input.require_module(result), exact=exact, traced=False)


@full_precision()
def compare(
    source: Network,
    result: nn.Module,
    *,
    exact: bool = True,
    precise: Precise | None = None,
    traced: bool = True,
    keeps_blocks: bool = True,
) -> Report:
    """Run both networks in eval mode, on what the source is called with, and compare them.

    Args:
        source: The source, with its inputs.
        result: The network that is compared with it.
        exact: Whether the result claims to compute the source's function.
        precise: The comparison in float64, on the beginning of the first batch (`compare_double`).
        traced: Whether errors are measured at every block of the source, too, and branches checked
            for life.
        keeps_blocks: Whether an exact result claims the values at every block, too. Otherwise
            blocks are measured, but not judged (a stream without its mean).

    Raises:
        VerificationError: One of them does not run, or the source differs from run to run.
    """
    calls = source.examples if traced else source.calls
    comparison = _Comparison(
        source=source,
        result=result,
        exact=exact,
        precise=precise,
        anatomy=source.anatomy if traced else None,
        keeps_blocks=keeps_blocks,
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
        keeps_blocks: Whether the result claims the values at every block.
        logits: The errors at the outputs, by precision and input size.
        sites: The errors at the blocks.
        remarks: What the user should know of the measurement.
        unproved: Why nothing that was compared could have shown an error, or empty.
        right_inside: Whether the blocks and the labels are within what is allowed.
        finite: Whether the source's outputs are finite.
        same_types: Whether the outputs have the source's dtypes.
        own_change: How far the source's outputs move by its own rounding.
    """

    source: Network
    result: nn.Module
    exact: bool
    precise: Precise | None
    anatomy: Anatomy | None
    keeps_blocks: bool
    logits: list[Error] = field(default_factory=list)
    sites: list[Error] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    unproved: str = ""
    right_inside: bool = True
    finite: bool = True
    same_types: bool = True
    own_change: float = 0.0

    def __post_init__(self) -> None:
        self.precision = str(self.source.dtype).removeprefix("torch.")
        self.double_error = None if self.precise is None else self.precise.error
        self.blocks: tuple[Block, ...] = ()
        if self.anatomy is not None:
            modules = self.anatomy.traced.modules
            self.blocks = tuple(b for b in self.anatomy.blocks if b.path and b.path in modules)

        # An approximate result may find another number of boxes, and has no distance in float64.
        error = self.double_error
        if error is not None and (self.exact or error.relative_l2 != float("inf")):
            self.logits.append(error)

    def add(self, example: Example, first: Example) -> None:
        """Run both networks on a call, and measure how far their values are apart.

        Args:
            example: The call.
            first: The first of all calls, at which blocks are compared, too.
        """
        network = self.source.module
        paths = [block.path for block in self.blocks]
        tails = [block.tail for block in self.blocks if block.tail]
        pair = both(network, self.result, example, paths, tails, first)
        if pair is None:
            return

        (outputs, inside), (others, others_inside) = pair
        x = example.images
        self.finite &= _is_finite(outputs)
        self.same_types &= _have_the_same_types(outputs, others)
        error = worst(self.precision, x, outputs, others, exact=self.exact)
        error = _with_agreement(error, outputs, others, self.anatomy)
        self.logits.append(error)
        change = _allowance(self.source, example, outputs, error, self.precise, exact=self.exact)
        self.own_change = max(self.own_change, change)
        if example is not first:
            return

        self._add_heads(example)
        if self.precise is not None and self.precise.reference:
            alone = _alone(network, example, outputs, self.precise.reference)
            change = _apart(self.precision, x, self.precise.reference, alone)
            self.own_change = max(self.own_change, change)

        self.sites = [
            _error(path, self.precision, x, inside[path], others_inside[path])
            for path in paths
            if path in inside and path in others_inside
        ]
        self.remarks = _remarks(outputs, inside, self.blocks)
        self._judge_inside(example, outputs, others)

    def _add_heads(self, example: Example) -> None:
        """Measure the outputs of a detector's heads, before it chooses boxes."""
        if self.anatomy is None or not self.anatomy.traced.heads:
            return
        heads, _ = run(self.source.module, example, heads=True)
        other_heads, _ = run(self.result, example, heads=True)
        self.logits.append(worst(self.precision, example.images, heads, other_heads))

    def _judge_inside(self, example: Example, outputs: Outputs, others: Outputs) -> None:
        """Judge blocks, last layers and labels; outputs that show no error are proved by these."""
        network = self.source.module
        judged = self.sites if self.keeps_blocks else []
        self.unproved = _nothing_to_compare(outputs)
        if not self.exact:
            return

        if not _shows_errors(network, example, outputs):
            evidence = _inside(
                self.source,
                self.result,
                example,
                keeps_blocks=self.keeps_blocks,
                are_labels=any(not value.is_floating_point() for value in outputs.values()),
            )
            judged = evidence.errors
            self.unproved = self.unproved or evidence.unproved
            if judged and not evidence.unproved:
                self.unproved = ""
                kept = [line for line in self.remarks if not line.startswith("every input")]
                self.remarks = [evidence.remark(outputs), *kept]

        self.right_inside = _insides_are_right(self.source, example, judged)
        self.sites = self.sites + [error for error in judged if error not in self.sites]
        if self.double_error is None:
            self.right_inside &= _labels_are_right(self.source, example, outputs, others)

    def _proves_nothing(self, tolerance: dict[str, float]) -> bool:
        """Whether an exact claim, without float64, is held to what lets anything pass."""
        without_double = self.exact and self.double_error is None
        return without_double and tolerance[self.precision] >= _PROVES_NOTHING

    def report(self) -> Report:
        """Return the measurements and the verdict, which is made from all of them."""
        tolerance = _tolerance(self.precision, self.own_change, self.precise)
        self._remark_on_precision()
        self._settle_what_is_unproved(tolerance)

        right = self.right_inside and (self.same_types or not self.exact)
        within = _passes(self.logits, tolerance, exact=self.exact)
        passed = not self.unproved and right and within
        if passed and self.exact and (self.anatomy is None or _has_foreign_layers(self.anatomy)):
            larger = _error_of_larger(
                self.source, self.result, tolerance[self.precision], self.precise
            )
            if larger:
                self.logits.append(larger)
                passed = False

        return Report(
            exact=self.exact,
            passed=passed,
            inputs=self.source.described,
            logits=tuple(self.logits),
            sites=tuple(self.sites),
            tolerance=tolerance,
            remarks=tuple(self.remarks),
            unproved="" if passed else self.unproved,
        )

    def _remark_on_precision(self) -> None:
        """Say where a precision proves little, and leave out errors that rounding decides."""
        precise = self.precise
        if precise is not None and self.own_change == float("inf"):
            # The number of boxes that the source itself finds depends on the last digit.
            self.remarks.append(
                f"in {self.precision} the outputs change their shape when the input changes in its"
                " last digit"
            )
            # Without float64 nothing decides, so the errors stay.
            doubles = [error for error in self.logits if error.precision == "float64"]
            self.logits = doubles or self.logits
        elif _is_half(self.precision) and self.own_change > _COARSE:
            share = f"{self.own_change:.0%}"
            self.remarks.append(
                f"{self.precision} alone moves the source's output by {share} of its size"
            )

        if precise is not None and precise.impossible:
            self.remarks.append(
                f"proved in {self.precision} only: the network does not run in float64"
                f" ({precise.impossible})"
            )
        if precise is not None and precise.hangs_on:
            self.remarks.append(precise.hangs_on)

    def _settle_what_is_unproved(self, tolerance: dict[str, float]) -> None:
        """Decide why nothing is proved, where that is so, now that all errors are known."""
        too_far = not _passes(self.logits, tolerance)
        if self.exact and too_far:
            # What is off by more than is allowed is wrong, whatever else could not be compared.
            self.unproved = ""
        elif not self.exact and self.sites:
            self.unproved = ""
        elif not self.unproved and self._proves_nothing(tolerance):
            self.unproved = (
                f"rounding in {self.precision} moves the output by as much as an error would"
            )

        if too_far and self.precise is not None and self.precise.hangs_on:
            self.unproved = self.precise.hangs_on
        if too_far and self.exact and tolerance.get("float64", 0.0) >= _MOST64:
            self.unproved = self.unproved or _AMPLIFIES
        if not self.finite:
            self.unproved = "the network itself gives NaN or infinite numbers"


def require_passed(network: Network, report: Report, scheme: str) -> None:
    """Raise VerificationError where the report of a scheme's result is not good.

    Args:
        network: The source, which may be why.
        report: The measurements.
        scheme: The name of the scheme in errors.

    Raises:
        WrongResultError: The result is wrong. It names the first block that is off.
        VerificationError: Nothing that was compared could have shown an error.
    """
    if report.passed:
        return
    if report.unproved.startswith("the network itself"):
        remedy = "Its weights are too large, or it needs other inputs: `inputs=`"
        raise VerificationError(report.unproved, f"on {network.described}", remedy)
    if report.unproved:
        what = f"nothing proves the result of {scheme}"
        raise VerificationError(what, report.unproved, _remedy_of_unproved(report.unproved))
    if not report.exact:
        left_out = spelled("skip", metavar="PATTERN")
        raise WrongResultError(
            f"the result of {scheme} gives NaN or infinite numbers",
            remedy=f"A norm whose gammas are all 0 can be left out: {left_out}",
        )

    error, place = _error_to_name(report)
    raise WrongResultError(
        f"the result of {scheme} is wrong: relative L2 error {error.relative_l2:.1e} at {place}"
        f" ({error.precision})",
        f"allowed: {report.tolerance[error.precision]:.0e}",
        _remedy_of_wrong(report, error),
    )


def _remedy_of_unproved(why: str) -> str:
    if why == _AMPLIFIES:
        return "Its weights amplify rounding too much"
    if why.endswith("decides"):
        return "Give other inputs, or convert the backbone by itself"
    return "Give inputs that it has an answer to: `inputs=`"


def _error_to_name(report: Report) -> tuple[Error, str]:
    """Return the error that a refusal names, and the place where it was measured.

    It is the worst error at the outputs. Where these are right, or say nothing, it is the first
    block that is off.
    """
    first_site = None
    for site in report.sites:
        if not site.relative_l2 <= 10 * report.tolerance[site.precision]:
            first_site = site
            break

    if _passes(report.logits, report.tolerance) and report.sites:
        site = first_site or max(report.sites, key=lambda error: error.relative_l2)
        return site, site.site

    worst_error = max(
        report.logits, key=lambda error: error.relative_l2 / report.tolerance[error.precision]
    )
    if first_site is not None:
        return worst_error, f"the logits, first at {first_site.site}"
    return worst_error, "the logits"


def _remedy_of_wrong(report: Report, error: Error) -> str:
    doubles = [error for error in report.logits if error.precision == "float64"]
    if doubles and not _passes(doubles, report.tolerance):
        return "Nothing was written; if the plan was not edited by hand, this is a bug of normswap"
    if doubles and not _passes(report.logits, report.tolerance):
        return (
            f"Nothing was written. In float64 it is right, so {error.precision} is what differs:"
            " convert model.double()"
        )
    return "Nothing was written"


def _is_finite(outputs: Outputs) -> bool:
    """Whether all numbers are finite, or -inf for classes that are masked out."""
    for value in outputs.values():
        if not value.is_floating_point() or not value.numel():
            continue
        if bool((torch.isnan(value) | (value == math.inf)).any()):
            return False
        if not bool(torch.isfinite(value).any()):
            return False
    return True


def _have_the_same_types(outputs: Outputs, others: Outputs) -> bool:
    """Whether outputs of the same name have the same dtype."""
    common = outputs.keys() & others.keys()
    return all(outputs[name].dtype == others[name].dtype for name in common)


@dataclass(frozen=True)
class _Inside:
    """Errors inside of two networks, where their outputs could not show any.

    Args:
        errors: The errors at blocks and last layers whose values change with the input.
        blocks: How many of these are at blocks.
        unproved: Why that proves nothing, or empty.
    """

    errors: list[Error]
    blocks: int = 0
    unproved: str = ""

    def remark(self, outputs: Outputs) -> str:
        """The sentence that a report says of this."""
        where = f"{self.blocks} blocks" if self.blocks else "the last layers"
        labels = bool(outputs) and not all(value.is_floating_point() for value in outputs.values())
        return f"proved at {where}; the outputs are {'labels' if labels else 'constant'}"


def _inside(
    source: Network,
    result: nn.Module,
    example: Example,
    *,
    keeps_blocks: bool,
    are_labels: bool,
) -> _Inside:
    """Compare the insides of two networks whose outputs could not show an error.

    Args:
        source: The source.
        result: The network that is compared with the source.
        example: The call that both run on.
        keeps_blocks: Whether the result claims the values at blocks.
        are_labels: Whether outputs are labels or masks, so that the last layers are compared, too.
    """
    try:
        anatomy = source.anatomy
    except NormswapError as error:
        return _Inside(
            [], unproved=f"the outputs show no error, and no layer is seen: {error.what}"
        )

    traced = anatomy.traced
    blocks: list[str] = []
    if keeps_blocks:
        blocks = [b.path for b in anatomy.blocks if b.path and b.path in traced.modules]
    last = _last_layers(traced) if are_labels else []
    paths = list(dict.fromkeys([*blocks, *last]))
    pair = both(source.module, result, example, paths)
    assert pair is not None, "there is no second size"
    (_, values), (_, others) = pair
    changed = _changed(example)
    moved: Outputs = {}
    if runs(source.module, changed):
        moved = run(source.module, changed, paths)[1]

    precision = str(source.dtype).removeprefix("torch.")
    errors = [
        _error(path, precision, example.images, values[path], others[path])
        for path in paths
        if path in values and path in others and not _is_the_same(values[path], moved.get(path))
    ]
    if errors:
        return _Inside(errors, sum(error.site in blocks for error in errors))
    return _Inside([], unproved="every input gives the same numbers: nothing was compared")


def _last_layers(traced: Traced) -> list[str]:
    """The paths of the layers after which only functions come before the outputs."""
    found: list[str] = []
    ahead = list(inputs_of(traced.nodes[-1]))

    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        if node.op == "call_module":
            found.append(str(node.target))
            continue
        fresh = [other for other in inputs_of(node) if other not in seen]
        seen.update(fresh)
        ahead += fresh

    return found


def _changed(example: Example) -> Example:
    """The example with other values: in a mirror, and floating-point ones smaller."""

    def change(tensor: Tensor) -> Tensor:
        if not tensor.ndim:
            return tensor
        return 0.7 * tensor.flip(-1) if tensor.is_floating_point() else tensor.flip(-1)

    return example.map(change)


def _is_the_same(value: Tensor, other: Tensor | None) -> bool:
    """Whether both hold the same numbers."""
    return other is not None and value.shape == other.shape and bool((value == other).all())


def _shows_errors(network: nn.Module, example: Example, outputs: Outputs) -> bool:
    """Whether some output is of numbers, not of labels, and changes with the input."""
    numbers = {
        name: value
        for name, value in outputs.items()
        if value.numel() and (value.is_floating_point() or value.is_complex())
    }
    if any(
        value.ndim and len(value) == example.count > 1 and not _is_constant([value])
        for value in numbers.values()
    ):
        return True

    changed = _changed(example)
    if not numbers or not runs(network, changed):
        return bool(numbers)
    others, _ = run(network, changed)
    return any(not _is_the_same(value, others.get(name)) for name, value in numbers.items())


def _labels_are_right(source: Network, example: Example, outputs: Outputs, other: Outputs) -> bool:
    """Whether labels, masks and counts differ no more than they do for the source's last digit."""
    precision = str(source.dtype).removeprefix("torch.")
    for name, value in outputs.items():
        if value.is_floating_point() or value.is_complex() or name not in other:
            continue

        share = _error(name, precision, example.images, value, other[name]).relative_l2
        if not share:
            continue

        strayed = _with_other_digits(source.module, source.dtype)
        again = (
            run(source.module, _in_the_last_digit(example))[0],
            run(strayed, example)[0],
        )
        own = max(
            _error(name, precision, example.images, value, each[name]).relative_l2 for each in again
        )
        if not share <= _STRAYING * own:
            return False

    return True


def _insides_are_right(source: Network, example: Example, errors: Sequence[Error]) -> bool:
    """Whether each block or layer of an exact result is off by no more than rounding explains.

    Where the base tolerance does not do, it is held to what the last digit of input and weights
    changes in it, or in half precision to what rounding costs it.
    """
    precision = str(source.dtype).removeprefix("torch.")
    base = FLOAT32_TOLERANCE
    if precision == "float64":
        base = FLOAT64_TOLERANCE
    elif _is_half(precision):
        base = torch.finfo(source.dtype).eps
    off = [error for error in errors if not error.relative_l2 <= base]
    if not off:
        return True

    paths = [error.site for error in off]
    values = run(source.module, example, paths)[1]
    others: list[Outputs] = []
    times = float(_STRAYING if precision == "float32" else _CONDITION)
    if _is_half(precision) and source.has_double:
        times = float(ROUNDING)
        # The forward is the user's: it may not run in float64.
        with Widening(), suppress(Exception):
            wide = example.map_floats(Tensor.double)
            others.append(run(to_double(source.module), wide, paths)[1])
    if not others:
        others.append(run(source.module, _in_the_last_digit(example), paths)[1])
        others.append(run(_with_other_digits(source.module, source.dtype), example, paths)[1])
    for error in off:
        changes = [
            _error(error.site, precision, example.images, values[error.site], other[error.site])
            for other in others
            if error.site in other
        ]
        change = max((each.relative_l2 for each in changes), default=0.0)
        if not error.relative_l2 <= min(times * change, _MOST_OF_A_BLOCK):
            return False
    return True


def _has_foreign_layers(anatomy: Anatomy) -> bool:
    """Whether forward calls a layer that is neither torch's nor timm's, or has its own forward."""
    layers = [
        module
        for node in anatomy.traced.nodes
        if (module := anatomy.traced.module(node)) is not None
    ]
    return any(
        not type(m).__module__.startswith(_KNOWN_CLASSES) or "forward" in vars(m) for m in layers
    )


def _error_of_larger(
    source: Network, result: nn.Module, allowed: float, precise: Precise | None
) -> Error | None:
    """Return the error for ten times the first image, if it is finite and above `allowed`.

    Else None is returned.
    """
    network = source.module
    precision = str(source.dtype).removeprefix("torch.")

    larger = source.calls[0].first(1).map_floats(lambda t: _LARGER * t)
    try:
        outputs, _ = run(network, larger)
    # A user's forward may refuse numbers of this size.
    except Exception:
        return None

    if not all(bool(torch.isfinite(value).all()) for value in outputs.values()):
        return None

    error = worst(precision, larger.images, outputs, run(result, larger)[0])
    if error.relative_l2 > allowed:
        own_change = _allowance(source, larger, outputs, error, precise, exact=True)
        allowed = max(allowed, _tolerance(precision, own_change, None)[precision])

    if error.relative_l2 <= allowed:
        return None

    return error


def _passes(errors: Sequence[Error], allowed: dict[str, float], *, exact: bool = True) -> bool:
    """Whether all errors are finite and, of an exact result, within what is allowed."""
    finite = all(e.relative_l2 < float("inf") for e in errors)
    return finite and (not exact or all(e.relative_l2 <= allowed[e.precision] for e in errors))


def _require_repeatable(source: nn.Module, example: Example, report: Report) -> None:
    """Raise VerificationError where the source itself gives another answer on each run."""
    if report.passed or not report.exact:
        return

    worst_error = report.worst
    once, again = (run(source, example)[0] for _ in range(2))
    apart = _apart(worst_error.precision, example.images, once, again)
    if apart > _OF_ERROR * worst_error.relative_l2:
        raise VerificationError(
            "the source gives another answer each time that it runs on the same input",
            "so no result of it can be proved",
            "Make what is random, or what is kept from the call before, stand still in eval mode",
        )


def _allowance(
    source: Network,
    example: Example,
    outputs: Outputs,
    error: Error,
    precise: Precise | None,
    *,
    exact: bool,
) -> float:
    """How far its own rounding moves the source's outputs.

    It is 0 where the error needs no allowance, or has no bound.
    """
    is_half = _is_half(error.precision)
    is_double = error.precision == "float64"
    if is_half and exact:
        return _rounding(source, example, outputs, error)

    tolerance = FLOAT64_TOLERANCE if is_double else FLOAT32_TOLERANCE
    # Where the error is within the tolerance anyway, the source need not run once more.
    if is_half or error.relative_l2 <= tolerance or not (is_double or precise):
        return 0.0

    again, _ = run(source.module, _in_the_last_digit(example))
    return _apart(error.precision, example.images, outputs, again)


def _in_the_last_digit(example: Example) -> Example:
    """The example with every number changed in its last digit."""
    return example.map_floats(lambda t: t * (1 + 4 * torch.finfo(t.dtype).eps))


def _rounding(source: Network, example: Example, outputs: Outputs, error: Error) -> float:
    """The relative L2 between the source's outputs in half precision and in float64.

    Where a result errs by more than this allows, other inputs are measured too, which differ from
    these in the last digit: the rounding of a few numbers may be small by chance.
    """
    precision = error.precision
    x = example.images
    wide = (
        outputs_double(source.module, example.map_floats(Tensor.double))
        if source.has_double
        else outputs
    )
    off = _apart(precision, x, wide, outputs)
    if error.relative_l2 <= ROUNDING * off or not error.relative_l2 < float("inf"):
        return off
    generator = torch.Generator().manual_seed(source.seed)

    def moved(t: Tensor) -> Tensor:
        signs = 2 * torch.randint(2, t.shape, generator=generator).to(t) - 1
        return t * (1 + torch.finfo(t.dtype).eps * signs)

    again = [
        _apart(precision, x, wide, run(source.module, example.map_floats(moved))[0])
        for _ in range(_MOVED)
    ]
    few = sum(value.numel() for value in outputs.values()) < _FEW
    return max(
        off, max(again) if few else math.sqrt(sum(value * value for value in again) / _MOVED)
    )


def _is_half(precision: str) -> bool:
    return torch.finfo(getattr(torch, precision)).bits == 16


def _apart(precision: str, x: Tensor, a: Outputs, b: Outputs) -> float:
    """The relative L2 between two runs of the source.

    It is infinite where shapes differ, and 0 where values are not finite.
    """
    apart = worst(precision, x, a, b).relative_l2
    shaped = a.keys() == b.keys() and all(a[name].shape == b[name].shape for name in a)
    if shaped and apart == float("inf"):
        return 0.0
    return apart


def _tolerance(precision: str, own_change: float, precise: Precise | None) -> dict[str, float]:
    if precision == "float64":
        return {precision: _tolerance64(own_change)}

    narrow = FLOAT32_TOLERANCE
    times = _STRAYING
    if _is_half(precision):
        narrow = torch.finfo(getattr(torch, precision)).eps
        times = ROUNDING

    if own_change < float("inf"):
        allowed = times * own_change
        if precise is not None and precise.error is None and not _is_half(precision):
            allowed = min(allowed, _MOST32)
        narrow = max(narrow, allowed)

    return {precision: narrow, "float64": _tolerance64(precise.own_change if precise else 0.0)}


def _tolerance64(own_change: float) -> float:
    return max(FLOAT64_TOLERANCE, min(_MOST64, _CONDITION * own_change))


@dataclass(frozen=True)
class Precise:
    """A comparison in float64.

    Args:
        error: How far the result is off in float64. None where the network does not run in it.
        reference: The source's outputs in float64.
        own_change: How far the source's outputs move when the input, or the weights, change in
            their last digit.
        hangs_on: The cause of a large `own_change`, for reports.
        impossible: Why the network does not run in float64. Empty where it does.
    """

    error: Error | None
    reference: Outputs
    own_change: float = 0.0
    hangs_on: str = ""
    impossible: str = ""


def compare_double(
    network: Network,
    make: Callable[[], nn.Module],
    parts: Callable[[Example], Outputs | None] = lambda _: None,
) -> Precise | None:
    """Compare source and result in float64, on the first image or on a small batch as it is.

    None where the network is in float64 already, or its device has no float64 (MPS).

    Args:
        network: The source.
        make: Returns the result in float64, never rounded to less.
        parts: Returns the result's outputs on an example in float64 at less cost, or None. Where
            these differ from the source's, the network of `make` decides. By default it returns
            None.
    """
    if not network.has_double:
        return None

    why = ""
    whole = network.examples[0]

    short = network.short_example
    for example in (short,) if short is whole else (short, whole):
        # The forward is the user's: it may ask for one dtype, or for its number of images.
        try:
            reference = outputs_double(network.module, example.map_floats(Tensor.double))
        except Exception as error:
            why = why or first_line(error)
            continue
        return _against_double(network, example.map_floats(Tensor.double), reference, make, parts)

    return Precise(None, {}, impossible=why)


def _against_double(
    network: Network,
    example: Example,
    reference: Outputs,
    make: Callable[[], nn.Module],
    parts: Callable[[Example], Outputs | None],
) -> Precise:
    """Compare the result with the source's outputs in float64, `reference`."""
    source = network.module
    outputs = parts(example) or {}
    error = worst("float64", example.images, reference, outputs)
    if not error.relative_l2 <= FLOAT64_TOLERANCE:
        result = make()
        with Widening():
            outputs, _ = run(result, example)
        error = worst("float64", example.images, reference, outputs)
        # A GPU's kernels may round float64 to less: weight_norm's has a float32 root. Then the CPU
        # decides.
        if error.relative_l2 > FLOAT64_TOLERANCE and example.images.device.type != "cpu":
            on_cpu = example.on(torch.device("cpu"))
            both_outputs = (
                outputs_double(to_double(model).cpu(), on_cpu) for model in (source, result)
            )
            error = worst("float64", on_cpu.images, *both_outputs)
    error = _with_agreement(error, reference, outputs, network.anatomy)
    if error.relative_l2 <= FLOAT64_TOLERANCE:
        return Precise(error, reference)

    by_input = outputs_double(source, _in_the_last_digit(example))
    own_change = _apart("float64", example.images, reference, by_input)
    by_weights = outputs_double(_with_other_digits(source), example)
    ties = _apart("float64", example.images, reference, by_weights)
    hangs_on = ""
    # Rounding grows by a factor of 1e8 in no network that can be trained: a choice fell otherwise.
    if ties > _CHOICE and own_change < _CHOICE:
        hangs_on = (
            "changing the last digit of its weights in float64 changes the source's output by"
            f" {ties:.0%} of its size: the order of nearly equal scores, or a tie, decides"
        )
    return Precise(error, reference, max(own_change, ties), hangs_on)


@torch.no_grad()
def _with_other_digits(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A copy of a network in a dtype, every parameter changed in its last digit."""
    changed = to_double(model) if dtype == torch.float64 else duplicate(model, {})
    generator = torch.Generator().manual_seed(0)
    for parameter in changed.parameters():
        if parameter.is_floating_point():
            signs = torch.randint(2, parameter.shape, generator=generator) * 2 - 1
            parameter.mul_(1 + 4 * torch.finfo(dtype).eps * signs.to(parameter))
    return changed


def _alone(source: nn.Module, example: Example, outputs: Outputs, like: Outputs) -> Outputs:
    """The first image's outputs in the shapes of `like`.

    The source runs again where its forward squeezes outputs.
    """
    if any(value.ndim != outputs[name].ndim for name, value in like.items() if name in outputs):
        return run(source, example.first(1))[0]
    return {
        name: value[: len(like[name])] if name in like and value.ndim else value
        for name, value in outputs.items()
    }


def worst(precision: str, x: Tensor, a: Outputs, b: Outputs, *, exact: bool = True) -> Error:
    """The error of the output that differs most.

    It is 1 where an approximate result has another number of rows.
    """
    if a and a.keys() == b.keys() and all(a[name].shape == b[name].shape for name in a):
        errors = [
            replace(_error("logits", precision, x, a[name], b[name]), output=name) for name in a
        ]
        return max(errors, key=lambda error: error.relative_l2)
    alike = a.keys() == b.keys() and all(a[name].shape[1:] == b[name].shape[1:] for name in a)
    if alike and not exact and all(bool(torch.isfinite(value).all()) for value in b.values()):
        return Error("logits", precision, tuple(x.shape), 1.0, 1.0)
    return Error("logits", precision, tuple(x.shape), float("inf"), float("inf"))


def agreements(a: Outputs, b: Outputs, anatomy: Anatomy | None) -> dict[str, float]:
    """The share of images, or of places in maps, with the same argmax.

    The keys say what the argmax is taken of.
    """
    shares = {}
    for name, axis in class_axes(a, anatomy).items():
        if name in b and a[name].shape == b[name].shape:
            equal = a[name].argmax(axis) == b[name].argmax(axis)
            answer = f"the largest of {a[name].shape[axis]} on axis {axis}" + f" of {name}" * bool(
                name
            )
            shares[answer] = float(equal.double().mean())
    return shares


def _with_agreement(error: Error, a: Outputs, b: Outputs, anatomy: Anatomy | None) -> Error:
    shares = agreements(a, b, anatomy)
    if not shares:
        return error
    agreement, answer = least_agreement(shares)
    return replace(error, agreement=agreement, answer=answer, axis=class_axes(a, anatomy).get(""))


def least_agreement(shares: Mapping[str, float]) -> tuple[float | None, str]:
    """The least of these shares; and what its argmax is taken of, and the other shares."""
    if not shares:
        return None, ""
    least = min(shares, key=lambda answer: shares[answer])
    others = [f"{share:.1%} by {answer}" for answer, share in shares.items() if answer != least]
    return shares[least], "; ".join([least, *others])


def class_axes(outputs: Outputs, anatomy: Anatomy | None) -> dict[str, int]:
    """The axis of classes of each output that is scores.

    Scores have as many channels as a last linear layer gives. Features have none, nor series, whose
    places are no channels, nor maps of several sizes, as of a pyramid.
    """
    scores = {
        name: value
        for name, value in outputs.items()
        if value.is_floating_point() and value.ndim > 1
    }
    widths = frozenset[int]() if anatomy is None else anatomy.widths
    if anatomy is not None and anatomy.features:
        return {}

    sides = {value.shape[2:] for value in scores.values() if value.ndim > 3}
    axes: dict[str, int] = {}
    for name, value in scores.items():
        is_row = value.ndim == 2 and not widths
        fits = [axis for axis in (1, value.ndim - 1) if value.shape[axis] in widths or is_row]
        if fits and value.shape[fits[0]] > 1 and (value.ndim < 4 or len(sides) == 1):
            axes[name] = fits[0]

    return axes


def _error(site: str, precision: str, x: Tensor, a: Tensor, b: Tensor) -> Error:
    """The error of b against a: the relative L2.

    Of labels, masks and counts it is the share of entries that differ.
    """
    size = tuple(x.shape)
    if a.shape != b.shape or a.is_complex() != b.is_complex():
        return Error(site, precision, size, float("inf"), float("inf"))
    if not a.numel():
        return Error(site, precision, size, 0.0, 0.0)

    if not (a.is_floating_point() or a.is_complex()):
        share = float((a != b).double().mean())
        return Error(site, precision, size, share, share, 1.0 - share)

    a = _numbers(a)
    b = _numbers(b)

    masked = (a == b) & (a == -math.inf)
    if bool(masked.any()) and not bool(masked.all()):
        # Scores of classes that are masked out are -inf in both outputs.
        a = a[~masked]
        b = b[~masked]

    # The squares of numbers below 1e-154 are zero in float64, so all are divided by a power of two,
    # which rounds nothing.
    exponent = torch.frexp(a.abs().max().nan_to_num(1.0, 1.0, 1.0)).exponent.clamp(-1000, 1000)
    scale = torch.pow(2.0, -exponent.double())
    a = a * scale
    b = b * scale
    difference = a - b
    numbers = (
        a.norm(),
        b.norm(),
        difference.norm(),
        difference.abs().max(),
        a.abs().max(),
        b.abs().max(),
    )
    # The numbers are stacked, so that a device is waited for once.
    norm, other, error, most, top, other_top = torch.stack(numbers).tolist()
    if not (math.isfinite(top) and math.isfinite(other_top)):
        return Error(site, precision, size, float("inf"), float("inf"))
    if not norm:
        return Error(site, precision, size, other, other)

    return Error(site, precision, size, error / norm, most / top)


def _numbers(value: Tensor) -> Tensor:
    """All numbers of a tensor in one dimension, in float64.

    A complex number is two: its real and its imaginary part.
    """
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    return value.double().flatten()


def _nothing_to_compare(outputs: Outputs) -> str:
    """Why equal outputs prove nothing, or an empty text.

    There are none, or every input gives the same.
    """
    values = [value for value in outputs.values() if value.numel()]
    if not values:
        return "the outputs are empty: no number was compared"
    if all(value.is_floating_point() for value in values) and _is_constant(values):
        return "every input gives the same numbers: nothing was compared"
    return ""


def _is_constant(values: Sequence[Tensor]) -> bool:
    """Whether each of several inputs gives the same."""
    return all(
        value.ndim and len(value) > 1 and bool((value == value[:1]).all()) for value in values
    )


def _remarks(outputs: Outputs, inside: Outputs, blocks: Sequence[Block]) -> list[str]:
    why = _nothing_to_compare(outputs)
    unseen = list(filter(None, [why]))
    if not why and _is_constant([value for value in outputs.values() if value.numel()]):
        unseen.append("every input gives the same labels, so this check says little")

    floats = [value for value in outputs.values() if value.is_floating_point() and value.ndim > 1]
    if not why and floats and all(len(value) == len(floats[0]) > 1 for value in floats):
        logits = torch.cat([value.flatten(1) for value in floats], 1)
        moves = float((logits - logits.mean(0)).norm() / logits.norm().clamp_min(1e-30))
        if not moves > _HARDLY:
            unseen.append(
                f"the input moves the output by {moves:.0e} of its size only, so this check says"
                " little"
            )

    for block in blocks:
        if block.tail in inside and block.path in inside:
            share = float(inside[block.tail].norm() / inside[block.path].norm().clamp_min(1e-30))
            if not share > _HARDLY:
                size = f"the residual branch is {share:.0e} of the block's output"
                unseen.append(f"{block.path}: {size}, so this check says nothing about it")

    return unseen
