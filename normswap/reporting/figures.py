"""The report's figures, by matplotlib: what each shows, under which title, and what is to be said about it."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from normswap.analysis.plots import COLOURS
from normswap.reporting.records import ALPHA, Facts, Gammas
from normswap.surgery.report import Report

_BEFORE, _AFTER, _THIRD = COLOURS[:3]


@dataclass(frozen=True)
class Figure:
    """A figure with its title and caption; the picture is an SVG, as an address that holds all its data."""

    title: str
    picture: str
    caption: str


def sites(facts: Facts, report: Report) -> Figure:
    """Show the error at the output of every block."""
    stages = {block.path: block.stage for block in facts.blocks}
    errors, precision = [error.relative_l2 for error in report.sites], report.sites[0].precision
    axes = _over_blocks("relative L2 error", [stages.get(error.site, "") for error in report.sites])
    axes.semilogy(range(1, len(errors) + 1), errors, "o-", color=_BEFORE, label=f"result against source, {precision}")
    if report.exact:
        axes.axhline(report.tolerance[precision], color="0.4", linestyle="--", label="allowed at the logits")
    caption = "|result - source| / |source| at each block's output"
    caption += "." if all(errors) else "; an error of 0 is not drawn."
    return Figure("Error per residual block", _svg(axes), caption)


def signal(facts: Facts) -> Iterator[Figure]:
    """Show how the signal propagates: variance and mean after the sum, variance of what is added."""
    variance, mean = "average channel variance", "average channel squared mean"
    yield _signal(facts, "variance", "Variance after the sum", variance)
    yield _signal(facts, "mean_sq", "Squared mean after the sum", mean)
    yield _signal(facts, "added_variance", "Variance at the end of the branch", variance)


def _signal(facts: Facts, name: str, title: str, y_label: str) -> Figure:
    labels = {"before": "source (unfolded)" if facts.against == "unfolded" else "source", "after": "result"}
    looks: dict[str, dict[str, Any]] = {
        "before": {"color": _BEFORE, "marker": "o", "markersize": 11, "fillstyle": "none", "linestyle": "none"},
        "after": {"color": _AFTER, "marker": "o", "markersize": 5},
    }
    axes = _over_blocks(y_label, [point.stage for point in facts.signal["after"]])
    drawn = []
    for network, points in facts.signal.items():
        values = [getattr(point, name) for point in points]
        axes.plot([point.depth for point in points], values, label=labels[network], **looks[network])
        drawn += values
    caption = f"{y_label.capitalize()}, over batch and positions."
    after = facts.signal["after"]
    if name == "added_variance" and any(point.branch_variance != point.added_variance for point in after):
        values = [point.branch_variance for point in after]
        depths = [point.depth for point in after]
        axes.plot(depths, values, "x--", color=_THIRD, label=f"result before {ALPHA}")
        drawn += values
        caption = f"Average channel variance of what the sum receives, {ALPHA}·f(x), and of f(x) alone."
    positive = [value for value in drawn if 0 < value < float("inf")]
    if positive and max(positive) > 50 * min(positive):
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.08 * max(positive, default=1))
    return Figure(title, _svg(axes), caption)


def gammas(gammas: Gammas) -> Figure:
    """Their distribution for the norms of one role."""
    total, norms = sum(gammas.counts), f"{gammas.norms} norm{'s' * (gammas.norms != 1)}"
    axes = _axes("gamma", "number of channels")
    axes.stairs(gammas.counts, gammas.edges, fill=True, color=_BEFORE)
    axes.set_xlim(gammas.edges[0], gammas.edges[-1])
    caption = (
        f"{total:,} channels of {norms}; mean {gammas.mean:.4g}; {gammas.negative:,} negative, {gammas.zero:,} zero."
    )
    return Figure(f"Gammas: {gammas.role}", _svg(axes), caption)


def alphas(facts: Facts) -> Figure:
    """Show the scalars at the ends of the branches, against what they were and what a paper proposes."""
    depths = {block.path: depth for depth, block in enumerate(facts.blocks, 1)}
    placed = [(depths[alpha.block], alpha) for alpha in facts.alphas if alpha.block in depths]
    moved = [
        (depth, alpha.planned)
        for depth, alpha in placed
        if alpha.planned is not None and abs(alpha.planned - alpha.value) > 1e-6 * abs(alpha.planned)
    ]
    biases = [(depth, alpha.bias) for depth, alpha in placed if alpha.bias]
    axes = _over_blocks("alpha", [block.stage for block in facts.blocks])
    axes.stem([depth for depth, _ in placed], [alpha.value for _, alpha in placed], label="alpha", basefmt="none")
    for points, look, label in ((moved, "o", "when converted"), (biases, "x", "scalar bias")):
        if points:
            axes.plot(*zip(*points, strict=True), look, color=_AFTER, fillstyle="none", markersize=10, label=label)
    start = len(facts.blocks) ** -0.5
    axes.axhline(start, color="0.4", linestyle="--", label=f"1/√{len(facts.blocks)}")
    caption = f"y = skip + {ALPHA}·f(x). For reference 1/√{len(facts.blocks)}, a start that De & Smith 2020 propose."
    return Figure("Alpha per residual block", _svg(axes), caption)


def _axes(x_label: str, y_label: str) -> Axes:
    axes: Axes = Drawing((5.8, 3.6), layout="constrained").subplots()
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(axis="y", alpha=0.3)
    return axes


def _over_blocks(y_label: str, stages: Sequence[str]) -> Axes:
    """Return axes over the residual blocks, which count from 1, every other stage shaded and all named above."""
    axes, start = _axes("residual block, in order of the forward pass", y_label), 0.5
    middles, names = [], []
    for i, (stage, blocks) in enumerate(groupby(stages)):
        end = start + len(list(blocks))
        if i % 2 == 0:
            axes.axvspan(start, end, facecolor="0.95", zorder=0)
        middles.append((start + end) / 2)
        names.append(stage.rpartition(".")[2])
        start = end
    axes.set_xlim(0.5, max(start, 1.5))
    axes.locator_params(axis="x", integer=True)
    if len(names) <= 8:  # more would overlap
        above = axes.secondary_xaxis("top")
        above.set_xticks(middles, names, fontsize=9)
        above.tick_params(length=0)
    return axes


def _svg(axes: Axes) -> str:
    """Return the picture as an address that holds it, the same for the same figure."""
    written = io.BytesIO()
    drawing = axes.figure
    assert isinstance(drawing, Drawing)
    if axes.get_legend_handles_labels()[1]:
        drawing.legend(loc="outside lower center", ncols=3, frameon=False)
    with mpl.rc_context({"svg.hashsalt": "normswap"}):
        drawing.savefig(written, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(written.getvalue()).decode()}"
