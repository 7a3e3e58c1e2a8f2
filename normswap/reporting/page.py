"""The report as one HTML page: its own style, figures as SVG, nothing loaded from anywhere.

The page is `page.html.jinja`; here is what it is filled with. Jinja escapes every text that is not
marked as HTML.
"""

import math
import re
from collections.abc import Iterator
from importlib import resources
from itertools import groupby

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from normswap.errors import printable
from normswap.proof.verdict import Report
from normswap.reporting import figures
from normswap.reporting.report import Facts
from normswap.version import __version__

_MINUS = "\N{MINUS SIGN}"
# The number of a role's class in the page's style.
COLOURS = {"stem": 4, "other": 1, "last": 2, "down": 3, "head": 5}
# The mark of what became of a norm, and what the mark means.
OUTCOMES = {
    "gone": ("", "folded away"),
    "scalar": (figures.ALPHA, f"folded away, a scalar {figures.ALPHA} in its place"),
    "bias": ("b", "a shift per channel stays"),
    "affine": ("a", "scale and shift stay"),
    "replaced": ("r", "replaced by another layer"),
    "kept": ("●", "kept"),
}
_PAPER = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
_CODE = re.compile(r"`([^`]*)`")


def render(facts: Facts) -> str:
    """Return the whole report as one HTML page.

    Args:
        facts: What the page says.
    """
    loader = PackageLoader("normswap.reporting", ".")
    pages = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        finalize=_shown,
    )
    pages.filters |= {"marked": _marked, "small": small, "share": share}
    style = resources.files("normswap.reporting").joinpath("report.css").read_text(encoding="utf-8")

    norms = facts.norms
    # Pairs of a stage's path and its residual blocks, in order.
    stages = []
    for stage, blocks in groupby(facts.blocks, lambda block: block.stage):
        stages.append((stage, list(blocks)))
    return pages.get_template("page.html.jinja").render(
        facts=facts,
        report=facts.report,
        tiles=list(_tiles(facts)),
        style=style,
        norms=norms,
        used_roles={norm.role for norm in norms},
        used_outcomes={norm.outcome for norm in norms},
        stages=stages,
        version=__version__,
        figures=figures,
        colours=COLOURS,
        outcomes=OUTCOMES,
    )


def small(value: float) -> str:
    """Return a number as text with two significant digits, or `not finite` for infinity and NaN."""
    return f"{value:.2g}" if math.isfinite(value) else "not finite"


def share(value: float | None) -> str:
    """Return a share between 0 and 1 as text in percent, or "" for None."""
    return "" if value is None else f"{100 * value:.4g} %"


def _shown(value: object) -> object:
    """Return the value of an expression in the page's template, as Jinja puts it into the page.

    Jinja calls this function for every expression. In a text, invisible characters are escaped. A
    value that is HTML already, or is no text, is returned as it is.
    """
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return printable(value)


def _marked(text: str) -> Markup:
    """Return a text as HTML.

    A mention of a paper, such as arXiv:2002.10444, becomes a link to it. Words between backquotes
    become code. All other characters are escaped.
    """
    text = printable(text)
    linked = _PAPER.sub(r'<a href="https://arxiv.org/abs/\1">arXiv:\1</a>', str(escape(text)))
    return Markup(_CODE.sub(r"<code>\1</code>", linked))


def _tiles(facts: Facts) -> Iterator[tuple[str, str, str]]:
    """Yield the boxes at the top of the page: what was measured, its value, and a line below it.

    Args:
        facts: What the page says.
    """
    if facts.report:
        yield from _report_tiles(facts.report)

    before = facts.sizes["before"]
    after = facts.sizes["after"]
    yield "norms", f"{before['norms']} → {after['norms']}", "normalization layers"
    change = f"{after['parameters'] - before['parameters']:+,}".replace("-", _MINUS)
    yield "parameters", f"{after['parameters']:,}", f"{change} by the conversion"

    if facts.accuracy:
        yield from _accuracy_tiles(facts.accuracy)


def _accuracy_tiles(accuracy: dict[str, float]) -> Iterator[tuple[str, str, str]]:
    """Yield the boxes for what was measured on images: its name, its value, and a line below it.

    Args:
        accuracy: The measured values by name, such as `result` for the top-1 of the converted
            network (`Facts.accuracy`). A name may be missing.
    """
    below = f"{accuracy['count']:,.0f} images"
    if "result" in accuracy:
        yield "top-1", f"{accuracy['result']:.2f} %", below
    if "source" in accuracy:
        yield "top-1 of the source", f"{accuracy['source']:.2f} %", below
    if "relative_l2" in accuracy:
        yield "relative L2", f"{accuracy['relative_l2']:.1e}", below
    if accuracy.get("agreement") is not None:
        yield "same answers", share(accuracy["agreement"]), below


def _report_tiles(report: Report) -> Iterator[tuple[str, str, str]]:
    """Yield the boxes for what the conversion measured: its name, its value, and a line below it.

    There is one for the largest error at the outputs in each precision. If the conversion was
    compared with its source on images, there is one for the share of images with equal answers.

    Args:
        report: The report of the conversion.
    """
    # Each precision is taken once, in the order of the report.
    for precision in dict.fromkeys(error.precision for error in report.logits):
        errors = [error.relative_l2 for error in report.logits if error.precision == precision]
        below = "at the logits"
        if report.exact and precision in report.tolerance:
            below = f"allowed: {small(report.tolerance[precision])}"
        yield f"relative L2, {precision}", small(max(errors)), below

    # An approximate conversion is compared with its source on calibration images that it was not
    # fitted to.
    kept = report.kept
    if kept and kept.agreement is not None:
        below = f"at least {kept.least_percent}%, on {kept.count} held-out calibration images"
        yield "same answers", share(kept.agreement), below
