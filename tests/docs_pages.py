"""The pages of docs/: their code blocks, in order, and their tables. `python tests/docs_pages.py`
fills in the tables.

What stands behind a block's language says how it is run: `slow` (it takes long), `exit=2` (the
command fails, and shall), `file=NAME` (it is saved, not run), `needs=PACKAGE` (without which the
page's slow blocks are skipped). A `text` block is what the block before it prints, `...` for what
varies. Behind `<!-- from FILE -->` stand the tables of that file, which a script wrote, each below
its heading; `<!-- from FILE: PATTERN -->` takes the rows that it fits. The table behind `<!--
options -->` has the options of all schemes, from their records. The same call writes what `normswap
advise` reads of the laboratory's table.
"""

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normswap.errors import flag
from normswap.schemes.catalogue import TARGETS
from normswap.schemes.scheme import Option

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
WITH_TABLES = [*PAGES, ROOT / "README.md"]
# What `normswap advise` reads, and the laboratory's table that it is made from.
AFTER_TRAINING = ROOT / "normswap" / "analysis" / "after_training.json"
_MEASURED = "tests/lab/benchmarks/after_training.md"
_ADVISED = re.compile(
    r"^. (labels|two|preact|depthwise|private) . (BatchNorm . 0|"
    r"`(groupnorm|groupnorm --relative-eps 0|skipinit|frozen-bn|tune)` .)"
)
_BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.M | re.S)
_OPTIONS = re.compile(r"(<!-- options -->\n\n)((?:\|[^\n]*\n)*)")
_TABLE = re.compile(r"<!-- from (\S+?)(?:: (.*))? -->\n\n((?:(?:\|[^\n]*|\*\*[^\n]*\*\*)\n\n?)*)")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Args:
        language: the first word behind the fence.
        marks: the others.
    """

    language: str
    marks: tuple[str, ...]
    text: str

    @property
    def slow(self) -> bool:
        return "slow" in self.marks

    @property
    def exit_code(self) -> int:
        return int(self._said("exit") or 0)

    @property
    def file(self) -> str:
        """What it is to be saved as, if it is not to be run."""
        return self._said("file")

    @property
    def needs(self) -> str:
        """A package without which it does not run, and which the tests do without."""
        return self._said("needs")

    def _said(self, mark: str) -> str:
        return next((one.partition("=")[2] for one in self.marks if one.startswith(f"{mark}=")), "")

    def lines(self) -> list[str]:
        joined = self.text.replace("\\\n", " ")
        return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def blocks(page: Path) -> list[Block]:
    return blocks_in(page.read_text(encoding="utf-8"))


def blocks_in(text: str) -> list[Block]:
    found = _BLOCK.findall(text)
    return [Block(language, tuple(marks.split()), text) for language, marks, text in found]


def filled(text: str) -> str:
    """A page with the tables of the files that it names."""

    def tables(match: re.Match[str]) -> str:
        lines = (ROOT / match[1]).read_text(encoding="utf-8").splitlines()
        marker = match[0].partition("\n")[0]
        return f"{marker}\n\n" + "\n".join([*_with_headings(lines, re.compile(match[2] or "")), ""])

    return _OPTIONS.sub(lambda match: match[1] + options(), _TABLE.sub(tables, text))


def without_tables(text: str) -> str:
    """A page without what `filled` fills in."""
    return _OPTIONS.sub("", _TABLE.sub("", text))


def _with_headings(lines: list[str], pattern: re.Pattern[str]) -> Iterator[str]:
    """The tables among some lines, each below its heading, if it has one, of the rows that the
    pattern fits.
    """
    heading = ""
    for line, group in itertools.groupby(lines, lambda line: line.startswith("|") or line):
        if line is not True:
            heading = line.removeprefix("## ") if line.startswith("## ") else heading
            continue
        head, rule, *rows = group
        chosen = [row for row in rows if pattern.search(row)]
        if chosen:
            yield from (f"**{heading}**", "") if heading else ()
            yield from (head, rule, *chosen, "")


def options() -> str:
    schemes_of: dict[Option, list[str]] = {}
    for scheme, record in TARGETS.items():
        for option in record.options:
            schemes_of.setdefault(option, []).append(f"`{scheme}`")
    rows = [
        (
            f"`{flag(option.name)}`",
            ", ".join(names),
            f"`{option.default}`",
            option.help.replace("|", "\\|"),
        )
        for option, names in schemes_of.items()
    ]
    head = [("option", "of", "default", "what it does"), ("---",) * 4]
    return "".join("| " + " | ".join(row) + " |\n" for row in head + rows).replace(
        "| --- | --- | --- | --- |", "|---|---|---|---|"
    )


def after_training() -> str:
    """What `normswap advise` reads: by task, where training ended for each target it may name."""
    tasks: dict[str, dict[str, Any]] = {}
    heading = ""
    lines = (ROOT / _MEASURED).read_text(encoding="utf-8").splitlines()
    for line in _with_headings(lines, _ADVISED):
        if line.startswith("**"):
            heading = line.strip("*")
        elif _ADVISED.search(line):
            cells = [cell.strip(" `") for cell in line.split("|")]
            _, task, target, _rate, _at_once, _after_a_tenth, end, *_ = cells
            ended = tasks.setdefault(task, {"about": heading, "ended": {}})["ended"]
            ended[target.replace("BatchNorm", "batchnorm")] = end
    return json.dumps({"from": _MEASURED, "tasks": tasks}, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    AFTER_TRAINING.write_text(after_training(), encoding="utf-8")
    for path in WITH_TABLES:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
