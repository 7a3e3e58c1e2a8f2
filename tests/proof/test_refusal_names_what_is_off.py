"""Law of refusals: the error that a refusal names is one that was too large."""

import itertools

import pytest

from normswap.errors import WrongResultError
from normswap.proof.distance import Error
from normswap.proof.verdict import Report, require_passed

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-2}


@pytest.mark.parametrize("wrong", TOLERANCE)
def test_the_precision_that_is_named_is_the_one_that_is_off(wrong: str) -> None:
    """However small its error is beside those of coarser precisions, which are allowed."""
    errors: list[Error] = []
    for precision, allowed in TOLERANCE.items():
        factor = 100 if precision == wrong else 0.5
        errors.append(Error("logits", precision, (2, 3, 8, 8), factor * allowed, factor * allowed))

    for logits in itertools.permutations(errors):
        report = Report(
            exact=True,
            passed=False,
            inputs="noise",
            logits=logits,
            tolerance=TOLERANCE,
            allowances=dict.fromkeys(TOLERANCE, "so much"),
        )
        with pytest.raises(WrongResultError, match=rf"\({wrong}\)"):
            require_passed(report, "folded")
