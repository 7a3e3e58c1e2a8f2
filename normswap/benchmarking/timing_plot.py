"""The rows of a benchmark as a picture and as a table for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from normswap.analysis import plots
from normswap.benchmarking.timing import TimedRow
from normswap.storage import atomic_write

if TYPE_CHECKING:  # a second to import, for pictures alone
    from matplotlib.axes import Axes

_HATCHES = ("", "//", "..", "xx", "\\\\")


def plot(rows: Sequence[TimedRow], file: str | Path, title: str = "") -> Path:
    """Draw a panel per network and batch size: images per second by runtime, a bar per form, quartiles as whiskers.

    The number at a bar says how many times as fast it is as the original in eager mode. Forms differ by colour and by
    hatching. A form that was not timed is named where its bar would be.

    Raises:
        OutputError: the file cannot be written, or not in the format that its suffix names.
    """
    from matplotlib.figure import Figure

    panels: dict[tuple[str, int], list[TimedRow]] = {}
    for row in rows:
        panels.setdefault((row.network, row.batch), []).append(row)
    wide = min(len({batch for _, batch in panels}), 3)
    tall = -(-len(panels) // wide)
    lines = max(len(group) for group in panels.values())
    figure = Figure(figsize=(6.2 * wide, tall * (1.3 + 0.3 * lines) + 0.7), layout="constrained")
    forms = list(dict.fromkeys(row.form for row in rows))
    grid = figure.subplots(tall, wide, squeeze=False).flat
    for axes, ((network, batch), group) in zip(grid, panels.items(), strict=False):
        _panel(axes, sorted(group, key=lambda row: forms.index(row.form)), forms)
        axes.set_title(f"{network}, batch {batch}", fontsize=12, loc="left")
    for axes in list(figure.axes)[len(panels) :]:
        axes.set_visible(False)
    plots.legend_below(figure)
    if title:
        figure.suptitle(title, fontsize=11)
    return plots.save(figure, file)


def _panel(axes: Axes, rows: Sequence[TimedRow], forms: Sequence[str]) -> None:
    names = list(dict.fromkeys(row.runtime for row in rows))
    ordered = sorted(rows, key=lambda row: names.index(row.runtime))
    places = [i + 0.6 * names.index(row.runtime) for i, row in enumerate(ordered)]
    furthest = max(_speeds(row)[2] for row in ordered) or 1.0
    for place, row in zip(places, ordered, strict=True):
        style, (low, speed, high) = forms.index(row.form), _speeds(row)
        axes.barh(
            place, speed, height=0.86, label=row.form, linewidth=0.6, edgecolor="white",
            color=plots.COLOURS[style % len(plots.COLOURS)], hatch=_HATCHES[style % len(_HATCHES)],
            xerr=[[speed - low], [high - speed]], error_kw={"ecolor": "0.15", "elinewidth": 1.2, "capsize": 2.5},
        )  # fmt: skip
        text = f"{row.speedup:.2f} x" if row.speedup is not None else row.status
        axes.text(high + 0.015 * furthest, place, text, va="center", fontsize=10)
    ticks = [np.mean([place for place, row in zip(places, ordered, strict=True) if row.runtime == n]) for n in names]
    axes.set_yticks(ticks, names, fontsize=11)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.16 * furthest)
    axes.set_xlabel("images per second (number: times the original in eager mode)", fontsize=10)
    axes.tick_params(axis="x", labelsize=10)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)


def _speeds(row: TimedRow) -> tuple[float, float, float]:
    """Images per second: the lower quartile, the median, the upper quartile; zeros for what was not timed."""
    if not (row.ms and row.ms_low and row.ms_high):
        return 0.0, 0.0, 0.0
    return 1e3 * row.batch / row.ms_high, 1e3 * row.batch / row.ms, 1e3 * row.batch / row.ms_low


def write_csv(rows: Sequence[TimedRow], file: str | Path) -> Path:
    """Write a line per row; the columns are the fields of `TimedRow`, without the single passes.

    Raises:
        OutputError: it cannot be written.
    """
    columns = [field.name for field in fields(TimedRow) if field.name != "rounds"]
    return atomic_write.table(Path(file), columns, map(asdict, rows))
