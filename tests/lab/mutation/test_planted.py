"""The planted errors are errors of functions that there are, and the tests that must notice them do
(long).
"""

import pytest
from lab.mutation.planted import ERRORS, ROOT, Planted, first_to_fail, function_of


def test_each_can_be_planted() -> None:
    """Its function is there, and so are its tests; names are names."""
    missing = []
    for error in ERRORS:
        try:
            function_of(error.where)
        except (ImportError, AttributeError) as why:
            missing.append(f"{error.name}: {why}")
        missing += [
            f"{error.name}: no {test}" for test in error.tests if not (ROOT / test).is_file()
        ]

    assert missing == []
    assert len({error.name for error in ERRORS}) == len(ERRORS)


@pytest.mark.long
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.name)
def test_each_is_noticed(error: Planted) -> None:
    assert first_to_fail(error.tests, error.name)
