"""Residual stacks of fully connected layers, as De & Smith 2020 analyse them, measured with
`analysis.signal_propagation`; and what the scripts here share: their command line and the table they print.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from normswap.analysis.signal_propagation import signal
from normswap.surgery.network import Network


class Block(nn.Module):
    """y = x + W act(norm(x)), with Var(W) = 1 / width (linear) or 2 / width (ReLU)."""

    def __init__(self, width: int, *, normalized: bool, relu: bool) -> None:
        super().__init__()
        self.norm: nn.Module = nn.BatchNorm1d(width, eps=1e-12) if normalized else nn.Identity()
        self.act: nn.Module = nn.ReLU() if relu else nn.Identity()
        self.linear = nn.Linear(width, width, bias=False)
        nn.init.normal_(self.linear.weight, std=math.sqrt((2 if relu else 1) / width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.act(self.norm(x)))


@dataclass(frozen=True)
class Stack:
    """What was measured in one stack; the lists start at block l = 1.

    Args:
        variance: of the input x^l of block l, which its BatchNorm's moving variance estimates.
        mean_sq: its squared mean.
        branch: variance at the end of branch l.
    """

    variance: list[float]
    mean_sq: list[float]
    branch: list[float]


def measure(*, depth: int, width: int, batch: int, seed: int, normalized: bool, relu: bool) -> Stack:
    """One stack at initialization, on N(0, 1) inputs, in float64."""
    torch.manual_seed(seed)
    with torch.device("cpu"):
        model = nn.Sequential(*(Block(width, normalized=normalized, relu=relu) for _ in range(depth))).double()
        x = torch.randn(batch, width, dtype=torch.float64)
    points = signal(Network(model, x), batch_statistics=True)
    inputs = [(float(x.mean(0).square().mean()), float(x.var(0, correction=0).mean()))]
    inputs += [(point.mean_sq, point.variance) for point in points[:-1]]
    return Stack([v for _, v in inputs], [m for m, _ in inputs], [point.branch_variance for point in points])


def average(runs: Sequence[Sequence[float]]) -> list[float]:
    """The mean over seeds, element by element."""
    return [sum(values) / len(values) for values in zip(*runs, strict=True)]


def worst(measured: Sequence[float], theory: Sequence[float]) -> float:
    """The largest relative deviation."""
    return max(abs(m / t - 1) for m, t in zip(measured, theory, strict=True))


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Slope of the least-squares line."""
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def options(what: str | None, **defaults: int) -> argparse.Namespace:
    """The command line of a script: integers, and the picture to write."""
    parser = argparse.ArgumentParser(description=(what or "").split("\n")[0])
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("-o", "--output", type=Path, metavar="PNG", help="picture to write")
    return parser.parse_args()


def table(columns: str, rows: Sequence[Sequence[object]]) -> None:
    """Print right-aligned columns."""
    cells = [columns.split("|")]
    cells += [[f"{value:.4g}" if isinstance(value, float) else str(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
