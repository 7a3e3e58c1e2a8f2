"""Charts as SVG inside the page, drawn by matplotlib: stage bands, a legend, a tooltip for each mark.

They are drawn in the light colours of `report.css` and then refer to its variables, so that they follow the page to
dark. Every chart is 480 units wide, so that its text stays readable on a page 400 pixels wide. The palette is that of
Okabe & Ito 2008; series also differ by their marks, never by colour alone.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from html import escape
from importlib import resources
from itertools import groupby
from typing import Literal, NamedTuple

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

STYLE = resources.files("normswap.reporting").joinpath("report.css").read_text(encoding="utf-8")
LIGHT: dict[str, str] = dict(re.findall(r"--([\w-]+): (#\w{6})", STYLE.partition("}")[0]))
_WIDTH, _HEIGHT = 480, 290
_CHARACTER = 6.6 / 410  # of an average one at the size of the ticks, as a part of the axis
_DEPTH = "residual block, in order of the forward pass"


class Mark(NamedTuple):
    """How a mark looks, in matplotlib's words."""

    marker: str
    size: float
    fill: Literal["full", "none"] = "full"
    edge: float = 1.0


_MARKS = {"dot": Mark("o", 7), "ring": Mark("o", 12, "none", 2), "cross": Mark("x", 8, edge=2.2)}
_BELOW, _ABOVE = Mark("v", 9), Mark("^", 9)
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Series:
    """Marks at (x, y), each with a tooltip.

    Args:
        name: what the legend calls it.
        points: (x, y, tooltip); a y that is not finite, or not positive on a log axis, is drawn as a triangle at the
            edge of the chart.
        colour: 1 .. 5.
        mark: `dot`, `ring` (large and hollow, so that a dot can lie in it) or `cross`.
        line: `solid`, `dashed` or `none` between the marks.
        drop: a thin line from each mark to the zero line.
    """

    name: str
    points: Sequence[tuple[float, float, str]]
    colour: int = 1
    mark: str = "dot"
    line: str = "none"
    drop: bool = False


@dataclass(frozen=True)
class Rule:
    """A horizontal reference line."""

    name: str
    y: float


class Chart:
    """A figure of one panel, whose artists may have tooltips."""

    def __init__(self, x_label: str, y_label: str) -> None:
        with _styled():
            self.figure = Figure((_WIDTH / 72, _HEIGHT / 72), layout="constrained")
            self.axes = self.figure.subplots()
        self.axes.set(xlabel=x_label, ylabel=y_label)
        self.axes.grid(axis="y")
        self.tips: list[str] = []

    def tip(self, artist: Artist, text: str) -> None:
        """Give an artist a tooltip."""
        artist.set_gid(f"tip-{len(self.tips)}")
        self.tips.append(text)

    def scale(self, values: Sequence[float], *, log: bool = False) -> tuple[float, float]:
        """Let the y axis hold the finite values, from tick to tick; gives its ends."""
        known = [value for value in values if math.isfinite(value) and (value > 0 or not log)] or [1.0]
        if log:
            first = math.floor(math.log10(min(known)) + 1e-9)
            last = max(math.ceil(math.log10(max(known)) - 1e-9), first + 1)
            self.axes.set_yscale("log")
            self.axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if last - first <= 2 else (1,), numticks=8))
            self.axes.yaxis.set_minor_locator(NullLocator())
            ends = (10.0**first, 10.0**last)
        else:
            low, high = min(known), max(known)
            room = 0.5 if high - low <= 1e-12 * max(abs(low), abs(high)) else 0.0
            ticks = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(low - room, high + room)
            self.axes.yaxis.set_major_locator(FixedLocator(list(ticks)))
            ends = (min(float(ticks[0]), low), max(float(ticks[-1]), high))
        self.axes.yaxis.set_major_formatter(lambda value, _: power(value) if log else number(value))
        self.axes.set_ylim(ends)
        return ends

    def draw(self, series: Series) -> None:
        """Draw its line, its marks, and its key in the legend."""
        colour, look = LIGHT[f"c{series.colour}"], _MARKS[series.mark]
        low, high = self.axes.get_ylim()
        x = [x for x, _, _ in series.points]
        y = [high if math.isnan(y) else min(max(y, low), high) for _, y, _ in series.points]
        self.axes.plot(x, y, color=colour, linestyle=series.line, linewidth=1.4, alpha=0.6)
        if series.drop:
            self.axes.vlines(x, 0, y, color=colour, linewidth=1.6, alpha=0.55)
        for at, place, (_, value, text) in zip(x, y, series.points, strict=True):
            inside = math.isfinite(value) and low <= value <= high
            mark = look if inside else _BELOW if value < low else _ABOVE
            self.tip(self._plot([at], [place], mark, color=colour, zorder=3), text)
        self._plot([], [], look, color=colour, linestyle=series.line, label=series.name)

    def _plot(
        self, x: Sequence[float], y: Sequence[float], mark: Mark, *, color: str, linestyle: str = "none",
        label: str = "", zorder: int = 2,
    ) -> Artist:  # fmt: skip
        return self.axes.plot(
            x, y, color=color, linestyle=linestyle, label=label, zorder=zorder, clip_on=False,
            marker=mark.marker, markersize=mark.size, fillstyle=mark.fill, markeredgewidth=mark.edge,
        )[0]  # fmt: skip

    def bands(self, stages: Sequence[str]) -> None:
        """Draw a band for each stage, every other one shaded, its name below as far as it fits."""
        start, middles, names = 0, [], []
        for shaded, (stage, blocks) in zip(itertools.cycle((True, False)), groupby(stages)):
            count = len(list(blocks))
            if shaded:
                self.axes.axvspan(start - 0.5, start + count - 0.5, facecolor=LIGHT["band"], linewidth=0, zorder=0)
            room = count / len(stages) / _CHARACTER
            names.append(next((name for name in (stage, stage.rpartition(".")[2]) if len(name) <= room), ""))
            middles.append(start + (count - 1) / 2)
            start += count
        self.axes.set_xticks(middles, names)
        self.axes.set_xlim(-0.5, max(len(stages), 1) - 0.5)
        for label, (stage, _) in zip(self.axes.get_xticklabels(), groupby(stages), strict=True):
            self.tip(label, stage)

    def svg(self, label: str) -> str:
        """Write it as an element of the page: no declarations, no sizes, the page's fonts and colours, its tooltips."""
        written = io.StringIO()
        with _styled(label):
            names = self.axes.get_legend_handles_labels()[1]
            if names:
                columns = len(names) if sum(map(len, names)) + 6 * len(names) < 62 else 2
                self.figure.legend(loc="outside upper left", ncols=columns, frameon=False, handlelength=1.4)
            self.figure.savefig(written, format="svg", transparent=True,
                                metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))  # fmt: skip
        body = re.sub(r"<style.*?</style>|<!--.*?-->|<defs>\s*</defs>", "", written.getvalue(), flags=re.DOTALL)
        body = body[body.index(">", body.index("<svg")) + 1 :]
        body = re.sub(r"font-family: [^;\"]*; ?", "", body)
        for name, colour in LIGHT.items():
            body = body.replace(colour, f"var(--{name})")
        body = re.sub(r' id="tip-(\d+)">', lambda found: f">\n<title>{escape(self.tips[int(found[1])])}</title>", body)
        body = re.sub(r'<g id="[^"]*"', "<g", body).replace("xlink:href", "href")
        head = f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">'
        return "\n".join([head, *(line.strip() for line in body.splitlines() if line.strip())])


def _styled(salt: str = "") -> AbstractContextManager[None]:
    """Let matplotlib draw as the page looks; `salt` makes the names inside a drawing differ from another's."""
    return mpl.rc_context({
        "svg.fonttype": "none", "text.parse_math": False, "font.size": 13,
        "xtick.labelsize": 12, "ytick.labelsize": 12, "xtick.color": LIGHT["quiet"], "ytick.color": LIGHT["quiet"],
        "axes.labelcolor": LIGHT["quiet"], "text.color": LIGHT["ink"], "axes.edgecolor": LIGHT["quiet"],
        "grid.color": LIGHT["grid"], "xtick.bottom": False, "ytick.left": False, "axes.axisbelow": True,
        "axes.spines.left": False, "axes.spines.right": False, "axes.spines.top": False,
        "svg.hashsalt": salt,
    })  # fmt: skip


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
    """Draw values for each residual block, in order of the forward pass; x counts the blocks from 0.

    Args:
        label: what a screen reader says.
        stages: the stage of each block, drawn as bands.
        log: whether the y axis is logarithmic; zero: whether it includes 0.
    """
    chart, shown = Chart(_DEPTH, y_label), [one for one in series if one.points]
    values = [y for one in shown for _, y, _ in one.points] + [rule.y for rule in rules] + [0.0] * zero
    chart.scale(values, log=log)
    chart.bands(stages)
    for rule in rules:
        chart.axes.axhline(rule.y, color=LIGHT["quiet"], linestyle="--", linewidth=1.5, label=rule.name)
    for one in shown:
        chart.draw(one)
    return chart.svg(label)


def histogram(
    label: str, edges: Sequence[float], counts: Sequence[int], *, colour: int, x_label: str, y_label: str
) -> str:
    """Draw counts between the edges, from 0 up."""
    chart = Chart(x_label, y_label)
    chart.scale([0.0, *map(float, counts)])
    bins = [(count, low, high) for count, low, high in zip(counts, edges, edges[1:], strict=False) if count]
    lows, widths = [low for _, low, _ in bins], [0.92 * (high - low) for _, low, high in bins]
    bars = chart.axes.bar(lows, [count for count, _, _ in bins], widths, align="edge", color=LIGHT[f"c{colour}"])
    for bar, (count, low, high) in zip(bars, bins, strict=True):
        chart.tip(bar, f"{count} between {number(low)} and {number(high)}")
    chart.axes.set_xlim(edges[0], edges[-1])
    chart.axes.xaxis.set_major_locator(MaxNLocator(6))
    chart.axes.xaxis.set_major_formatter(lambda value, _: number(value))
    return chart.svg(label)


def number(value: float) -> str:
    """Write four digits where it is not a large whole number, and a true minus sign."""
    if 1000 <= abs(value) < 1e7:
        return f"{value:,.0f}".replace("-", "\N{MINUS SIGN}")
    return f"{0.0 if abs(value) < 1e-300 else value:.4g}".replace("-", "\N{MINUS SIGN}")


def power(value: float) -> str:
    """Write a tick of a log axis: as a power of ten where it is small or large."""
    if 1e-3 < value < 1e4:
        return number(value)
    exponent = math.floor(math.log10(value) + 1e-9)
    lead = value / 10**exponent
    return ("" if lead < 1.5 else f"{lead:.0f}·") + "10" + str(exponent).translate(_SUPERSCRIPT)


def badge(colour: int, inside: str) -> str:
    """Draw a disc on its own, for legends outside of a chart: `empty`, `full`, or around a letter."""
    look = "dot" if inside == "full" else "ring"
    letter = f'<text class="letter" x="9" y="13" text-anchor="middle">{escape(inside)}</text>' * (len(inside) == 1)
    return (
        f'<svg class="badge-disc c{colour}" viewBox="0 0 18 18" width="18" height="18" aria-hidden="true">'
        f'<circle class="{look}" cx="9" cy="9" r="7.6"/>{letter}</svg>'
    )
