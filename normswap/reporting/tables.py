"""The report's tables as rows of cells: plain text, which the page escapes, or HTML that is marked as such."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from normswap.reporting.records import COLOURS, BlockFact, Facts, NormFact
from normswap.surgery.report import Report

TIMES, MINUS = "\N{MULTIPLICATION SIGN}", "\N{MINUS SIGN}"
_CODE = Markup("<code>{}</code>")
_QUIET = Markup('<span class="quiet">{}</span>')


@dataclass(frozen=True)
class Column:
    """A column of a table; numbers are set right."""

    name: str
    index: int
    number: bool


class Table:
    """A table with a caption; the first cell of each row is its header.

    Args:
        numbers: names of the columns that hold numbers.
    """

    def __init__(
        self, caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str] = ()
    ) -> None:
        self.caption, self.rows = caption, [list(row) for row in rows]
        every = [Column(name, i, name in numbers) for i, name in enumerate(columns)]
        self.kept = [column for column in every if any(row[column.index] for row in self.rows)]  # empty ones go


def small(value: float) -> str:
    """A number: 0.25, or with a power of ten where it is small."""
    if not math.isfinite(value) or not value:
        return "0" if not value else "not finite"
    if 1e-2 <= value < 1e4:
        return f"{value:.3g}"
    lead, _, power = f"{value:.1e}".partition("e")
    return Markup("{}·10<sup>{}</sup>").format(lead, str(int(power)).replace("-", MINUS))


def share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.4g} %"


def logits(report: Report) -> Table:
    """The errors at the end; on noise, what an approximate result answers says nothing."""
    columns = ("precision", "input", "relative L2", "largest", "same answers", "allowed")
    rows = [
        (
            e.precision, TIMES.join(map(str, e.size)), small(e.relative_l2), small(e.largest),
            share(e.agreement) if report.exact else "",
            small(report.tolerance[e.precision]) if report.exact and e.precision in report.tolerance else "",
        )
        for e in report.logits
    ]  # fmt: skip
    return Table("Errors at the logits", columns, rows, columns[1:])


def sites(report: Report) -> Table:
    """The errors at the output of every block."""
    columns = ("block", "relative L2", "largest", "cosine")
    rows = [(_CODE.format(e.site), small(e.relative_l2), small(e.largest), f"{e.cosine:.9f}") for e in report.sites]
    return Table("Errors at the blocks' outputs", columns, rows, columns[1:])


def alphas(facts: Facts) -> Table:
    """The scalars: what they are, and what they were."""
    columns = ("block", "seat", "alpha", "when converted", "bias")
    rows = [
        (_CODE.format(a.block), _CODE.format(a.seat), _figure(a.value), _figure(a.planned), _figure(a.bias))
        for a in facts.alphas
    ]
    return Table("Scalars at the ends of the branches", columns, rows, columns[2:])


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def anatomy(facts: Facts) -> Table:
    """One row per kind of block, in order of first appearance, between the norms outside of blocks."""
    columns = ("blocks", "number", "skip", "norms, their roles and what happened to them")
    return Table("Blocks and norms of the source", columns, _kinds(facts), ("number",))


def _kinds(facts: Facts) -> Iterator[Sequence[str]]:
    if facts.before:
        yield _QUIET.format("before the blocks"), "", "", _described(facts.before)
    kinds: dict[tuple[str, Markup], list[int]] = {}
    for i, block in enumerate(facts.blocks):
        kinds.setdefault((block.skip, _described(block.norms, block.path)), []).append(i)
    for (skip, words), members in kinds.items():
        yield _runs(members, facts.blocks), str(len(members)), skip, words
    if facts.elsewhere:
        yield _QUIET.format("elsewhere"), "", "", _described(facts.elsewhere)


def _runs(members: Sequence[int], blocks: Sequence[BlockFact]) -> Markup:
    """The paths of these blocks, neighbours in one stage as `first … last`."""
    runs: list[list[int]] = []
    for i in members:
        if runs and runs[-1][-1] == i - 1 and blocks[i].stage == blocks[i - 1].stage:
            runs[-1].append(i)
        else:
            runs.append([i])
    names = ([run[0], run[-1]] if len(run) > 1 else run for run in runs)
    return Markup(", ").join(Markup(" … ").join(_CODE.format(blocks[i].path) for i in run) for run in names)


def _described(norms: Sequence[NormFact], block: str = "") -> Markup:
    """The norms as seen from their block."""
    prefix = block.partition("+")[0] + "." if block else ""
    line = Markup('<p><code>{}</code> <span class="role c{}">{}</span> {}</p>')
    said = [norm.said.replace(f" {prefix}", " ") if prefix else norm.said for norm in norms]
    return Markup("").join(
        line.format(norm.path.removeprefix(prefix), COLOURS[norm.role], norm.role, text)
        for norm, text in zip(norms, said, strict=True)
    )
