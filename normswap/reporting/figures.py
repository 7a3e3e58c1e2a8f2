"""The report's figures, drawn by matplotlib, each with its title and caption."""

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from normswap.analysis import plots
from normswap.proof.verdict import Report
from normswap.reporting.report import Facts

ALPHA = "\N{GREEK SMALL LETTER ALPHA}"
_MEASURED = plots.COLOURS[0]
_REFERENCE = "0.4"
# The quantities of the signal, with the title of the figure and the label of its axis.
_QUANTITIES = (
    ("variance", "Variance after the sum", "average channel variance"),
    ("mean_sq", "Squared mean after the sum", "average channel squared mean"),
    ("added_variance", "Variance at the end of the branch", "average channel variance"),
)


@dataclass(frozen=True)
class Figure:
    """A figure of the HTML page, with its title and caption.

    Args:
        title: The title.
        picture: The SVG as a `data:` address, which holds all of the picture.
        caption: The sentence below the picture.
    """

    title: str
    picture: str
    caption: str


def sites(facts: Facts, report: Report) -> Figure:
    """Return a figure of the error at the output of every residual block.

    Args:
        facts: What the page says. Here it tells the stages of the blocks.
        report: The report of the conversion, with the measured error of each block.
    """
    stages = {block.path: block.stage for block in facts.blocks}
    errors = [error.relative_l2 for error in report.sites]
    precision = report.sites[0].precision

    axes = _axes()
    depths = range(1, len(errors) + 1)
    label = f"result against source, {precision}"
    axes.semilogy(depths, errors, "o-", color=_MEASURED, label=label)
    if report.exact:
        allowed = report.tolerance[precision]
        label = "allowed at the logits"
        axes.axhline(allowed, color=_REFERENCE, linestyle="--", label=label)
    axes.set_ylabel("relative L2 error")
    plots.over_blocks(axes, [stages.get(error.site, "") for error in report.sites])

    caption = "|result - source| / |source| at each block's output; an error of 0 is not drawn."
    return Figure("Error per residual block", _svg(axes), caption)


def signal(facts: Facts) -> Iterator[Figure]:
    """Yield a figure for each quantity of the signal, with the curves of source and result.

    The quantities are the variance after a block's sum, its squared mean, and the variance that the
    branch adds. Each curve goes from residual block to block.

    Args:
        facts: What the page says, with the measured signal of the network before and after the
            conversion.
    """
    names = {"before": "source", "after": "result"}
    curves = {names[network]: points for network, points in facts.signal.items()}
    is_log = plots.is_logarithmic(curves, [quantity for quantity, _, _ in _QUANTITIES])
    for quantity, title, label in _QUANTITIES:
        axes = _axes()
        plots.draw(axes, curves, quantity, label, is_log=is_log)
        yield Figure(title, _svg(axes), f"{label.capitalize()}, over batch and positions.")


def alphas(facts: Facts) -> Figure:
    """Return a figure of the scalars at the ends of the residual branches.

    A dashed line shows 1 / sqrt(number of blocks), the largest value from which deep networks can
    be trained.
    """
    # A scalar that ends no block of the source has no place on the x axis and is left out.
    depths = {block.path: depth for depth, block in enumerate(facts.blocks, 1)}
    values = {depths[alpha.block]: alpha.value for alpha in facts.alphas if alpha.block in depths}
    start = f"1/√{len(facts.blocks)}"

    axes = _axes()
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
    """Return the matplotlib axes of a new, empty drawing."""
    axes: Axes = Drawing((5.8, 3.6), layout="constrained").subplots()
    return axes


def _svg(axes: Axes) -> str:
    """Return a drawing as a `data:` address, which holds the whole SVG.

    Equal drawings have equal addresses.

    Args:
        axes: The axes of the drawing. If they have labelled curves, a legend is added.
    """
    drawing = axes.figure
    assert isinstance(drawing, Drawing)
    if axes.get_legend_handles_labels()[1]:
        drawing.legend(loc="outside lower center", ncols=3, frameon=False)

    # matplotlib would write the date, and ids that differ from run to run.
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "normswap"}):
        drawing.savefig(buffer, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"
