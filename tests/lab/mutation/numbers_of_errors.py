"""How many errors the tests noticed: the planted ones and every drawing, in one table, each at its commit.

python tests/lab/mutation/numbers_of_errors.py        # writes numbers.md from planted.md and drawn_*.md
"""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
FILE = HERE / "numbers.md"
_COMMIT = re.compile(r"commit (\w+ \(\w+\)), (\d{4}-\d\d-\d\d)")
_PLANTED = re.compile(r"^(\d+) of (\d+) were noticed", re.MULTILINE)
_LEFT_OUT = re.compile(r"; (\d+) were not planted")
_DRAWN = re.compile(r"^\| all \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", re.MULTILINE)


def table() -> str:
    """One row for each file of results, in Markdown."""
    lines = [
        "# Errors noticed", "",
        "Command: `python tests/lab/mutation/numbers_of_errors.py`", "",
        "Equivalent: the program says and writes the same with it. Share: of those tried that are not equivalent.", "",
        "| errors | there are | tried | noticed | equivalent | survived | share, % | commit | date |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for file in [HERE / "planted.md", *sorted(HERE.glob("drawn_*.md"))]:
        total, tried, noticed, same = numbers(text := file.read_text(encoding="utf-8"))
        commit, date = _found(_COMMIT, text).groups()
        share = 100 * noticed / (tried - same)
        cells = (f"[{file.stem}]({file.name})", total, tried, noticed, same, tried - same - noticed, f"{share:.1f}",
                 commit, date)  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, ""])


def numbers(text: str) -> tuple[int, int, int, int]:
    """Of a file of results: how many errors there are, were tried, were noticed, and are equivalent."""
    if drawn := _DRAWN.search(text):
        total, tried, noticed, same, _ = map(int, drawn.groups())
        return total, tried, noticed, same
    noticed, tried = map(int, _found(_PLANTED, text).groups())
    left_out = _LEFT_OUT.search(text)
    return tried + (int(left_out[1]) if left_out else 0), tried, noticed, 0


def _found(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    found = pattern.search(text)
    if found is None:
        raise SystemExit(f"a file of results has no {pattern.pattern}")
    return found


if __name__ == "__main__":
    FILE.write_text(table(), encoding="utf-8")
