"""Quick commands fit terminals of 80 and 120 columns, with whole numbers, and are not filled up in a pipe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import widths

NUMBER = re.compile(r"(?<![\w.])\d[\d.,]*(?![\w.])")
SPARED = ("inspect demo",)  # columns that are left out at 80
QUICK = (
    "", "--help", "convert --help", "inspect demo",
    "convert demo --to skipinit --dry-run", "advise demo --batch-size 2",
    "schemes", "schemes groupnorm", "decay demo", "recipes", "inspect nothing", "convert demo --to nothing",
)  # fmt: skip


@pytest.mark.parametrize("words", QUICK)
def test_lines_fit(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    narrow, wide, piped = (widths.output(words.split(), columns) for columns in widths.MODES)
    for text, columns in zip((narrow, wide, piped), widths.MODES, strict=True):
        assert widths.faults(text, columns) == []
    for text in (wide,) if words in SPARED else (narrow, wide):
        assert {*NUMBER.findall(piped)} <= {*NUMBER.findall(text)}  # a number that is cut is another one


def test_what_does_not_fit_is_found() -> None:
    assert widths.faults("a" * 81, 80) == ["a" * 81]
    assert widths.faults("next: " + "a" * 99, 80) == []
    assert widths.faults("a  \nb", None) == ["a  "]
