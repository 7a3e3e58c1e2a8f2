"""The picture of README: accuracy right after the swap, by hand and by normswap, as `imagenet.md` has it.

python tests/lab/benchmarks/after_the_swap.py            # writes tests/pictures/after_the_swap.png

The figures that were drawn stand in the PNG's metadata, so that a test can compare them with the table.
"""

import json
import re
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
TABLE, PICTURE = HERE / "imagenet.md", HERE.parents[1] / "pictures" / "after_the_swap.png"
NETWORK = "efficientnet_lite0"
SOURCE = "source, BatchNorm"
Row = tuple[str, str]  # of the table: how, and images
BARS: dict[str, tuple[Row, Row | None]] = {  # what the bar is called: the rows for one group, and for 32
    "by hand: gamma and beta copied": (
        ("GroupNorm, gamma and beta copied", "none"),
        ("32 groups, gamma and beta copied", "none"),
    ),
    "by hand: copied, with the eps of normswap": (
        ("GroupNorm, gamma and beta copied, eps as ours", "none"),
        ("32 groups, gamma and beta copied, eps as ours", "none"),
    ),
    "by hand: moments matched, with the eps of normswap": (
        ("GroupNorm, gamma and beta matched, eps as ours", "none"),
        ("32 groups, gamma and beta matched, eps as ours", "none"),
    ),
    "groupnorm --relative-eps 0: the plain norm": (
        ("`groupnorm --relative-eps 0`", "none"),
        ("`groupnorm --relative-eps 0 --groups 32`", "none"),
    ),
    "groupnorm, no images": (("`groupnorm`", "none"), ("`groupnorm --groups 32`", "none")),
    "groupnorm, 100 unlabelled images": (("`groupnorm`", "100"), ("`groupnorm --groups 32`", "100")),
    "skipinit: no norm, exact": (("`skipinit`", "none"), None),
}


def figures(table: str) -> tuple[int, dict[str, list[float]]]:
    """How many images, and top-1 in percent by bar: for one group and for 32, or one figure that goes without."""
    (section,) = re.findall(rf"^## {NETWORK}: top-1 ([\d.]+) % of (\d+) images\n(.*?)(?=^## |\Z)", table, re.M | re.S)
    source, count, rows = section
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows.splitlines() if row.startswith("| ")]
    top1 = {(how, images): value for how, images, value, *_ in cells}
    drawn = {bar: [float(top1[row]) for row in rows if row] for bar, rows in BARS.items()}
    return int(count), {**drawn, SOURCE: [float(source)]}


def main() -> None:
    count, top1 = figures(TABLE.read_text(encoding="utf-8"))
    figure, axes = plt.subplots(figsize=(9.2, 4.4), dpi=150, facecolor="white")
    for place, (bar, values) in enumerate(top1.items()):
        strong, light = ("#8a8f98", "") if bar == SOURCE else ("#2c5aa0", "#9db8dc")
        strong, light = ("#c0392b", "#e3a29a") if bar.startswith("by hand") else (strong, light)
        height = 0.8 / len(values)
        for i, (value, colour) in enumerate(zip(values, (strong, light), strict=False)):
            shift = (i - (len(values) - 1) / 2) * height
            label = f"{value:.1f} %" + ("" if len(values) == 1 else (" in one group", " in 32 groups")[i])
            axes.bar_label(axes.barh(place + shift, value, height * 0.9, color=colour), [label], padding=4, fontsize=8)
    axes.set_yticks(range(len(top1)), list(top1), fontsize=9)
    axes.invert_yaxis()
    axes.set(xlim=(0, 112), xlabel="top-1, percent", xticks=range(0, 101, 20))
    title = f"EfficientNet-Lite0 on {count} ImageNet photographs, right after the swap, before any training"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(left=False)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"figures": json.dumps([count, top1])})


if __name__ == "__main__":
    main()
