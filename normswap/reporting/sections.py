"""The sections of a report that show the network and what was measured on it: each takes the facts, gives HTML."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from typing import Any

from normswap.reporting import charts
from normswap.reporting.charts import Rule, Series
from normswap.reporting.markup import ALPHA, MINUS, TIMES, code, figure, folded, section, share, small, table
from normswap.reporting.records import ROLES, BlockFact, Facts, Gammas, NormFact

_COLOURS = {"stem": 4, "other": 1, "last": 2, "down": 3, "head": 5}
_MARKS = {"gone": "empty", "scalar": ALPHA, "bias": "b", "affine": "a", "replaced": "r", "kept": "full"}
_FATES = {
    "gone": "folded away",
    "scalar": f"folded away, a scalar {ALPHA} in its seat",
    "bias": "a shift per channel stays",
    "affine": "scale and shift stay",
    "replaced": "replaced by another layer",
    "kept": "kept",
}


# --- anatomy ----------------------------------------------------------------------------------------------------------


def anatomy(facts: Facts) -> str:
    used = [norm for block in facts.blocks for norm in block.norms] + list(facts.others)
    roles = [role for role in ROLES if any(norm.role == role for norm in used)]
    fates = [fate for fate in _FATES if any(norm.fate == fate for norm in used)]
    legend = [(charts.badge(_COLOURS[role], "full"), f"{role} norm") for role in roles]
    legend += [(charts.badge(5, _MARKS[fate]), _FATES[fate]) for fate in fates]
    items = "".join(f"<li>{mark} {escape(text)}</li>" for mark, text in legend)
    if any(block.skip == "projection" for block in facts.blocks):
        items += "<li>thick frame: projection on the skip</li>"
    count = len(facts.blocks)
    lead = (
        f"<p>{count} residual block{'s' * (count != 1)}, {len(used)} norms. One box per block, one disc per norm, in "
        "order of the forward pass: its colour is the norm's role in the source, its inside what became of it.</p>"
    )
    columns = ("blocks", "number", "skip", "norms, their roles and what happened to them")
    listed = table("Blocks and norms of the source", columns, _rows(facts), numbers="number")
    return section("Anatomy", lead, _strip(facts), f'<ul class="legend" aria-label="Legend">{items}</ul>', listed)


def _strip(facts: Facts) -> str:
    """The network as boxes, stage by stage. The table below says the same to those who cannot see it."""
    before, after = _outside(facts)
    parts = [("before the blocks", "".join(f'<span class="block">{_disc(norm)}</span>' for norm in before))]
    for stage, group in groupby(facts.blocks, lambda block: block.stage):
        parts.append((stage, "".join(_box(block) for block in group)))
    parts.append(("elsewhere", "".join(f'<span class="block">{_disc(norm)}</span>' for norm in after)))
    listed = "".join(
        f'<li><span class="name">{escape(name)}</span><span class="row">{boxes}</span></li>'
        for name, boxes in parts
        if boxes
    )
    return f'<ul class="stages" aria-hidden="true">{listed}</ul>'


def _outside(facts: Facts) -> tuple[list[NormFact], list[NormFact]]:
    """The norms outside of blocks: those of the stem, the others."""
    return [n for n in facts.others if n.role == "stem"], [n for n in facts.others if n.role != "stem"]


def _box(block: BlockFact) -> str:
    look = "block projection" if block.skip == "projection" else "block"
    title = escape(f"{block.path}: {block.skip} skip")
    return f'<span class="{look}" title="{title}">{"".join(_disc(norm) for norm in block.norms)}</span>'


def _disc(norm: NormFact) -> str:
    title = escape(f"{norm.path}: {norm.role} norm, {norm.channels} channels; {norm.said}")
    return f'<span title="{title}">{charts.badge(_COLOURS[norm.role], _MARKS[norm.fate])}</span>'


def _rows(facts: Facts) -> Iterable[Sequence[str]]:
    """One row per kind of block, in order of first appearance, between the norms outside of blocks."""
    before, after = _outside(facts)
    if before:
        yield _outer_row("before the blocks", before)
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for i, block in enumerate(facts.blocks):
        look = block.skip, tuple(_described(norm, block.path) for norm in block.norms)
        kinds.setdefault(look, []).append(i)
    for (skip, norms), members in kinds.items():
        words = "".join(f"<p>{text}</p>" for text in norms)
        yield _runs(members, facts.blocks), str(len(members)), escape(skip), words
    if after:
        yield _outer_row("elsewhere", after)


def _runs(members: Sequence[int], blocks: Sequence[BlockFact]) -> str:
    """The paths of these blocks, neighbours in one stage as `first … last`."""
    runs: list[list[int]] = []
    for i in members:
        if runs and runs[-1][-1] == i - 1 and blocks[i].stage == blocks[i - 1].stage:
            runs[-1].append(i)
        else:
            runs.append([i])
    names = [code(blocks[r[0]].path) + (f" … {code(blocks[r[-1]].path)}" if len(r) > 1 else "") for r in runs]
    return ", ".join(names)


def _outer_row(where: str, norms: Sequence[NormFact]) -> Sequence[str]:
    words = "".join(f"<p>{_described(norm, '')}</p>" for norm in norms)
    return f'<span class="quiet">{where}</span>', "", "", words


def _described(norm: NormFact, block: str) -> str:
    """The norm as seen from its block."""
    prefix = block.partition("+")[0] + "." if block else ""
    said = norm.said.replace(f" {prefix}", " ") if prefix else norm.said
    name = code(norm.path.removeprefix(prefix))
    return f'{name} <span class="role c{_COLOURS[norm.role]}">{norm.role}</span> {escape(said)}'


# --- what was measured ------------------------------------------------------------------------------------------------


def proof(facts: Facts) -> str:
    report = facts.report
    if report is None:
        return ""
    rows = [
        (
            escape(e.precision), TIMES.join(map(str, e.size)), small(e.relative_l2), small(e.largest),
            share(e.agreement),
            small(report.tolerance[e.precision]) if report.exact and e.precision in report.tolerance else "",
        )
        for e in report.logits
    ]  # fmt: skip
    columns = ("precision", "input", "relative L2", "largest", "same answers", "allowed")
    listed = table("Errors at the logits", columns, rows, numbers=",".join(columns[1:]))
    last = " The last step was compared with the network before it." if len(facts.steps) > 1 else ""
    lead = f"<p>Source and result, run on {escape(report.inputs)} when the conversion was made.{last}</p>"
    blind = "".join(f"<li>{escape(text)}</li>" for text in report.vacuous)
    blind = f"<p>What this measurement cannot see:</p><ul>{blind}</ul>" if blind else ""
    if report.exact:
        scale = "For scale: in float64 a correct fold is off by about 1e-14, a wrong eps by about 1e-4."
        blind += f'<p class="quiet">{scale}</p>'
    chart, numbers = _sites(facts)
    return section("Proof", lead, f'<div class="charts proof"><div>{listed}{blind}</div>{chart}</div>', numbers)


def _sites(facts: Facts) -> tuple[str, str]:
    """The error at the output of every block, as a chart and as a table."""
    report = facts.report
    if report is None or not report.sites:
        return "", ""
    stage = {block.path: block.stage for block in facts.blocks}
    points = [(i, e.relative_l2, f"{e.site}: relative L2 {e.relative_l2:.2e}") for i, e in enumerate(report.sites)]
    precision = report.sites[0].precision
    rules = [Rule("allowed at the logits", report.tolerance[precision])] if report.exact else []
    chart = charts.over_blocks(
        f"Relative L2 error in {precision} at the output of each of {len(points)} residual blocks, on a log scale",
        [Series(f"result against source, {precision}", points, 1, "dot", "solid")],
        y_label="relative L2 error", stages=[stage.get(e.site, "") for e in report.sites], log=True, rules=rules,
    )  # fmt: skip
    rows = [(code(e.site), small(e.relative_l2), small(e.largest), f"{e.cosine:.9f}") for e in report.sites]
    columns = ("block", "relative L2", "largest", "cosine")
    listed = table("Errors at the blocks' outputs", columns, rows, numbers=",".join(columns[1:]))
    caption = f"|result {MINUS} source| / |source| at each block's output"
    caption += "; a triangle is an error of 0." if not all(e.relative_l2 for e in report.sites) else "."
    return figure("Error per residual block", chart, caption), folded("Errors block by block", listed)


def signal(facts: Facts) -> str:
    charted = _alpha_chart(facts) if facts.alphas else ""
    if not facts.signal:
        return section("The scalars", charted, _alpha_table(facts)) if charted else ""
    variance, mean = "average channel variance", "average channel squared mean"
    one = _signal_chart(facts, "variance", "Variance after the sum", variance)
    two = _signal_chart(facts, "mean_sq", "Squared mean after the sum", mean)
    three = _signal_chart(facts, "added_variance", "Variance at the end of the branch", variance)
    lead = (
        f"<p>Measured on {escape(facts.signal_inputs)} in eval mode, after every residual sum, as in Brock et al. 2021 "
        '(<a href="https://arxiv.org/abs/2101.08692">arXiv:2101.08692</a>), section 3.'
    )
    if "before" in facts.signal:
        lead += " Where the function is kept, each dot lies in its ring."
    if facts.against == "unfolded":
        lead += " The source's values are those of the BatchNorm network that the result unfolds to."
    shown = f'<div class="charts">{one}{two}{three}{charted}</div>'
    return section("Signal propagation", lead + "</p>", shown, _alpha_table(facts) if charted else "")


def _signal_chart(facts: Facts, what: str, title: str, y_label: str) -> str:
    labels = {"before": "source (unfolded)" if facts.against == "unfolded" else "source", "after": "result"}
    looks = {"before": (1, "ring"), "after": (2, "dot")}
    series = []
    for name, points in facts.signal.items():
        marks = [(p.depth - 1, v, f"{p.block}, {labels[name]}: {v:.4g}") for p in points for v in [getattr(p, what)]]
        series.append(Series(labels[name], marks, *looks[name], "solid" if name == "after" else ""))
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
    return figure(title, chart, caption)


def values(facts: Facts) -> str:
    if not facts.gammas:
        return ""
    figures = "".join(_gamma_chart(gammas) for gammas in facts.gammas)
    lead = "<p>From the source's norms, kept beside the weights; all panels share one horizontal axis.</p>"
    return section("Gammas by role", lead, f'<div class="charts">{figures}</div>')


def _gamma_chart(gammas: Gammas) -> str:
    total, norms = sum(gammas.counts), f"{gammas.norms} norm{'s' * (gammas.norms != 1)}"
    label = f"Histogram of {total} gammas of {norms} of role {gammas.role}, mean {gammas.mean:.3g}"
    look = {"colour": _COLOURS[gammas.role], "x_label": "gamma", "y_label": "number of channels"}
    chart = charts.histogram(label, gammas.edges, gammas.counts, **look)  # type: ignore[arg-type]
    signs = f"{gammas.negative:,} negative, {gammas.zero:,} zero"
    caption = f"{total:,} channels of {norms}; mean {charts.number(gammas.mean)}; {signs}."
    return figure(f"Gammas: {gammas.role}", chart, caption)


def _alpha_chart(facts: Facts) -> str:
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
    return figure("Alpha per residual block", chart, caption)


def _alpha_table(facts: Facts) -> str:
    rows = [
        (code(a.block), code(a.seat), f"{a.value:.6g}", "" if a.planned is None else f"{a.planned:.6g}",
         "" if a.bias is None else f"{a.bias:.6g}")
        for a in facts.alphas
    ]  # fmt: skip
    columns = ("block", "seat", "alpha", "when converted", "bias")
    listed = table("Scalars at the ends of the branches", columns, rows, numbers="alpha,when converted,bias")
    return folded("Scalars block by block", listed)
