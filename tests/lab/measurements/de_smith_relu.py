"""De & Smith 2020 (arXiv:2002.10444), figure 5 and appendix C: the moving statistics of normalized ReLU stacks.

y = x + W relu(BN(x)) with Var(W) = 2 / width. relu(N(0, 1)) has mean 1 / sqrt(2 pi) and variance (1 - 1/pi) / 2, so
each branch adds variance 1 - 1/pi over the inputs, and, as the mean of relu meets random weights, a mean per channel
whose square is 1/pi on average. So at block l BatchNorm's moving variance is about l (1 - 1/pi), and its squared moving
mean about l / pi. Exactly, from an input of variance 1 and mean 0: 1 + (l - 1)(1 - 1/pi) and (l - 1) / pi.

    python tests/lab/measurements/de_smith_relu.py -o relu.png       # a minute of CPU time
"""

from __future__ import annotations

import math

from matplotlib.figure import Figure
from stacks import average, measure, options, slope, table

from normswap.analysis import plots

RATES = {"moving variance": 1 - 1 / math.pi, "squared moving mean": 1 / math.pi, "variance of the branch": 0.0}


def compare(*, depth: int, width: int, batch: int, seeds: int) -> dict[str, list[float]]:
    """The measured values at block l = 1, 2, ..., averaged over seeds."""
    runs = [
        measure(depth=depth, width=width, batch=batch, seed=seed, normalized=True, relu=True) for seed in range(seeds)
    ]
    fields = ("variance", "mean_sq", "branch")
    return {name: average([getattr(run, field) for run in runs]) for name, field in zip(RATES, fields, strict=True)}


def rates(found: dict[str, list[float]]) -> dict[str, float]:
    """How much each value grows per block, by least squares."""
    return {name: slope(range(1, len(values) + 1), values) for name, values in found.items()}


def main() -> None:
    args = options(__doc__, depth=100, width=1000, batch=1000, seeds=3)
    found = compare(depth=args.depth, width=args.width, batch=args.batch, seeds=args.seeds)
    measured = rates(found)
    table("per block|measured|theory", [(name, measured[name], RATES[name]) for name in RATES])
    branch = found["variance of the branch"]
    print(f"variance of the branch: {sum(branch) / len(branch):.4f}, theory {1 - 1 / math.pi:.4f}\n")
    shown = [block for block in (1, 2, 5, 10, 20, 50, 100) if block <= args.depth]
    table(
        "block|moving variance|l (1 - 1/pi)|squared moving mean|l / pi",
        [(b, found['moving variance'][b - 1], b * (1 - 1 / math.pi), found['squared moving mean'][b - 1], b / math.pi)
         for b in shown],
    )  # fmt: skip
    if args.output:
        figure = Figure(figsize=(7, 5), layout="constrained")
        axes = figure.subplots()
        x = range(1, args.depth + 1)
        for i, (name, rate, label) in enumerate(
            [("moving variance", 1 - 1 / math.pi, "$l(1-1/\\pi)$"), ("squared moving mean", 1 / math.pi, "$l/\\pi$")]
        ):
            axes.plot(
                x,
                [block * rate for block in x],
                color="0.35",
                linewidth=4,
                alpha=0.45,
                linestyle=("-", ":")[i],
                label=label,
            )
            plots.line(axes, x, found[name], i, name)
        plots.line(axes, x, branch, 2, "variance of the branch")
        plots.label_axes(
            axes, "residual block $l$", "Statistics of the block's BatchNorm", "input variance = 1", log=False
        )
        axes.legend(fontsize=11)
        axes.set_title(f"Normalized ReLU, width {args.width}, batch {args.batch}, {args.seeds} seeds", fontsize=12)
        print(f"\nwritten to {plots.save(figure, args.output)}")


if __name__ == "__main__":
    main()
