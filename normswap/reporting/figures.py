"""The report's figures, by matplotlib: what each shows, under which title, and what is to be said
about it.
"""

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from normswap.analysis import plots
from normswap.reporting.report import Facts
from normswap.surgery.report import Report

ALPHA = "\N{GREEK SMALL LETTER ALPHA}"
_MEASURED = plots.COLOURS[0]
_REFERENCE = "0.4"


@dataclass(frozen=True)
class Figure:
    """A figure with its title and caption; the picture is an SVG, as an address that holds all its
    data.
    """

    title: str
    picture: str
    caption: str


def sites(facts: Facts, report: Report) -> Figure:
    """Show the error at the output of every block."""
    stages = {block.path: block.stage for block in facts.blocks}
    errors = [error.relative_l2 for error in report.sites]
    precision = report.sites[0].precision
    axes = _axes()
    axes.semilogy(
        range(1, len(errors) + 1),
        errors,
        "o-",
        color=_MEASURED,
        label=f"result against source, {precision}",
    )
    if report.exact:
        axes.axhline(
            report.tolerance[precision],
            color=_REFERENCE,
            linestyle="--",
            label="allowed at the logits",
        )
    axes.set_ylabel("relative L2 error")
    plots.over_blocks(axes, [stages.get(error.site, "") for error in report.sites])
    caption = "|result - source| / |source| at each block's output; an error of 0 is not drawn."
    return Figure("Error per residual block", _svg(axes), caption)


def signal(facts: Facts) -> Iterator[Figure]:
    """Show how the signal propagates: variance and mean after the sum, variance of what is added."""
    names = {"before": "source", "after": "result"}
    curves = {names[network]: points for network, points in facts.signal.items()}
    for quantity, title, label in (
        ("variance", "Variance after the sum", "average channel variance"),
        ("mean_sq", "Squared mean after the sum", "average channel squared mean"),
        ("added_variance", "Variance at the end of the branch", "average channel variance"),
    ):
        axes = _axes()
        plots.draw(axes, curves, quantity, label)
        yield Figure(title, _svg(axes), f"{label.capitalize()}, over batch and positions.")


def alphas(facts: Facts) -> Figure:
    """Show the scalars at the ends of the branches, against what a paper proposes."""
    depths = {block.path: depth for depth, block in enumerate(facts.blocks, 1)}
    values = {depths[alpha.block]: alpha.value for alpha in facts.alphas if alpha.block in depths}
    axes = _axes()
    start = f"1/√{len(facts.blocks)}"
    axes.stem([*values], [*values.values()], label="alpha", basefmt="none")
    axes.axhline(len(facts.blocks) ** -0.5, color=_REFERENCE, linestyle="--", label=start)
    axes.set_ylabel("alpha")
    plots.over_blocks(axes, [block.stage for block in facts.blocks])
    caption = (
        f"y = skip + {ALPHA}·f(x). Deep networks train from {start} or less; De & Smith 2020"
        " propose 0."
    )
    return Figure("Alpha per residual block", _svg(axes), caption)


def _axes() -> Axes:
    axes: Axes = Drawing((5.8, 3.6), layout="constrained").subplots()
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
