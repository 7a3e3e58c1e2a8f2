"""Signal propagation plots.

matplotlib is an optional package, so it is imported when a picture is drawn. torch is not imported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from normswap.errors import OutputError, require_packages
from normswap.storage import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from normswap.analysis.block_signals import Point

Curves = Mapping[str, Sequence["Point"]]

# Okabe & Ito 2008, "Color Universal Design": told apart with any kind of colour vision; yellow is
# too light for lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")
PANELS = {
    "mean_sq": "Average channel squared mean",
    "variance": "Average channel variance",
    "branch_variance": "Average variance of the branch",
}
# All axes are logarithmic if the largest value of a quantity is more than this many times the
# smallest.
_LOG_ABOVE = 30.0
# A logarithmic axis begins at this value or above.
_FLOOR = 1e-3


def plot(curves: Curves, file: Path, inputs: str) -> Path:
    """Draw the signal of networks from residual block to block, and write the picture to a file.

    There is one panel each for the squared mean, the variance and the variance of the branch.

    Args:
        curves: The measured points of each network, one for each residual block, by its name.
        file: Where the picture is written. The suffix names its format.
        inputs: What the networks were run on, for the title.

    Returns:
        The path of the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    is_log = is_logarithmic(curves, PANELS)
    scale = "logarithmic" if is_log else "linear"
    figure.suptitle(f"Signal by residual block, on {inputs} ({scale} axes)")

    panels = figure.subplots(1, 3)
    for axes, (quantity, label) in zip(panels, PANELS.items(), strict=True):
        draw(axes, curves, quantity, label, is_log=is_log)

    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return save(figure, file)


def is_logarithmic(curves: Curves, quantities: Iterable[str]) -> bool:
    """Whether the y axes of a plot should be logarithmic.

    They should if one of the quantities varies a lot over the blocks and networks. The answer is
    for the panels of all quantities, so that they can be compared side by side.

    Args:
        curves: The measured points of each network, one for each residual block, by its name.
        quantities: The quantities to be drawn, as names of fields of `Point`.
    """
    spans = [_span(curves, quantity) for quantity in quantities]
    return any(high / low > _LOG_ABOVE for low, high in spans)


def _span(curves: Curves, quantity: str) -> tuple[float, float]:
    """Return the smallest and the largest value of a quantity that a logarithmic axis shows.

    Zeros and infinite values are left out. If the smallest value is below `_FLOOR`, `_FLOOR` is
    returned in its place.

    Args:
        curves: The measured points of each network, one for each residual block, by its name.
        quantity: The name of a field of `Point`.
    """
    values = [getattr(point, quantity) for points in curves.values() for point in points]
    drawn = [value for value in values if 0 < value < math.inf]
    return max(min(drawn, default=1.0), _FLOOR), max(drawn, default=1.0)


def draw(axes: Axes, curves: Curves, quantity: str, label: str, *, is_log: bool) -> None:
    """Draw one measured quantity of every network as a curve over its residual blocks.

    Args:
        axes: The axes to draw on.
        curves: The measured points of each network, one for each residual block, by its name.
        quantity: The quantity, as the name of a field of `Point`.
        label: The text beside the y axis.
        is_log: Whether the y axis is logarithmic.
    """
    for i, (name, points) in enumerate(curves.items()):
        values = [getattr(point, quantity) for point in points]
        axes.plot(
            [point.depth for point in points],
            values,
            label=name,
            color=COLOURS[i % len(COLOURS)],
            marker="o",
            # Markers get smaller from network to network, so that equal curves stay visible.
            markersize=max(3, 11 - 3 * i),
            fillstyle="none",
        )

    # A logarithmic axis begins a little below the smallest value. A linear one begins at 0.
    if is_log:
        axes.set_yscale("log")
        axes.set_ylim(bottom=_span(curves, quantity)[0] / 1.6)
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel(label)

    # Stages are shaded only if all networks have the same, as they share the x axis.
    all_stages = {tuple(point.stage for point in points) for points in curves.values()}
    stages = all_stages.pop() if len(all_stages) == 1 else ()
    over_blocks(axes, stages)


def over_blocks(axes: Axes, stages: Sequence[str]) -> None:
    """Set up the x axis to count residual blocks from 1, and shade every other stage.

    Args:
        axes: The axes.
        stages: The stage of each block. Empty if nothing is to be shaded.
    """
    # Block n takes up the axis from n - 0.5 to n + 0.5.
    start = 0.5
    for i, (_, blocks) in enumerate(groupby(stages)):
        end = start + len(list(blocks))
        if i % 2 == 0:
            axes.axvspan(start, end, facecolor="0.95", zorder=0)
        start = end

    axes.set_xlabel("residual block")
    axes.locator_params(axis="x", integer=True)
    axes.grid(axis="y", alpha=0.3)


def save(figure: Figure, file: Path) -> Path:
    """Write a matplotlib figure to a file, and return the path of the file.

    The suffix of the file names the format. If writing fails, no part of the file is left.
    """
    picture_format = format_of(file)
    return atomic_write.whole(file, lambda aside: figure.savefig(aside, format=picture_format))


def format_of(file: Path) -> str:
    """Return the picture format that the suffix of a file names.

    Raises:
        OptionError: Matplotlib is not installed.
        OutputError: Matplotlib does not write the format that the suffix names.
    """
    require_packages(f"a picture ({file})", ("matplotlib",), "plots")
    from matplotlib.backend_bases import FigureCanvasBase

    suffix = file.suffix.removeprefix(".").lower()
    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if suffix not in formats:
        raise OutputError(
            f"{file}: no picture format {suffix!r}", remedy=f"Use one of {', '.join(formats)}"
        )
    return suffix
