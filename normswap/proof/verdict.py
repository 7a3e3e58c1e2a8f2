"""The verdict of a comparison: PROVED, NOT PROVED, WRONG or MEASURED, and what it is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from normswap.errors import VerificationError, WrongResultError, spelled
from normswap.proof.distance import Error
from normswap.proof.held_out import Kept


@dataclass(frozen=True)
class Reason:
    """Why nothing is proved, and what helps.

    Args:
        why: What kept an error from being seen, as a sentence without a full stop.
        remedy: What to do.
        of_source: Whether the cause is in the source itself, so that no result of it can be proved.
    """

    why: str
    remedy: str = "Give inputs that it has an answer to: `inputs=`"
    of_source: bool = False


@dataclass(frozen=True)
class JudgedError:
    """A measured error, with the limit and the doubts by which it is judged.

    Args:
        error: The error.
        allowed: The largest relative L2 that passes.
        shows_errors: Whether the value changes with the input, so that a mistake would be seen.
        doubt: Why an error that is too large need not be a mistake of the result, or None.
    """

    error: Error
    allowed: float
    shows_errors: bool = True
    doubt: Reason | None = None

    @property
    def is_within(self) -> bool:
        """Whether the relative L2 is no larger than `allowed`. NaN never is."""
        return self.error.relative_l2 <= self.allowed


@dataclass(frozen=True)
class Judgement:
    """Whether a result passes, and if it does not, whether it is wrong or nothing is proved.

    Args:
        passed: Whether it passes.
        reason: Why nothing is proved. None if the result passes, or is wrong.
    """

    passed: bool
    reason: Reason | None = None


def judge(measured: Sequence[JudgedError], blind: Reason) -> Judgement:
    """Judge a result that claims to be exact, by all errors that were measured and nothing else.

    The result is wrong if an error is too large, and nothing but a mistake explains it. The result
    is proved if every error is small enough, and at least one of the values would have shown a
    mistake. Otherwise nothing is proved.

    Args:
        measured: Every error that was measured, at outputs and inside.
        blind: Why nothing is proved where no value that was compared changes with the input.
    """
    too_large = [each for each in measured if not each.is_within]
    doubts = [each.doubt for each in too_large if each.doubt is not None]
    if too_large:
        # A single error without a doubt makes the result wrong. "Wrong" is a judgement of False
        # without a reason; with a reason it is "not proved".
        are_all_in_doubt = len(doubts) == len(too_large)
        return Judgement(False, doubts[0] if are_all_in_doubt else None)

    # Every error is small enough, but a mistake might not have shown in any of these values.
    if not any(each.shows_errors for each in measured):
        return Judgement(False, blind)
    return Judgement(True)


@dataclass(frozen=True)
class Report:
    """The measurements, and the verdict.

    Args:
        exact: Whether the conversion claims to keep the function.
        passed: Whether the result is good. An exact one must keep the function within tolerance, an
            approximate one must give finite numbers.
        inputs: The name of the inputs that the networks were run on.
        logits: The errors at the logits, one for each precision and input size.
        sites: The errors at the residual blocks' outputs, in float32.
        tolerance: The largest relative L2 error that is allowed, by precision.
        remarks: Sentences that a reader must know: a branch, or the input, hardly moves the output,
            or the proof is at blocks, or in one precision only.
        kept: How well an approximate result agrees with its source on the user's held-out images.
            None if that was not measured.
        unmeasured: Why there is no such agreement, although there were images.
        unproved: Why nothing that was compared could have shown an error. Empty otherwise.
        remedy: What helps where nothing is proved. Empty otherwise.
        allowances: How each tolerance came about, by precision.
        site_tolerance: The largest relative L2 error that is allowed inside, by site.
        steps_before: How many steps of the plan had already been applied to the network that the
            result was compared with. With 0 it is the source itself.
    """

    exact: bool
    passed: bool
    inputs: str
    logits: tuple[Error, ...]
    sites: tuple[Error, ...] = ()
    tolerance: dict[str, float] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    kept: Kept | None = None
    unmeasured: str = ""
    unproved: str = ""
    remedy: str = ""
    allowances: dict[str, str] = field(default_factory=dict)
    site_tolerance: dict[str, float] = field(default_factory=dict)
    steps_before: int = 0

    @property
    def verdict(self) -> str:
        """The verdict as one word: PROVED, MEASURED, NOT PROVED or WRONG.

        A result that passes is PROVED if it claims to be exact, and MEASURED if it does not.
        """
        return word(exact=self.exact, passed=self.passed, unproved=bool(self.unproved))

    @property
    def worst(self) -> Error:
        """The error at the outputs with the largest relative L2, in the network's own precision.

        Errors in float64 count only if there are no others.
        """
        errors = [error for error in self.logits if error.precision != "float64"] or list(
            self.logits
        )
        return max(errors, key=lambda error: error.relative_l2)


def word(*, exact: bool, passed: bool, unproved: bool) -> str:
    """Return the word for a verdict.

    Args:
        exact: Whether the result claims to compute the source's function.
        passed: Whether all comparisons agree, and at least one of them would have differed if the
            result were wrong.
        unproved: Whether no comparison would have differed even if the result were wrong.
    """
    if passed:
        return "PROVED" if exact else "MEASURED"
    return "NOT PROVED" if unproved else "WRONG"


def require_passed(report: Report, scheme: str) -> None:
    """Raise an error unless the result passed.

    Args:
        report: The measurements and the verdict.
        scheme: The name of the scheme, for the error's sentence.

    Raises:
        WrongResultError: The result is wrong. The message names the first block that is off.
        VerificationError: Nothing that was compared could have shown an error.
    """
    if report.passed:
        return
    if report.unproved:
        raise VerificationError(
            f"nothing proves the result of {scheme}", report.unproved, report.remedy
        )
    # A result that need not equal the source can fail in this way only.
    if not report.exact:
        left_out = spelled("skip", metavar="PATTERN")
        raise WrongResultError(
            f"the result of {scheme} gives NaN or infinite numbers",
            remedy=f"A norm whose gammas are all 0 can be left out: {left_out}",
        )

    error, place = _error_to_name(report)
    allowed = report.allowances[error.precision]
    if error.site in report.site_tolerance:
        allowed = f"{report.site_tolerance[error.site]:.0e}"
    raise WrongResultError(
        f"the result of {scheme} is wrong: relative L2 error {error.relative_l2:.1e} at {place}"
        f" ({error.precision})",
        f"allowed: {allowed}",
        _remedy_of_wrong(report, error),
    )


def _error_to_name(report: Report) -> tuple[Error, str]:
    """Return the error that the message about a wrong result names, and its place in words.

    It is the worst error at the outputs. If all errors there are small enough, it is the first
    error inside the network that is too large.
    """
    # The first error inside that is too large. `not <=` is also true of NaN.
    first_inside = None
    for error in report.sites:
        if not error.relative_l2 <= report.site_tolerance.get(error.site, math.inf):
            first_inside = error
            break

    if first_inside is not None and _are_within(report.logits, report.tolerance):
        return first_inside, first_inside.site
    worst_error = max(
        report.logits, key=lambda error: error.relative_l2 / report.tolerance[error.precision]
    )
    if first_inside is not None:
        return worst_error, f"the logits, first at {first_inside.site}"
    return worst_error, "the logits"


def _remedy_of_wrong(report: Report, error: Error) -> str:
    """Return what to do about a wrong result, as the last sentence of the error's message.

    Args:
        report: The measurements of the wrong result.
        error: The error that the message quotes.
    """
    # Rounding is too small in float64 to exceed the tolerance: a large error there is a mistake.
    doubles = [measured for measured in report.logits if measured.precision == "float64"]
    if doubles and not _are_within(doubles, report.tolerance):
        return "Nothing was written; if the plan was not edited by hand, this is a bug of normswap"
    if doubles and not _are_within(report.logits, report.tolerance):
        return (
            f"Nothing was written. In float64 it is right, so {error.precision} is what differs:"
            " convert model.double()"
        )
    return "Nothing was written"


def _are_within(errors: Sequence[Error], tolerance: dict[str, float]) -> bool:
    """Whether all errors are within what is allowed in their precision.

    Args:
        errors: The errors.
        tolerance: The largest relative L2 that is allowed, by precision.
    """
    return all(error.relative_l2 <= tolerance[error.precision] for error in errors)
