"""The report as one HTML page: its own style, charts as SVG, nothing loaded from anywhere. Every text is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from importlib import resources

from normswap import __version__
from normswap.reporting import sections
from normswap.reporting.markup import MINUS, code, section, share, small
from normswap.reporting.records import Facts, StepFact

MARK = "<!doctype html>"
_PAPER = re.compile(r"arXiv:(\d{4}\.\d{4,5})")


def render(facts: Facts) -> str:
    """The whole page."""
    style = resources.files("normswap.reporting").joinpath("report.css").read_text(encoding="utf-8")
    parts = (
        _done(facts),
        sections.anatomy(facts),
        sections.proof(facts),
        sections.signal(facts),
        sections.values(facts),
    )
    return f"""{MARK}
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="normswap {__version__}">
<link rel="icon" href="data:,">
<title>{escape(facts.title)}</title>
<style>
{style}</style>
</head>
<body>
{_header(facts)}
<main>
{"".join(parts)}</main>
{_footer(facts)}
</body>
</html>
"""


# --- header and footer ------------------------------------------------------------------------------------------------


def _header(facts: Facts) -> str:
    report = facts.report
    badges = []
    if report is None:
        badges.append(("plain", "not verified since the last change to its weights"))
    else:
        badges.append(("good", "passed") if report.passed else ("bad", "failed"))
        badges.append(("plain", "exact: keeps the function") if report.exact else ("bad", "changes the function"))
    marks = "".join(f'<span class="badge {kind}">{escape(text)}</span>' for kind, text in badges)
    tiles = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{value}<small>{below}</small></dd></div>"
        for name, value, below in _tiles(facts)
    )
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in facts.notes)
    origin = f"From {code(facts.source)}" if facts.source else "From a network without a recorded source"
    return f"""<header>
<h1>{escape(facts.title)}</h1>
<div>{marks}</div>
<p>{origin}, a {code(facts.arch.name)}.</p>
<dl class="tiles">{tiles}</dl>
{notes}</header>"""


def _tiles(facts: Facts) -> Iterable[tuple[str, str, str]]:
    """(name, figure, small print), the last two in HTML."""
    report = facts.report
    for precision in dict.fromkeys(e.precision for e in report.logits) if report else ():
        errors = [e for e in report.logits if e.precision == precision]  # type: ignore[union-attr]
        allowed = report.tolerance.get(precision) if report and report.exact else None
        below = f"allowed: {small(allowed)}" if allowed else "at the logits"
        yield f"relative L2, {precision}", small(max(e.relative_l2 for e in errors)), below
    shares = [e.agreement for e in report.logits if e.agreement is not None] if report else []
    if report and shares:
        yield "same answers", share(min(shares)), f"on {escape(report.inputs)}"
    before, after = facts.sizes["before"], facts.sizes["after"]
    yield "norms", f"{before['norms']} → {after['norms']}", "normalization layers"
    change = f"{after['parameters'] - before['parameters']:+,}".replace("-", MINUS)
    yield "parameters", f"{after['parameters']:,}", "as before" if change == "+0" else f"{change} by the conversion"
    if facts.accuracy:
        a = facts.accuracy
        parts = [f"source: {a['source']:.2f} %"] if "source" in a else []
        parts += [f"same answers: {share(a['agreement'])}"] if "agreement" in a else []
        yield "top-1", f"{a['result']:.2f} %", "; ".join([*parts, f"{a['count']:,.0f} images"])
    elif report and report.accuracy:
        for name, value in report.accuracy.items():
            yield f"top-1 of {name}", f"{value:.2f} %", "when converted"


def _footer(facts: Facts) -> str:
    args = ", ".join(f"{key} = {value}" for key, value in facts.arch.kwargs.items())
    entries = [
        ("architecture", f"{facts.arch.name}({args})"),
        ("source's tensors", f"SHA-256 {facts.sha256}" if facts.sha256 else ""),
        ("plan", f"SHA-256 {facts.digest}"),
        ("converted with", ", ".join(f"{name} {version}" for name, version in facts.versions.items())),
        ("page written by", f"normswap {__version__}"),
    ]
    listed = "".join(f"<dt>{name}</dt><dd>{code(text)}</dd>" for name, text in entries if text)
    return f'<footer aria-label="Provenance"><dl>{listed}</dl></footer>'


def _done(facts: Facts) -> str:
    if not facts.steps:
        return section("What was done", "<p>Nothing: the plan has no steps.</p>")
    return section("What was done", f'<ol class="steps">{"".join(_step(step) for step in facts.steps)}</ol>')


def _step(step: StepFact) -> str:
    options = ", ".join(f"{name} = {value}" for name, value in step.options.items())
    paper = _PAPER.sub(r'<a href="https://arxiv.org/abs/\1">arXiv:\1</a>', escape(step.paper))
    edits = ", ".join(f"{count} {layer}" for layer, count in step.edits.items())
    lines = [
        f"<strong>{escape(step.scheme)}</strong>" + (f" with {code(options)}" if options else ""),
        escape(step.summary),
        f'<span class="quiet">{paper}</span>' if paper else "",
        f'<span class="quiet">{sum(step.edits.values())} edits: {escape(edits)}</span>' if edits else "",
    ]
    return "<li>" + "".join(f"<p>{line}</p>" for line in lines if line) + "</li>"
