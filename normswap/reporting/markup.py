"""Pieces of HTML. Arguments are plain text and escaped, unless said otherwise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

ALPHA, TIMES, MINUS = "\N{GREEK SMALL LETTER ALPHA}", "\N{MULTIPLICATION SIGN}", "\N{MINUS SIGN}"


def section(title: str, *parts: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n" + "\n".join(part for part in parts if part) + "\n</section>\n"


def figure(title: str, chart: str, caption: str) -> str:
    return f"<figure>\n<h3>{escape(title)}</h3>\n{chart}\n<figcaption>{escape(caption)}</figcaption>\n</figure>"


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: str = "") -> str:
    """A table with a caption; empty columns are dropped.

    Args:
        rows: of HTML; the first cell of each is its header.
        numbers: names of the columns that are set right, with commas in between.
    """
    cells = [list(row) for row in rows]
    kept = [i for i in range(len(columns)) if any(row[i] for row in cells)]
    columns, rows = [columns[i] for i in kept], [[row[i] for i in kept] for row in cells]
    right = [' class="n"' if name in numbers.split(",") else "" for name in columns]
    head = "".join(f'<th scope="col"{cls}>{escape(name)}</th>' for name, cls in zip(columns, right, strict=True))
    body = []
    for first, *rest in rows:
        line = "".join(f"<td{cls}>{cell}</td>" for cell, cls in zip(rest, right[1:], strict=True))
        body.append(f'<tr><th scope="row"{right[0]}>{first}</th>{line}</tr>')
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n"
        + "\n".join(body)
        + "\n</tbody></table></div>"
    )


def folded(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def small(value: float) -> str:
    """A number as HTML: 0.25, or with a power of ten where it is small."""
    if not math.isfinite(value) or not value:
        return "0" if not value else "not finite"
    if 1e-2 <= value < 1e4:
        return f"{value:.3g}"
    lead, _, power = f"{value:.1e}".partition("e")
    return f"{lead}·10<sup>{str(int(power)).replace('-', MINUS)}</sup>"


def share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.4g} %"
