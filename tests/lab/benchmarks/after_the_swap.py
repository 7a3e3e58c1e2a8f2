"""The picture of README: accuracy right after the swap (`imagenet.md`), and after training
(`after_training.md`).

python tests/lab/benchmarks/after_the_swap.py            # writes tests/pictures/after_the_swap.png

The figures that were drawn stand in the PNG's metadata, so that a test can compare them with the
table.
"""

import json
import re
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

HERE = Path(__file__).resolve().parent
PICTURE = HERE.parents[1] / "pictures" / "after_the_swap.png"
NETWORK = "efficientnet_lite0"
SOURCE = "source, BatchNorm"
EVALUATED = "BatchNorm in eval mode"
Row = tuple[str, str]  # of the table: how, and images


def by_hand(how: str) -> tuple[Row, Row]:
    """The rows for one group and for 32 of a way by hand; `ours`: of normswap's."""
    return (f"GroupNorm, {how}", "none"), (f"32 groups, {how}", "none")


def ours(options: str = "", images: str = "none") -> tuple[Row, Row]:
    return (f"`groupnorm{options}`", images), (f"`groupnorm{options} --groups 32`", images)


BARS: dict[str, tuple[Row, ...]] = {  # what the bar is called: the rows for one group, and for 32
    "by hand: gamma and beta copied": by_hand("gamma and beta copied"),
    "by hand: copied, with the eps of normswap": by_hand("gamma and beta copied, eps as ours"),
    "by hand: moments matched, with the eps of normswap": by_hand(
        "gamma and beta matched, eps as ours"
    ),
    "groupnorm --relative-eps 0: the plain norm": ours(" --relative-eps 0"),
    "groupnorm, no images": ours(),
    "groupnorm, 100 unlabelled images": ours(images="100"),
    "skipinit: no norm, exact": (("`skipinit`", "none"),),
}
TRAINED = {  # the same for the ways of `after_training.md`
    "fresh GroupNorm": "fresh GroupNorm, groups of 16",
    "gamma and beta copied": "GroupNorm, gamma and beta copied, groups of 16",
    "the plain norm": "`groupnorm --relative-eps 0`",
    "groupnorm": "`groupnorm`",
    "skipinit": "`skipinit`",
    "frozen-bn": "`frozen-bn`",
    EVALUATED: "BatchNorm in eval mode",
    SOURCE: "BatchNorm",
}


def trained() -> dict[str, list[float]]:
    """Top-1 in percent by bar, of two images an update: at the end of training, and at once."""
    rows = re.findall(
        r"^\| two \|(.*)\|$", (HERE / "after_training.md").read_text(encoding="utf-8"), re.M
    )
    cells = {
        way: numbers
        for way, _, *numbers in ([cell.strip() for cell in row.split("|")] for row in rows)
    }
    return {
        bar: [float(cells[way][2].split()[0]), float(cells[way][0])] for bar, way in TRAINED.items()
    }


def figures() -> tuple[int, dict[str, list[float]]]:
    """How many images, and top-1 in percent by bar: for one group and for 32, or one figure that
    goes without.
    """
    table = (HERE / "imagenet.md").read_text(encoding="utf-8")
    (section,) = re.findall(
        rf"^## {NETWORK}: top-1 ([\d.]+) % of (\d+) images\n(.*?)(?=^## |\Z)", table, re.M | re.S
    )
    source, count, rows = section
    cells = [
        [cell.strip() for cell in row.split("|")[1:-1]]
        for row in rows.splitlines()
        if row.startswith("| ")
    ]
    top1 = {(how, images): value for how, images, value, *_ in cells}
    drawn = {bar: [float(top1[row]) for row in rows] for bar, rows in BARS.items()}

    return int(count), {**drawn, SOURCE: [float(source)]}


def draw(
    axes: Axes,
    bars: dict[str, list[float]],
    titles: tuple[str, str],
    by_hand: tuple[str, ...],
    *,
    pale: bool,
) -> None:
    """Draw a group of bars for each name.

    Args:
        axes: Where to draw.
        bars: At most two values by the name of their group; the first is drawn strong.
        titles: What the two values are.
        by_hand: Beginnings of the names of conversions that users do by hand.
        pale: Whether the second bar is pale, which means before training. Otherwise it is hollow.
    """
    for place, (bar, values) in enumerate(bars.items()):
        strong, weak = ("#c0392b", "#e3a29a") if bar.startswith(by_hand) else ("#2c5aa0", "#9db8dc")
        if bar in (SOURCE, EVALUATED):
            strong, weak = ("#8a8f98", "#c9ccd1")

        height = 0.8 / len(values)
        fills = (strong, weak if pale else "none")
        for i, (value, fill) in enumerate(zip(values, fills, strict=False)):
            shift = (i - (len(values) - 1) / 2) * height
            edge = "none" if fill != "none" else strong
            drawn = axes.barh(place + shift, value, height * 0.88, color=fill, edgecolor=edge)
            label = f"{value:.1f} %" if len(values) == 1 else f"{value:.1f} % {titles[i]}"
            axes.bar_label(drawn, [label], padding=4, fontsize=8)

    axes.set_yticks(range(len(bars)), list(bars), fontsize=9)
    axes.invert_yaxis()
    axes.set(xlim=(0, 125), xlabel="top-1, percent", xticks=range(0, 101, 20))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(left=False)


def main() -> None:
    count, swapped = figures()
    after = trained()
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(9.2, 7.8), dpi=150, facecolor="white")
    draw(upper, swapped, ("in one group", "in 32 groups"), ("by hand",), pale=False)
    title = (
        f"EfficientNet-Lite0, {count} ImageNet photographs: right after the swap, before any"
        " training"
    )
    upper.set_title(title, fontsize=11, x=-0.65, ha="left")
    draw(lower, after, ("at the end", "before"), ("fresh", "gamma"), pale=True)
    title = "A narrow ResNet-18 on CIFAR-10: trained on with two images an update"
    lower.set_title(title, fontsize=11, x=-0.65, ha="left")
    figure.tight_layout(h_pad=2)
    figure.savefig(PICTURE, metadata={"figures": json.dumps([count, swapped, after])})


if __name__ == "__main__":
    main()
