"""How a result is judged by its errors, over every mixture of three of them."""

import itertools

import pytest

from normswap.proof.distance import Error
from normswap.proof.verdict import JudgedError, Reason, Report, judge

BLIND = Reason("nothing changes with the input", "")
DOUBT = Reason("rounding may explain it", "")
KINDS = {
    "within": (0.5, True, None),
    "within, of a constant": (0.5, False, None),
    "too large": (2.0, True, None),
    "too large, doubted": (2.0, True, DOUBT),
    "NaN": (float("nan"), True, None),
}


def judged(kind: str) -> JudgedError:
    relative_l2, shows_errors, doubt = KINDS[kind]
    error = Error("logits", "float32", (3, 8, 8), relative_l2, relative_l2)
    return JudgedError(error, allowed=1.0, shows_errors=shows_errors, doubt=doubt)


@pytest.mark.parametrize(
    "kinds", list(itertools.combinations_with_replacement(KINDS, 3)), ids=" + ".join
)
def test_one_error_beyond_doubt_is_wrong(kinds: tuple[str, ...]) -> None:
    judgement = judge([judged(kind) for kind in kinds], BLIND)

    if "too large" in kinds or "NaN" in kinds:
        expected = (False, None)
    elif "too large, doubted" in kinds:
        expected = (False, DOUBT)
    elif "within" not in kinds:
        expected = (False, BLIND)
    else:
        expected = (True, None)
    assert (judgement.passed, judgement.reason) == expected


def error_in(precision: str, relative_l2: float) -> Error:
    return Error("logits", precision, (3, 8, 8), relative_l2, relative_l2)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_worst_error_is_that_in_the_networks_own_precision(precision: str) -> None:
    """Float64 counts where nothing else was measured."""
    doubles = (error_in("float64", 0.2), error_in("float64", 0.9))
    own = (error_in(precision, 0.1), error_in(precision, 0.4), error_in(precision, 0.3))

    beside = Report(exact=True, passed=False, inputs="noise", logits=(*doubles, *own))
    alone = Report(exact=True, passed=False, inputs="noise", logits=doubles)

    assert beside.worst == own[1]
    assert alone.worst == doubles[1]
