"""Kim et al. 2022 (arXiv:2205.07260), figure 5: the variance along a ResNet at initialization.

Reset: in the first block of a stage both arms end in a norm (v1) or begin with one (v2), so the variance there depends
on gamma_down and gamma_last alone, whatever came before. Accumulation, where E[relu(N(0, g^2))^2] = g^2 / 2:

- v2 (pre-activation), with Var(W) = 1 / fan_in in the last convolution of each arm: every arm carries half the variance
  of its gamma, and the second moment after l blocks is (gamma_down^2 + l gamma_last^2) / 2.
- v1 (post-activation): z = relu(z before) + branch, from Var(z) = gamma_down^2 + gamma_last^2. The ReLU halves E[z^2]
  once, after the reset, where z is symmetric about 0; then z has a mean per channel, which the skip path carries on.
  The distribution of z is that of a random walk reflected at 0 (Lindley's recursion, solved on a grid); far from the
  reset its variance grows by gamma_last^2 (1 - 2/pi) per block.

The recursion for v1 is ours. The text of the paper was not at hand when this was written: "half-variance accumulation",
its equation 11, is taken to be the halving above.

    python tests/lab/measurements/kim_variance.py -o variance.png       # a minute of CPU time
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import timm
import torch
from matplotlib.figure import Figure
from stacks import average, options, table, worst
from torch import nn

from normswap.analysis import plots
from normswap.analysis.signal_propagation import signal
from normswap.graph import inspection
from normswap.surgery.network import Network

Moments = tuple[list[float], list[float]]
CASES = ((1.0, 1.0), (1.0, 0.5), (0.5, 1.0))


def theory_v1(starts: Sequence[bool], down: float, last: float) -> Moments:
    """Squared mean and variance of z after each block.

    Args:
        starts: whether a block is its stage's first.
        down, last: gamma_down and gamma_last.
    """
    z = torch.linspace(-8, 24, 3201, dtype=torch.float64)  # in units of gamma_last, far wider than what is reached
    step = float(z[1] - z[0])
    kernel = torch.exp(-0.5 * (z[:, None] - z[None, z >= 0]).square()) / math.sqrt(2 * math.pi)
    mean_sq, variance = [], []
    for first in starts:
        if first:
            width = math.hypot(down / last, 1)
            density = torch.exp(-0.5 * (z / width).square()) / (width * math.sqrt(2 * math.pi))
        else:
            stopped = float(density[z < 0].sum() + 0.5 * density[z == 0].sum()) * step
            weight = torch.ones_like(z[z >= 0])
            weight[0] = 0.5
            density = kernel @ (density[z >= 0] * weight) * step
            density = density + stopped * torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
        mean = float((density * z).sum()) * step
        mean_sq.append(mean**2 * last**2)
        variance.append((float((density * z.square()).sum()) * step - mean**2) * last**2)
    return mean_sq, variance


def theory_v2(starts: Sequence[bool], down: float, last: float) -> list[float]:
    """The second moment after each block: (gamma_down^2 + l gamma_last^2) / 2 in the l-th block of a stage."""
    second: list[float] = []
    for first in starts:
        second.append((down**2 / 2 if first else second[-1]) + last**2 / 2)
    return second


def measure(
    name: str, *, seeds: int, batch: int, side: int, down: float = 1.0, last: float = 1.0
) -> tuple[list[float], list[float], list[bool]]:
    """Squared mean and variance after each block, averaged over seeds, and which blocks are their stage's first."""
    runs = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = timm.create_model(name, zero_init_last=False)
        seen = inspection.inspect(model)
        for norm in seen.norms:
            if norm.role in ("down", "last"):
                nn.init.constant_(model.get_submodule(norm.path).weight, down if norm.role == "down" else last)
        for path, module in model.named_modules():
            if isinstance(module, nn.Conv2d) and path.endswith(("conv3", "downsample.conv")):
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")  # 1 / fan_in; v1 has a norm behind it
        runs.append(signal(Network(model), torch.randn(batch, 3, side, side), batch_statistics=True))
    starts = [block.skip == "projection" for block in seen.blocks]
    mean_sq, variance = (average([[getattr(p, f) for p in run] for run in runs]) for f in ("mean_sq", "variance"))
    return mean_sq, variance, starts


def compare_v1(name: str, down: float, last: float, **sizes: int) -> tuple[Moments, Moments, list[bool]]:
    """Measured and expected squared mean and variance."""
    mean_sq, variance, starts = measure(name, down=down, last=last, **sizes)
    return (mean_sq, variance), theory_v1(starts, down, last), starts


def compare_v2(name: str, down: float, last: float, **sizes: int) -> tuple[list[float], list[float], list[bool]]:
    """Measured and expected second moment."""
    mean_sq, variance, starts = measure(name, down=down, last=last, **sizes)
    return [m + v for m, v in zip(mean_sq, variance, strict=True)], theory_v2(starts, down, last), starts


def show(axes: object, i: int, measured: list[float], wanted: list[float], down: float, last: float) -> None:
    x = range(1, len(measured) + 1)
    axes.plot(x, wanted, color="0.35", linewidth=4, alpha=0.4, label=None if i else "theory")  # type: ignore[attr-defined]
    plots.line(axes, x, measured, i, f"$\\gamma_{{down}}$ {down:g}, $\\gamma_{{last}}$ {last:g}")


def main() -> None:
    args = options(__doc__, seeds=3, batch=8, side=64)
    sizes = {"seeds": args.seeds, "batch": args.batch, "side": args.side}
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, (down, last) in enumerate(CASES):
        (means, variances), (wanted_means, wanted), starts = compare_v1("resnet50", down, last, **sizes)
        resets = [v for v, first in zip(variances, starts, strict=True) if first]
        print(
            f"\ngamma_down {down}, gamma_last {last}\nresnet50: variance off by {100 * worst(variances, wanted):.1f} %"
        )
        print(f"reset at each stage: {', '.join(f'{v:.3f}' for v in resets)}; theory {down**2 + last**2:.3f}")
        rows = list(zip(range(1, 17), variances, wanted, means, wanted_means, strict=True))[7:13]
        table("block|variance|theory|squared mean|theory", rows)
        show(left, i, variances, wanted, down, last)
        seconds, wanted, starts = compare_v2("resnetv2_50", down, last, **sizes)
        print(f"resnetv2_50, E[z^2]: off by {100 * worst(seconds, wanted):.1f} %")
        table("block|second moment|theory", list(zip(range(1, 17), seconds, wanted, strict=True))[7:13])
        show(right, i, seconds, wanted, down, last)
    plots.label_axes(left, "residual block", "Average channel variance, resnet50", "activation units²", log=False)
    plots.label_axes(right, "residual block", "Second moment, resnetv2_50", "activation units²", log=False)
    for axes in (left, right):
        axes.legend(fontsize=10)
    if args.output:
        print(f"\nwritten to {plots.save(figure, args.output)}")


if __name__ == "__main__":
    main()
