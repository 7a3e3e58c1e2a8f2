"""The picture of README: accuracy right after the swap, by hand and by normswap, as `imagenet.md` has it.

python tests/lab/benchmarks/after_the_swap.py            # writes tests/pictures/after_the_swap.png
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
TABLE, PICTURE = HERE / "imagenet.md", HERE.parents[1] / "pictures" / "after_the_swap.png"
NETWORK = "efficientnet_lite0"
BARS = {  # (how, images) of the table: what the bar is called
    ("GroupNorm, fresh", "none"): "by hand: a fresh GroupNorm",
    ("GroupNorm, gamma and beta copied", "none"): "by hand: GroupNorm with gamma and beta copied",
    ("`groupnorm`", "none"): "normswap groupnorm, no images",
    ("`groupnorm`", "100"): "normswap groupnorm, 100 unlabelled images",
    ("`skipinit`", "none"): "normswap skipinit, exact",
}


def figures(table: str) -> tuple[int, dict[str, float]]:
    """How many images, and top-1 in percent by what the bar is called, the source's at the end."""
    (section,) = re.findall(rf"^## {NETWORK}: top-1 ([\d.]+) % of (\d+) images\n(.*?)(?=^## |\Z)", table, re.M | re.S)
    source, count, rows = section
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows.splitlines() if row.startswith("| ")]
    top1 = {(how, images): value for how, images, value, *_ in cells}
    return int(count), {**{name: float(top1[row]) for row, name in BARS.items()}, "source, BatchNorm": float(source)}


def main() -> None:
    count, top1 = figures(TABLE.read_text(encoding="utf-8"))
    figure, axes = plt.subplots(figsize=(8.4, 2.9), dpi=150, facecolor="white")
    colours = ["#c0392b", "#c0392b", "#2c5aa0", "#2c5aa0", "#2c5aa0", "#8a8f98"]  # by hand, ours, the source
    bars = axes.barh(list(top1), list(top1.values()), color=colours, height=0.66)
    axes.bar_label(bars, [f"{value:.1f} %" for value in top1.values()], padding=4)
    axes.invert_yaxis()
    axes.set(xlim=(0, 100), xlabel="top-1, percent")
    title = f"EfficientNet-Lite0 on {count} ImageNet photographs, right after the swap, before any training"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(left=False)
    figure.tight_layout()
    figure.savefig(PICTURE)


if __name__ == "__main__":
    main()
