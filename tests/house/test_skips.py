"""A test that is skipped for a reason that nobody has listed fails."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]


@pytest.mark.parametrize(("reason", "outcome"), [("chromium is not installed", "skipped"), ("no time today", "failed")])
def test_only_known_skips_pass(reason: str, outcome: str, pytester: pytest.Pytester) -> None:
    pytester.makeconftest((Path(__file__).parents[1] / "conftest.py").read_text())
    pytester.makepyfile(f"import pytest\n\ndef test_one():\n    pytest.skip({reason!r})\n")
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(**{outcome: 1})
