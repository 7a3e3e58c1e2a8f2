"""The report's figures: what each chart shows, under which title, and what is to be said about it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from normswap.reporting import charts
from normswap.reporting.charts import Rule, Series
from normswap.reporting.records import ALPHA, COLOURS, Facts, Gammas
from normswap.reporting.tables import MINUS
from normswap.surgery.report import Report


@dataclass(frozen=True)
class Figure:
    """A chart (SVG) with its title and caption."""

    title: str
    chart: str
    caption: str


def sites(facts: Facts, report: Report) -> Figure:
    """Show the error at the output of every block."""
    stage = {block.path: block.stage for block in facts.blocks}
    points = [(i, e.relative_l2, f"{e.site}: relative L2 {e.relative_l2:.2e}") for i, e in enumerate(report.sites)]
    precision = report.sites[0].precision
    rules = [Rule("allowed at the logits", report.tolerance[precision])] if report.exact else []
    chart = charts.over_blocks(
        f"Relative L2 error in {precision} at the output of each of {len(points)} residual blocks, on a log scale",
        [Series(f"result against source, {precision}", points, 1, "dot", "solid")],
        y_label="relative L2 error", stages=[stage.get(e.site, "") for e in report.sites], log=True, rules=rules,
    )  # fmt: skip
    caption = f"|result {MINUS} source| / |source| at each block's output"
    caption += "; a triangle is an error of 0." if not all(e.relative_l2 for e in report.sites) else "."
    return Figure("Error per residual block", chart, caption)


def signal(facts: Facts) -> Iterator[Figure]:
    """Show how the signal propagates: variance and mean after the sum, variance of what is added."""
    variance, mean = "average channel variance", "average channel squared mean"
    yield _signal(facts, "variance", "Variance after the sum", variance)
    yield _signal(facts, "mean_sq", "Squared mean after the sum", mean)
    yield _signal(facts, "added_variance", "Variance at the end of the branch", variance)


def _signal(facts: Facts, what: str, title: str, y_label: str) -> Figure:
    labels = {"before": "source (unfolded)" if facts.against == "unfolded" else "source", "after": "result"}
    looks = {"before": (1, "ring"), "after": (2, "dot")}
    series = []
    for name, points in facts.signal.items():
        marks = [(p.depth - 1, v, f"{p.block}, {labels[name]}: {v:.4g}") for p in points for v in [getattr(p, what)]]
        series.append(Series(labels[name], marks, *looks[name], "solid" if name == "after" else "none"))
    caption = f"{y_label.capitalize()}, over batch and positions."
    after = facts.signal.get("after", ())
    if what == "added_variance" and any(p.branch_variance != p.added_variance for p in after):
        inner = [(p.depth - 1, p.branch_variance, f"{p.block}, before alpha: {p.branch_variance:.4g}") for p in after]
        series.append(Series(f"result before {ALPHA}", inner, 3, "cross", "dashed"))
        caption = f"Average channel variance of what the sum receives, {ALPHA}·f(x), and of f(x) alone."
    values = [v for s in series for _, v, _ in s.points if v > 0 and math.isfinite(v)]
    log = bool(values) and max(values) > 50 * min(values)
    chart = charts.over_blocks(
        f"{title} at each residual block, {' and '.join(s.name for s in series)}", series,
        y_label=y_label + (", log scale" if log else ""), stages=[p.stage for p in after], log=log, zero=True,
    )  # fmt: skip
    return Figure(title, chart, caption)


def gammas(gammas: Gammas) -> Figure:
    """Their distribution for the norms of one role."""
    total, norms = sum(gammas.counts), f"{gammas.norms} norm{'s' * (gammas.norms != 1)}"
    label = f"Histogram of {total} gammas of {norms} of role {gammas.role}, mean {gammas.mean:.3g}"
    chart = charts.histogram(
        label, gammas.edges, gammas.counts, colour=COLOURS[gammas.role], x_label="gamma", y_label="number of channels"
    )
    signs = f"{gammas.negative:,} negative, {gammas.zero:,} zero"
    caption = f"{total:,} channels of {norms}; mean {charts.number(gammas.mean)}; {signs}."
    return Figure(f"Gammas: {gammas.role}", chart, caption)


def alphas(facts: Facts) -> Figure:
    """Show the scalars at the ends of the branches, against what they were and what a paper proposes."""
    where = {block.path: i for i, block in enumerate(facts.blocks)}
    placed = [(where[a.block], a) for a in facts.alphas if a.block in where]
    now = [(i, a.value, f"{a.block}: alpha = {a.value:.5g}") for i, a in placed]
    moved = [
        (i, a.planned, f"{a.block}: converted with {a.planned:.5g}")
        for i, a in placed
        if a.planned is not None and abs(a.planned - a.value) > 1e-6 * abs(a.planned)
    ]
    biases = [(i, a.bias, f"{a.block}: bias = {a.bias:.5g}") for i, a in placed if a.bias]
    depth = len(facts.blocks)
    series = [Series("when converted", moved, 1, "ring"), Series("scalar bias", biases, 3, "cross")]
    chart = charts.over_blocks(
        f"Alpha at the end of each of {len(now)} residual branches",
        [Series("alpha", now, 2, "dot", drop=True), *series],
        y_label="alpha", stages=facts.stages, zero=True, rules=[Rule(f"1/√{depth}", depth**-0.5)],
    )  # fmt: skip
    caption = f"y = skip + {ALPHA}·f(x). For reference 1/√{depth}, a start that De & Smith 2020 propose."
    return Figure("Alpha per residual block", chart, caption)
