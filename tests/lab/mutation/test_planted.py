"""The planted errors are still errors of this package, and the tests that must notice them do (slow)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numbers_of_errors
import pytest
from planted import ERRORS, patched, planted
from planted_error import Planted
from workplace import ROOT, check_the_copy, copied, outcome_of


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.name)
def test_each_can_be_planted(error: Planted) -> None:
    """Its old text is in the file, once; the file is Python before and after; its tests exist."""
    before = (ROOT / error.file).read_text(encoding="utf-8")
    after = patched(error, before)
    assert after != before
    compile(after, error.file, "exec")
    for test in error.tests:
        file, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / file).read_text(encoding="utf-8")


def test_names_are_names() -> None:
    assert len({error.name for error in ERRORS}) == len(ERRORS)


def test_an_error_whose_place_has_changed_is_refused_in_a_line() -> None:
    with pytest.raises(SystemExit, match="has its old text 0 times") as said:
        patched(Planted("this", "there.py", "old", "new", ()), "something else")
    assert "\n" not in str(said.value)


def test_the_table_of_numbers_is_that_of_the_files() -> None:
    assert numbers_of_errors.FILE.read_text(encoding="utf-8") == numbers_of_errors.table()


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with copied() as place:
        check_the_copy(place)
        yield place


@pytest.mark.long
@pytest.mark.parametrize("tests", sorted({error.tests for error in ERRORS}), ids=" ".join)
def test_without_an_error_nothing_fails(tests: tuple[str, ...], place: Path) -> None:
    assert not outcome_of(place, tests).killed


@pytest.mark.long
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.name)
def test_each_is_noticed(error: Planted, place: Path) -> None:
    with planted(error, place):
        assert outcome_of(place, error.tests).killed
