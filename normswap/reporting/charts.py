"""Charts as inline SVG: axes with ticks, stage bands, a legend, a tooltip per mark. Colours are classes that CSS fills.

Every chart is 480 units wide, so that its text stays readable on a page 400 pixels wide. The classes `c1` .. `c5` stand
for the colour-blind-safe palette of Okabe & Ito 2008; series also differ by their marks, never by colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

WIDTH, HEIGHT = 480, 290
_LEFT, _RIGHT, _BOTTOM = 58, 468, 236
_CHAR = 6.6  # width of an average character at the charts' font size
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Series:
    """Marks at (x, y), each with a tooltip.

    Args:
        name: what the legend calls it.
        points: (x, y, tooltip); a y that is not finite, or not positive on a log axis, is drawn as a triangle at the
            edge of the chart.
        colour: 1 .. 5.
        mark: `dot`, `ring` (large and hollow, so that a dot can lie in it), `cross` or `none`.
        line: `solid`, `dashed` or nothing between the marks.
        drop: a thin line from each mark to the zero line.
    """

    name: str
    points: Sequence[tuple[float, float, str]]
    colour: int = 1
    mark: str = "dot"
    line: str = ""
    drop: bool = False


@dataclass(frozen=True)
class Rule:
    """A horizontal reference line."""

    name: str
    y: float


@dataclass(frozen=True)
class Axis:
    """Values to pixels, with the ticks that lie in between."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    log: bool = False

    def at(self, value: float) -> float:
        """The pixel of `value`; what lies outside, or is not finite, comes to the edge."""
        if math.isnan(value):
            return self.end
        low, high = self.low, self.high
        value = min(max(value, low), high)
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def holds(self, value: float) -> bool:
        return math.isfinite(value) and self.low <= value <= self.high

    def label(self, value: float) -> str:
        if not self.log or 1e-3 < value < 1e4:
            return number(value)
        power = math.floor(math.log10(value) + 1e-9)
        lead = value / 10**power
        return ("" if lead < 1.5 else f"{lead:.0f}·") + "10" + str(power).translate(_SUPERSCRIPT)


def number(value: float) -> str:
    """Four digits where it is not a large whole number, and a true minus sign."""
    if 1000 <= abs(value) < 1e7:
        return f"{value:,.0f}".replace("-", "\N{MINUS SIGN}")
    return f"{0.0 if abs(value) < 1e-300 else value:.4g}".replace("-", "\N{MINUS SIGN}")


def linear(values: Sequence[float], start: float, end: float, *, zero: bool = False, most: int = 6) -> Axis:
    """An axis from tick to tick around the finite `values` (and 0)."""
    known = [v for v in values if math.isfinite(v)] + ([0.0] if zero else [])
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        low, high = low - 0.5, high + 0.5
    raw = (high - low) / (most - 1)
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(i * step for i in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], start, end, ticks)


def logarithmic(values: Sequence[float], start: float, end: float) -> Axis:
    """An axis from decade to decade around the positive `values`."""
    known = [v for v in values if math.isfinite(v) and v > 0] or [1.0]
    low, high = math.log10(min(known)), math.log10(max(known))
    first, last = math.floor(low + 1e-9), max(math.ceil(high - 1e-9), math.floor(low + 1e-9) + 1)
    step = max(1, math.ceil((last - first) / 6))
    ticks = [10.0**p for p in range(first, last + 1, step)]
    if last - first <= 2:
        ticks = sorted({m * 10.0**p for p in range(first, last) for m in (1, 2, 5)} | {10.0**last})
    return Axis(10.0**first, 10.0**last, start, end, tuple(ticks), log=True)


def over_blocks(
    label: str,
    series: Sequence[Series],
    *,
    y_label: str,
    stages: Sequence[str],
    log: bool = False,
    zero: bool = False,
    rules: Sequence[Rule] = (),
) -> str:
    """Values per residual block, in order of the forward pass; x counts the blocks from 0.

    Args:
        label: what a screen reader says.
        stages: the stage of each block, drawn as bands.
        log: whether the y axis is logarithmic; zero: whether it includes 0.
    """
    shown = [s for s in series if s.points]
    keys, top = _legend([*shown, *rules])
    values = [y for s in shown for _, y, _ in s.points] + [rule.y for rule in rules]
    y = logarithmic(values, _BOTTOM, top) if log else linear(values, _BOTTOM, top, zero=zero)
    x = Axis(-0.5, max(len(stages), 1) - 0.5, _LEFT, _RIGHT, ())
    body = [_bands(stages, x, top), _y_axis(y, y_label), keys]
    body += [
        f'<line class="rule" x1="{_LEFT}" x2="{_RIGHT}" y1="{_f(y.at(r.y))}" y2="{_f(y.at(r.y))}">'
        f"<title>{escape(r.name)}</title></line>"
        for r in rules
    ]
    body += [_series(s, x, y) for s in shown]
    return _svg(label, [*body, _x_label("residual block, in order of the forward pass")])


def histogram(
    label: str, edges: Sequence[float], counts: Sequence[int], *, colour: int, x_label: str, y_label: str
) -> str:
    """Counts between the edges, from 0 up."""
    top = 30
    y = linear([float(c) for c in counts], _BOTTOM, top, zero=True, most=5)
    ticks = linear(edges, 0, 1, most=7).ticks
    x = Axis(edges[0], edges[-1], _LEFT, _RIGHT, tuple(t for t in ticks if edges[0] <= t <= edges[-1]))
    bars = []
    for count, low, high in zip(counts, edges, edges[1:], strict=False):
        if count:
            left, right, peak = x.at(low), x.at(high), y.at(count)
            bars.append(
                f'<rect class="bar" x="{_f(left + 0.5)}" y="{_f(peak)}" width="{_f(max(right - left - 1, 0.5))}" '
                f'height="{_f(_BOTTOM - peak)}"><title>{count} between {number(low)} and {number(high)}</title></rect>'
            )
    marks = "".join(
        f'<text class="tick" text-anchor="middle" x="{_f(x.at(t))}" y="{_BOTTOM + 17}">{number(t)}</text>'
        f'<line class="axis" x1="{_f(x.at(t))}" x2="{_f(x.at(t))}" y1="{_BOTTOM}" y2="{_BOTTOM + 4}"/>'
        for t in x.ticks
    )
    base = f'<line class="axis" x1="{_LEFT}" x2="{_RIGHT}" y1="{_BOTTOM}" y2="{_BOTTOM}"/>'
    bar_group = f'<g class="c{colour}">{"".join(bars)}</g>'
    return _svg(label, [_y_axis(y, y_label), bar_group, base, marks, _x_label(x_label)])


def badge(colour: int, inside: str) -> str:
    """A disc on its own, for legends outside of a chart: `empty`, `full`, or around a letter."""
    look = "dot" if inside == "full" else "ring"
    letter = f'<text class="letter" x="9" y="13" text-anchor="middle">{escape(inside)}</text>' * (len(inside) == 1)
    return (
        f'<svg class="badge-disc c{colour}" viewBox="0 0 18 18" width="18" height="18" aria-hidden="true">'
        f'<circle class="{look}" cx="9" cy="9" r="7.6"/>{letter}</svg>'
    )


def _svg(label: str, body: Sequence[str]) -> str:
    inside = "\n".join(part for part in body if part)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">\n{inside}\n</svg>'
    )


def _y_axis(y: Axis, label: str) -> str:
    parts = [f'<text class="label" x="4" y="14">{escape(label)}</text>']
    for tick in y.ticks:
        at = _f(y.at(tick))
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(
            f'<text class="tick" text-anchor="end" x="{_LEFT - 7}" y="{_f(y.at(tick) + 4)}">{y.label(tick)}</text>'
        )
    return "".join(parts)


def _x_label(text: str) -> str:
    middle = (_LEFT + _RIGHT) / 2
    return f'<text class="label" text-anchor="middle" x="{middle:.0f}" y="{HEIGHT - 8}">{escape(text)}</text>'


def _bands(stages: Sequence[str], x: Axis, top: float) -> str:
    """One band per stage, every other one shaded, its name below as far as it fits."""
    parts, start = [], 0
    for i, (stage, group) in enumerate(groupby(stages)):
        count = len(list(group))
        left, right = x.at(start - 0.5), x.at(start + count - 0.5)
        shade = "band" if i % 2 == 0 else "band off"
        parts.append(
            f'<rect class="{shade}" x="{_f(left)}" y="{_f(top)}" width="{_f(right - left)}" '
            f'height="{_f(_BOTTOM - top)}"/>'
        )
        name = _fit(stage, right - left)
        if name:
            parts.append(
                f'<text class="tick" text-anchor="middle" x="{_f((left + right) / 2)}" y="{_BOTTOM + 18}">'
                f"{escape(name)}<title>{escape(stage)}</title></text>"
            )
        start += count
    return "".join(parts)


def _fit(name: str, room: float) -> str:
    """`name`, or its end, or nothing, in `room` pixels."""
    if len(name) * _CHAR <= room:
        return name
    last = name.rpartition(".")[2]
    return last if len(last) * _CHAR <= room else ""


def _legend(entries: Sequence[Series | Rule]) -> tuple[str, float]:
    """The keys in rows below the y label, and where the plot begins."""
    left, row, parts = 6.0, 31.0, []
    for entry in entries:
        room = 28 + len(entry.name) * _CHAR
        if left > 6 and left + room > WIDTH:
            left, row = 6.0, row + 17
        parts.append(f'<g transform="translate({_f(left)} {_f(row)})">{_key(entry)}')
        parts.append(f'<text class="key" x="23" y="4">{escape(entry.name)}</text></g>')
        left += room + 10
    return "".join(parts), row + 17 if entries else 26.0


def _key(entry: Series | Rule) -> str:
    if isinstance(entry, Rule):
        return '<line class="rule" x1="0" x2="18" y1="0" y2="0"/>'
    line = f'<line class="line {entry.line}" x1="0" x2="18" y1="0" y2="0"/>' if entry.line else ""
    return f'<g class="c{entry.colour}">{line}{_mark(entry.mark, 9, 0)}</g>'


def _series(series: Series, x: Axis, y: Axis) -> str:
    places = [(x.at(a), y.at(b), b, tip) for a, b, tip in series.points]
    parts = []
    if series.line and len(places) > 1:
        path = " ".join(f"{_f(a)},{_f(b)}" for a, b, _, _ in places)
        parts.append(f'<polyline class="line {series.line}" points="{path}"/>')
    if series.drop:
        zero = y.at(0)
        parts += [f'<line class="drop" x1="{_f(a)}" x2="{_f(a)}" y1="{_f(zero)}" y2="{_f(b)}"/>' for a, b, *_ in places]
    for a, b, value, tip in places:
        inside = y.holds(value)
        mark = _mark(series.mark if inside else ("down" if value < y.low else "up"), a, b)
        parts.append(f"<g>{mark}<title>{escape(tip)}</title></g>")
    return f'<g class="c{series.colour}">{"".join(parts)}</g>'


def _mark(mark: str, x: float, y: float) -> str:
    if mark == "dot":
        return f'<circle class="dot" cx="{_f(x)}" cy="{_f(y)}" r="4"/>'
    if mark == "ring":
        return f'<circle class="ring" cx="{_f(x)}" cy="{_f(y)}" r="6"/>'
    if mark == "cross":
        return f'<path class="cross" d="M{_f(x - 4)} {_f(y - 4)}l8 8m0 -8l-8 8"/>'
    if mark in ("up", "down"):
        tip, base = (y + 1, y + 9) if mark == "up" else (y - 1, y - 9)
        return f'<path class="dot" d="M{_f(x)} {_f(tip)}L{_f(x - 5)} {_f(base)}L{_f(x + 5)} {_f(base)}Z"/>'
    return ""


def _f(value: float) -> str:
    return f"{value:.1f}"
