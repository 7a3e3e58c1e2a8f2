"""The rows of a benchmark as a picture and as a table for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from normswap.analysis import plots
from normswap.benchmarking.timing import Row
from normswap.storage import atomic_write

if TYPE_CHECKING:  # a second to import, for pictures alone
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_HATCHES = ("", "//", "..", "xx", "\\\\")
_COLUMNS = [field.name for field in fields(Row) if field.name != "rounds"]


def plot(rows: Sequence[Row], file: str | Path, title: str = "") -> Path:
    """A panel per network and batch size: images per second in each runtime, a bar per form, quartiles as whiskers.

    The number at a bar says how many times as fast it is as the original in eager mode. Forms differ by colour and by
    hatching. What was not timed is named where its bar would be.

    Raises:
        OutputError: the file cannot be written, or not in the format that its suffix names.
    """
    from matplotlib.figure import Figure

    panels = _panels(rows)
    wide = min(len({batch for _, batch in panels}), 3)
    tall = -(-len(panels) // wide)
    lines = max(len(group) for group in panels.values())
    figure = Figure(figsize=(6.2 * wide, tall * (1.3 + 0.3 * lines) + 0.7), layout="constrained")
    forms = list(dict.fromkeys(row.form for row in rows))
    grid = figure.subplots(tall, wide, squeeze=False).flat
    for axes, ((network, batch), group) in zip(grid, panels.items(), strict=False):
        _panel(axes, group, forms)
        axes.set_title(f"{network}, batch {batch}", fontsize=12, loc="left")
    for axes in list(figure.axes)[len(panels) :]:
        axes.set_visible(False)
    handles: dict[str, Artist] = {}
    for axes in figure.axes:
        handles |= {legend: handle for handle, legend in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(5, len(handles)), fontsize=11)
    if title:
        figure.suptitle(title, fontsize=11)
    return plots.save(figure, file)


def _panels(rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    panels: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        panels.setdefault((row.network, row.batch), []).append(row)
    return panels


def _panel(axes: Axes, rows: Sequence[Row], forms: Sequence[str]) -> None:
    names = list(dict.fromkeys(row.runtime for row in rows))
    ordered = sorted(rows, key=lambda row: (names.index(row.runtime), forms.index(row.form)))
    speeds = [row.images_per_s or 0.0 for row in ordered]
    places, ticks, y = [], [], 0.0
    for name in names:
        own = [row for row in ordered if row.runtime == name]
        places += [y + i for i in range(len(own))]
        ticks.append(y + (len(own) - 1) / 2)
        y += len(own) + 0.6
    for form in forms:
        style = forms.index(form)
        mine = [i for i, row in enumerate(ordered) if row.form == form]
        axes.barh(
            [places[i] for i in mine], [speeds[i] for i in mine], height=0.86, label=form, linewidth=0.6,
            color=plots.COLOURS[style % len(plots.COLOURS)], hatch=_HATCHES[style % len(_HATCHES)], edgecolor="white",
            xerr=_whiskers([ordered[i] for i in mine]), error_kw={"ecolor": "0.15", "elinewidth": 1.2, "capsize": 2.5},
        )  # fmt: skip
    furthest = max((_furthest(row) for row in ordered), default=0.0) or 1.0
    for place, row in zip(places, ordered, strict=True):
        text = f"{row.speedup:.2f} x" if row.speedup is not None else row.status
        axes.text(_furthest(row) + 0.015 * furthest, place, text, va="center", fontsize=10)
    axes.set_yticks(ticks, names, fontsize=11)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.16 * furthest)
    axes.set_xlabel("images per second (number: times the original in eager mode)", fontsize=10)
    axes.tick_params(axis="x", labelsize=10)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)


def _furthest(row: Row) -> float:
    """Where a row's whisker ends."""
    return row.batch / row.ms_low * 1e3 if row.ms_low else 0.0


def _whiskers(rows: Sequence[Row]) -> list[list[float]]:
    """Below and above each bar: the quartiles of the time of a pass, as images per second."""
    pairs = [
        (row.images_per_s - row.batch / row.ms_high * 1e3, row.batch / row.ms_low * 1e3 - row.images_per_s)
        if row.images_per_s and row.ms_high and row.ms_low else (0.0, 0.0) for row in rows
    ]  # fmt: skip
    return [[max(below, 0.0) for below, _ in pairs], [max(above, 0.0) for _, above in pairs]]


def write_csv(rows: Sequence[Row], file: str | Path) -> Path:
    """A line per row; the columns are the fields of `Row`, without the single runs.

    Raises:
        OutputError: it cannot be written.
    """
    return atomic_write.table(Path(file), _COLUMNS, map(asdict, rows))
