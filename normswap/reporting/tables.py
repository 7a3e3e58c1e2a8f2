"""The tables of the report: plain text, which the page escapes, or HTML that is marked as such."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from markupsafe import Markup

from normswap.reporting.records import COLOURS, BlockFact, Facts, NormFact

MINUS = "\N{MINUS SIGN}"
_CODE = Markup("<code>{}</code>")
_QUIET = Markup('<span class="quiet">{}</span>')


def small(value: float) -> str:
    """Write a number: 0.25, or with a power of ten where it is small."""
    if not math.isfinite(value) or not value:
        return "0" if not value else "not finite"
    if 1e-2 <= value < 1e4:
        return f"{value:.3g}"
    lead, _, power = f"{value:.1e}".partition("e")
    return Markup("{}·10<sup>{}</sup>").format(lead, str(int(power)).replace("-", MINUS))


def share(value: float | None) -> str:
    """Write a fraction in percent."""
    return "" if value is None else f"{100 * value:.4g} %"


def kinds(facts: Facts) -> Iterator[tuple[str, str, str, str]]:
    """Give the cells for each kind of block, in order of first appearance, between the norms outside of blocks.

    They are: the blocks, how many, their skip, and their norms with roles and what happened to them.
    """
    if facts.before:
        yield _QUIET.format("before the blocks"), "", "", _described(facts.before)
    alike: dict[tuple[str, Markup], list[int]] = {}
    for i, block in enumerate(facts.blocks):
        alike.setdefault((block.skip, _described(block.norms, block.path)), []).append(i)
    for (skip, words), members in alike.items():
        yield _runs(members, facts.blocks), str(len(members)), skip, words
    if facts.elsewhere:
        yield _QUIET.format("elsewhere"), "", "", _described(facts.elsewhere)


def _runs(members: Sequence[int], blocks: Sequence[BlockFact]) -> Markup:
    """Return the paths of these blocks, neighbours in one stage as `first … last`."""
    runs: list[list[int]] = []
    for i in members:
        if runs and runs[-1][-1] == i - 1 and blocks[i].stage == blocks[i - 1].stage:
            runs[-1].append(i)
        else:
            runs.append([i])
    names = ([run[0], run[-1]] if len(run) > 1 else run for run in runs)
    return Markup(", ").join(Markup(" … ").join(_CODE.format(blocks[i].path) for i in run) for run in names)


def _described(norms: Sequence[NormFact], block: str = "") -> Markup:
    """Return the norms as seen from their block."""
    prefix = block.partition("+")[0] + "." if block else ""
    line = Markup('<p><code>{}</code> <span class="role c{}">{}</span> {}</p>')
    sentences = [norm.said.replace(f" {prefix}", " ") if prefix else norm.said for norm in norms]
    return Markup("").join(
        line.format(norm.path.removeprefix(prefix), COLOURS[norm.role], norm.role, text)
        for norm, text in zip(norms, sentences, strict=True)
    )
