"""The pages of docs/: their code blocks, in order, and their tables.

`python tests/docs_pages.py` fills in the tables. It also writes what `normswap advise` reads of the
laboratory's table.

The words behind a block's language say how the block is run:

- `slow`: it takes long.
- `exit=2`: its command fails with this exit code, as it should.
- `file=NAME`: it is saved under this name, not run.
- `needs=PACKAGE`: the page's slow blocks are skipped where this package is missing.

A `text` block is what the block before it prints, with `...` for what varies.

Tables are filled in behind these marks:

- `<!-- from FILE -->`: the tables of that file, which a script wrote, each below its heading.
- `<!-- from FILE: PATTERN -->`: only the rows of these tables that the pattern matches.
- `<!-- options -->`: the options of all schemes, from their records.
- `<!-- ends -->`: where training ended, a task a row, from after_training.md.
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
# The ways that the table of ends compares, as after_training.md calls them, and their columns.
_WAYS = {
    "BatchNorm": "BatchNorm",
    "BatchNorm in eval mode": "BatchNorm in eval mode",
    "fresh GroupNorm, groups of 16": "fresh GroupNorm",
    "GroupNorm, gamma and beta copied, groups of 16": "GroupNorm, gamma and beta copied",
    "`groupnorm`": "`groupnorm`",
    "`groupnorm --relative-eps 0`": "`groupnorm --relative-eps 0`",
    "`skipinit`": "`skipinit`",
    "`frozen-bn`": "`frozen-bn`",
}
_BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.M | re.S)
_OPTIONS = re.compile(r"(<!-- options -->\n\n)((?:\|[^\n]*\n)*)")
_ENDS = re.compile(r"(<!-- ends -->\n\n)((?:\|[^\n]*\n)*)")
_TABLE = re.compile(r"<!-- from (\S+?)(?:: (.*))? -->\n\n((?:(?:\|[^\n]*|\*\*[^\n]*\*\*)\n\n?)*)")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Args:
        language: The first word behind the fence.
        marks: The other words behind the fence.
        text: The lines between the fences.
    """

    language: str
    marks: tuple[str, ...]
    text: str

    @property
    def slow(self) -> bool:
        """Whether the block takes long."""
        return "slow" in self.marks

    @property
    def exit_code(self) -> int:
        """The exit code that its command should have."""
        return int(self._value("exit") or 0)

    @property
    def file(self) -> str:
        """The name that the block is saved under; a block that is run has none."""
        return self._value("file")

    @property
    def needs(self) -> str:
        """A package that the block needs and that the tests do not install."""
        return self._value("needs")

    def _value(self, mark: str) -> str:
        """Return the value of a mark of the form `mark=value`, or an empty text."""
        for each in self.marks:
            name, sign, value = each.partition("=")
            if sign and name == mark:
                return value
        return ""

    def lines(self) -> list[str]:
        """Return the commands of a shell block, a line each."""
        joined = self.text.replace("\\\n", " ")
        return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    return blocks_in(page.read_text(encoding="utf-8"))


def blocks_in(text: str) -> list[Block]:
    """Return the fenced blocks of a text, in order."""
    found = _BLOCK.findall(text)
    return [Block(language, tuple(marks.split()), body) for language, marks, body in found]


def filled(text: str) -> str:
    """Return a page with the tables of the files that it names, and of the schemes' options."""
    with_tables = _TABLE.sub(_tables, text)
    with_ends = _ENDS.sub(lambda match: match[1] + ends(), with_tables)
    return _OPTIONS.sub(lambda match: match[1] + options(), with_ends)


def without_tables(text: str) -> str:
    """Return a page without what `filled` fills in."""
    return _OPTIONS.sub("", _ENDS.sub("", _TABLE.sub("", text)))


def _tables(match: re.Match[str]) -> str:
    """Return a mark, and behind it the tables of the file that it names."""
    lines = (ROOT / match[1]).read_text(encoding="utf-8").splitlines()
    pattern = re.compile(match[2] or "")
    mark = match[0].partition("\n")[0]
    return f"{mark}\n\n" + "\n".join([*_with_headings(lines, pattern), ""])


def _with_headings(lines: list[str], pattern: re.Pattern[str]) -> Iterator[str]:
    """Yield the lines of the tables among `lines`, each table below its heading, if it has one.

    A table has only the rows that the pattern matches; one without such a row is left out.
    """
    heading = ""
    for line, group in itertools.groupby(lines, lambda line: line.startswith("|") or line):
        if line is not True:
            if line.startswith("## "):
                heading = line.removeprefix("## ")
            continue

        head, rule, *rows = group
        chosen = [row for row in rows if pattern.search(row)]
        if not chosen:
            continue
        if heading:
            yield from (f"**{heading}**", "")
        yield from (head, rule, *chosen, "")


def options() -> str:
    """Return the table of the options of all schemes."""
    schemes_of: dict[Option, list[str]] = {}
    for scheme, record in TARGETS.items():
        for option in record.options:
            schemes_of.setdefault(option, []).append(f"`{scheme}`")

    lines = ["| option | of | default | what it does |", "|---|---|---|---|"]
    for option, names in schemes_of.items():
        help_text = option.help.replace("|", "\\|")
        cells = (f"`{flag(option.name)}`", ", ".join(names), f"`{option.default}`", help_text)
        lines.append(f"| {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in lines)


def ends() -> str:
    """Return the table of where training ended: a task a row, a way a column, in percent."""
    columns = ["task", "measure", "before", *_WAYS.values()]
    lines = [_row(columns), "|---" * len(columns) + "|"]
    heading = measure = ""
    ended: dict[str, str] = {}
    before = ""
    for line in (ROOT / _MEASURED).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("## "):
            heading = line.removeprefix("## ")
            ended = {}
        elif line.startswith("| task |"):
            measure = cells[3].partition(":")[0]
        elif len(cells) == 7 and cells[1] in _WAYS:
            # A way that was refused has the reason where its rate would stand.
            ended[cells[1]] = cells[5] or "refused"
            if cells[1] == "`skipinit`":
                # It is exact, so it begins where the source is.
                before = cells[3]
            if len(ended) == len(_WAYS):
                lines.append(_row([heading, measure, before, *(ended[way] for way in _WAYS)]))
    return "".join(f"{line}\n" for line in lines)


def _row(cells: list[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def after_training() -> str:
    """Return the JSON that `normswap advise` reads: where training ended, by task and target."""
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
