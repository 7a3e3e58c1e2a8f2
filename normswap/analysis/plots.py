"""Signal propagation plots as pictures and tables. Files are written whole or not at all; no display is needed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from normswap.analysis import picture_formats
from normswap.analysis.signal_propagation import Point
from normswap.plan import Body
from normswap.storage import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curves = Mapping[str, Sequence[Point]]

# Okabe & Ito 2008, "Color Universal Design": told apart with any kind of colour vision; yellow is too light for lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")
PANELS = (
    ("mean_sq", "Average channel squared mean"),
    ("variance", "Average channel variance"),
    ("branch_variance", "Average variance of the branch"),
)
_MARKERS = "os^DvPX"
_LINES = ("-", "--", "-.", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
_LOG_ABOVE = 30.0  # ratio of values from which an axis is logarithmic
_FLOOR = 1e-3  # where a logarithmic axis ends at the latest


def plot(
    curves: Curves, file: str | Path, *, expected: Mapping[str, Sequence[float]] | None = None, title: str = ""
) -> Path:
    """Draw one figure with three panels over the residual blocks: squared mean, variance, and variance of the branch.

    Args:
        curves: the points of each network, by the name for the legend.
        file: its suffix says the format: .png, .svg, .pdf ...
        expected: analytic variances after each block, by name; drawn in the variance panel, in grey.

    Raises:
        OutputError: the file cannot be written, or not in that format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, (name, label) in zip(panels, PANELS, strict=True):
        for i, (legend, points) in enumerate(curves.items()):
            values = [getattr(point, name) for point in points]
            axes.plot(
                [point.depth for point in points],
                [value if math.isfinite(value) else math.nan for value in values],
                color=COLOURS[i % len(COLOURS)], marker=_MARKERS[i % len(_MARKERS)], markersize=4.5,
                linestyle=_LINES[i % len(_LINES)], linewidth=1.6, label=legend,
            )  # fmt: skip
        if name == "variance":
            for i, (legend, variances) in enumerate((expected or {}).items()):
                axes.plot(range(1, len(variances) + 1), variances, color="0.35", linewidth=3.5, alpha=0.55, zorder=0.5,
                          linestyle=(":", "-")[i % 2], label=legend)  # fmt: skip
        _label(axes, label)
        _mark_stages(axes, curves)
    handles, names = panels[1].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3)
    if title:
        figure.suptitle(title)
    return save(figure, file)


def _label(axes: Axes, y: str) -> None:
    """Labels, grid, and a logarithmic y axis where the values ask for it."""
    drawn = np.concatenate([[], *(np.asarray(line.get_ydata(), float) for line in axes.get_lines())])
    values = drawn[np.isfinite(drawn) & (drawn > 0)].tolist()
    high, low = max(values, default=1.0), max(min(values, default=1.0), _FLOOR)
    log = high / low > _LOG_ABOVE
    if log:
        axes.set_yscale("log")
    axes.set_ylim(bottom=low / 1.6 if log else 0)
    axes.set(xlabel="residual block", ylabel=f"{y}\n(activation units²{', log scale' if log else ''})")
    axes.grid(alpha=0.25)
    axes.locator_params(axis="x", integer=True)


def _mark_stages(axes: Axes, curves: Curves) -> None:
    """Thin vertical lines where a stage begins, if all networks agree on that."""
    starts = {tuple(p.depth for before, p in pairwise(points) if p.stage != before.stage) for points in curves.values()}
    if len(starts) == 1:
        for depth in starts.pop():
            axes.axvline(depth - 0.5, color="0.75", linewidth=0.8, zorder=0)


def save(figure: Figure, file: str | Path) -> Path:
    """Write a matplotlib figure, under a temporary name first.

    Raises:
        OutputError: it cannot be written, or not in the format that the suffix names.
    """
    file = Path(file)
    form = picture_formats.check(file)
    return atomic_write.whole(file, lambda temporary: figure.savefig(temporary, format=form, dpi=100))


def to_json(curves: Curves, expected: Mapping[str, Sequence[float]] | None = None) -> Body:
    """Return {"curves": {name: [point, ...]}, "expected": {name: [variance, ...]}}."""
    bodies = {name: [asdict(p) for p in points] for name, points in curves.items()}
    return {"curves": bodies, "expected": {name: list(values) for name, values in (expected or {}).items()}}


def write_csv(curves: Curves, file: str | Path) -> Path:
    """Write one row per network and block; the column `network` comes first, the others are the fields of `Point`."""
    rows = ({"network": network, **asdict(point)} for network, points in curves.items() for point in points)
    return atomic_write.table(Path(file), ["network", *(field.name for field in fields(Point))], rows)
