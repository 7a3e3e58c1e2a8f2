"""De & Smith 2020 (arXiv:2002.10444), figure 2, linear stacks: what normalization does to the variance with depth.

Unnormalized, y = x + W x doubles the variance in every block: Var(x^l) = 2^(l - 1). Normalized, y = x + W BN(x) adds
the branch's variance, 1: Var(x^l) = l, and the branch shrinks against the skip path as 1 / l (section 2).

    python tests/lab/measurements/de_smith_linear.py -o linear.png       # a minute of CPU time
"""

from __future__ import annotations

from matplotlib.figure import Figure
from stacks import average, measure, options, table, worst

from normswap.analysis import plots


def compare(*, depth: int, width: int, batch: int, seeds: int) -> dict[str, tuple[list[float], list[float]]]:
    """(measured, theory) by name, at block l = 1, 2, ..., averaged over seeds."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    blocks = range(1, depth + 1)
    for normalized in (False, True):
        runs = [
            measure(depth=depth, width=width, batch=batch, seed=seed, normalized=normalized, relu=False)
            for seed in range(seeds)
        ]
        variance, branch = average([run.variance for run in runs]), average([run.branch for run in runs])
        if normalized:
            found["normalized, skip path"] = variance, [float(block) for block in blocks]
            found["normalized, branch"] = branch, [1.0] * depth
        else:
            found["unnormalized, skip path"] = variance, [2.0 ** (block - 1) for block in blocks]
    return found


def main() -> None:
    args = options(__doc__, depth=100, width=1000, batch=1000, seeds=3)
    found = compare(depth=args.depth, width=args.width, batch=args.batch, seeds=args.seeds)
    shown = [block for block in (1, 2, 5, 10, 20, 50, 100) if block <= args.depth]
    for name, (measured, theory) in found.items():
        print(f"\n{name}: largest deviation {100 * worst(measured, theory):.1f} %")
        table("block|measured|theory", [(block, measured[block - 1], theory[block - 1]) for block in shown])
    if args.output:
        figure = Figure(figsize=(7, 5), layout="constrained")
        axes = figure.subplots()
        for i, (name, (measured, theory)) in enumerate(found.items()):
            x = range(1, len(measured) + 1)
            axes.plot(
                x, theory, color="0.35", linewidth=4, alpha=0.45, label=None if i else "theory: $2^{l-1}$, $l$, 1"
            )
            plots.line(axes, x, measured, i, name)
        plots.label_axes(axes, "residual block $l$", "Variance of the activations", "input variance = 1", log=True)
        axes.set_ylim(0.5, 1e6)
        axes.legend(fontsize=11)
        axes.set_title(
            f"Linear residual stacks, width {args.width}, batch {args.batch}, {args.seeds} seeds", fontsize=12
        )
        print(f"\nwritten to {plots.save(figure, args.output)}")


if __name__ == "__main__":
    main()
