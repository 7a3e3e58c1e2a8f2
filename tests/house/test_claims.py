"""README's figures and picture are those of the tables that scripts wrote."""

import json
import re
from collections.abc import Callable, Iterator
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

from lab.benchmarks.after_the_swap import PICTURE, figures, trained
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
Row = dict[str, str]


def text(name: str) -> str:
    found = next(path for path in (ROOT / "tests").rglob(name) if path.suffix == ".md")
    return found.read_text(encoding="utf-8")


def table(name: str) -> Iterator[Row]:
    """All rows of all tables of a file, by the words at the head of their columns."""
    head: list[str] = []
    for line in text(name).splitlines():
        if not line.startswith("|"):
            head = []
            continue

        cells = [
            cell.strip().replace("`", "").replace("*", "")
            for cell in re.split(r"(?<!\\)\|", line)[1:-1]
        ]
        if set(line) <= set("|- "):
            continue

        if not head:
            head = cells
        else:
            yield dict(zip(head, cells, strict=True))


def number(cell: str) -> float:
    return float(re.findall(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", cell)[0].replace(",", ""))


def tenths(value: float | str) -> str:
    """The number with one decimal; half a tenth is rounded up."""
    return str(Decimal(str(value)).quantize(Decimal("0.1"), ROUND_HALF_UP))


def folded_timm() -> str:
    found = re.search(r"(\d+) architectures, .*?\*\*(\d+) exact", text("summary.md"))
    assert found
    assert found[1] == found[2]
    return f"[all {found[1]}]"


def folded_elsewhere() -> str:
    """The share of exact networks among those with BatchNorms that are not too large to try."""
    rows = [row for row in table("wild.md") if "library" in row]
    left_out = ("not built", "too large", "no BatchNorm")
    with_norms = sum(number(row["walked"]) for row in rows)
    for name in left_out:
        with_norms -= sum(number(row[name]) for row in rows)
    assert sum(number(row["exact"]) for row in rows) == with_norms
    return f"[all {with_norms:.0f}]"


def same_answers() -> str:
    """The share of images with the same answer, in fp32, in all networks and formats."""
    whole = [row for row in table("export.md") if row.get("dtype") == "fp32"]
    assert whole
    assert all(row["same argmax"].startswith("10000 of 10000") for row in whole)
    return "[all 10,000]"


def int8() -> str:
    """The most top-1 that ours loses in ONNX Runtime, of five networks.

    README names beside it what the runtime's own quantizer loses on the same network.
    """
    rows = [row for row in table("int8.md") if row["format"] == "onnx"]
    assert len({row["network"] for row in rows}) == 5

    def lost(row: Row, column: str) -> float:
        return round(number(row["top-1 of fp32, %"]) - number(row[column]), 2)

    worst = max(rows, key=lambda row: lost(row, "of ours"))
    assert f"on the same network: {tenths(lost(worst, 'of tool'))})" in README
    return f"[{tenths(lost(worst, 'of ours'))}]"


def int8_speed() -> str:
    """How many times as fast ours is as the runtime's own, in ONNX Runtime."""
    ratios = [number(row["tool / ours"]) for row in table("int8.md") if row["format"] == "onnx"]
    assert len(ratios) == 5
    elsewhere = [number(row["tool / ours"]) for row in table("int8.md") if row["format"] != "onnx"]
    assert f"({min(elsewhere):.2f} to {max(elsewhere):.2f} times)" in README
    return f"[{tenths(min(ratios))} to {tenths(max(ratios))} times]"


def ended(way: str) -> dict[str, float]:
    """Where a way ended, by task of after_training.md; its first row of a task counts."""
    found: dict[str, float] = {}
    for row in table("after_training.md"):
        if row.get("way") == way and row["at the end"]:
            found.setdefault(row["task"], number(row["at the end"]))
    return found


def test_batchnorm_in_eval_mode_ends_level_with_groupnorm_or_above() -> None:
    in_eval = ended("BatchNorm in eval mode")
    groupnorm = ended("groupnorm")

    assert len(in_eval) == 8
    assert all(in_eval[task] >= groupnorm[task] for task in in_eval)
    assert "on all eight tasks measured that\n  allow it" in README


CLAIMS: dict[str, Callable[[], str]] = {
    "timm networks": folded_timm,
    "networks of torchvision": folded_elsewhere,
    "CIFAR-10 test images": same_answers,
    "top-1 lost in int8 in ONNX Runtime": int8,
    "speed of that int8 file": int8_speed,
}


def test_readme_has_the_figures_of_the_tables() -> None:
    rows = [line.split("|") for line in README.splitlines() if re.match(r"\| [^|]* \| \[", line)]

    shown: dict[str, str] = {}
    for _, subject, figure, *_ in rows:
        claim = next(claim for claim in CLAIMS if subject.strip().startswith(claim))
        shown[claim] = figure.partition("(")[0].strip()

    assert shown == {claim: figure() for claim, figure in CLAIMS.items()}


def test_the_picture_of_readme_is_of_the_table_of_today() -> None:
    """`after_the_swap.py` writes the drawn figures into the picture; it would draw the same now."""
    with Image.open(PICTURE) as picture:
        drawn = json.loads(picture.text["figures"])  # type: ignore[attr-defined]
    assert drawn == [*figures(), trained()], "run python tests/lab/benchmarks/after_the_swap.py"


TABLES = (
    "after_training.md",
    "imagenet.md",
    "kinds.md",
    "convert.md",
    "int8.md",
    "int8_without_vnni.md",
    "operators.md",
    "robot_policy.md",
)


def test_tables_say_what_they_were_made_with() -> None:
    for name in TABLES:
        head = text(name)
        assert re.search(r"^Command: `python tests/\S+\.py", head, re.M), name
        assert re.search(r"commit [0-9a-f]{7,}.*, \d{4}-\d\d-\d\d; load [\d.]+", head), name
        assert re.search(r"torch \d.*timm \d.*Python \d", head), name
