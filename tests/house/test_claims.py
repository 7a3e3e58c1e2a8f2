"""README says what the tables say: every sentence with a measured figure is written here from its table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
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
        cells = [cell.strip().replace("`", "").replace("*", "") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if set(line) <= set("|- "):
            continue
        if not head:
            head = cells
        else:
            yield dict(zip(head, cells, strict=True))


def number(cell: str) -> float:
    return float(re.findall(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", cell)[0].replace(",", ""))


def tenths(value: float | str) -> str:
    """Half a tenth is rounded up."""
    return str(Decimal(str(value)).quantize(Decimal("0.1"), ROUND_HALF_UP))


def span(values: Iterable[float]) -> tuple[str, str]:
    known = list(values)
    return tenths(min(known)), tenths(max(known))


def wild(library: str) -> tuple[str, str]:
    """Exact networks, of those with BatchNorm."""
    (row,) = (row for row in table("wild.md") if row.get("library") == library)
    found = number(row["walked"]) - sum(number(row[name]) for name in ("not built", "too large", "no BatchNorm"))
    assert number(row["refused"]) == number(row["not built"]) == 0
    assert number(row["exact"]) >= 0.97 * found
    return row["exact"], f"{found:.0f}"


def dressed() -> tuple[str, ...]:
    """Networks of other libraries: listed, walked, too large; those that take GroupNorm, of all that were tried."""
    rows = [row for row in table("wild.md") if "library" in row]
    names = ("listed", "walked", "too large", "groupnorm runs", "groupnorm refused", "groupnorm other")
    listed, walked, large, runs, refused, other = (sum(number(row[name]) for row in rows) for name in names)
    assert other == 0
    return tuple(f"{count:.0f}" for count in (listed, walked, large, runs, runs + refused))


def timms() -> tuple[str, str]:
    found = re.search(r"(\d+) architectures, .*?\*\*(\d+) exact", text("summary.md"))
    complete = re.search(r"fx\.fuse: .*?(\d+) complete", text("summary.md"))
    assert found
    assert complete
    assert found[1] == found[2]
    return found[1], complete[1]


def recovered() -> tuple[str, str]:
    """By how much they end below BatchNorm: the worst but the annealed, and the annealed where it misses."""
    gaps = {(row["network"], row["to"]): number(row["to BN's"]) for row in table("recover.md") if "to BN's" in row}
    annealed = {at: gap for at, gap in gaps.items() if "annealed" in at[1]}
    worst = -min(gap for at, gap in gaps.items() if at not in annealed)
    assert worst <= 0.3
    return "0.3", tenths(-min(annealed.values()))


def recovered_kinds() -> tuple[str, str]:
    rows = [row for row in table("recover_kinds.md") if row.get("to") == "groupnorm"]
    assert all(row["runs"] == "2" for row in rows)
    assert len(rows) == 4
    return span(-number(row["to BN's"]) for row in rows)


def small_batches() -> tuple[str, str, str]:
    lost = {row["to"]: -number(row["change"]) for row in table("small_batch.md") if row.get("batch") == "2"}
    own, clipped = lost.pop("bn"), lost.pop("bn, clipped as skipinit")
    return tenths(own), tenths(clipped), tenths(max(lost.values()))


def exports() -> tuple[str, str]:
    rows = [row for row in table("export.md") if "same argmax" in row]
    whole = [row for row in rows if row["dtype"] == "fp32"]
    assert whole
    assert all(row["same argmax"].startswith("10000 of 10000") for row in whole)
    half = min(number(row["same argmax"]) for row in rows if row["dtype"] != "fp32")
    return "10,000", "99.9" if half >= 9990 else f"{half / 100:.2f}"


def int8() -> tuple[str, ...]:
    """How many networks, and the most that ours loses of one in ONNX Runtime."""
    rows = [row for row in table("int8.md") if row["runtime"] == "onnx"]
    count = {5: "five", 6: "six"}[len({row["network"] for row in rows})]
    return count, tenths(max(round(number(row["fp32"]) - number(row["ours"]), 2) for row in rows))


def mobilenet() -> tuple[str, ...]:
    """Per tensor in both runtimes."""
    found: list[str] = []
    for runtime in ("onnx", "openvino"):
        (row,) = (
            r for r in table("int8.md")
            if (r["network"], r["runtime"], r["step per"]) == ("mobilenetv2_035", runtime, "tensor")
        )  # fmt: skip
        found += [row["fp32"]] * (runtime == "onnx") + [row["tool, defaults"], row["tool, safe"], row["ours"]]
    return tuple(tenths(one) for one in found)


def int8_answers() -> tuple[str, ...]:
    """How often files give fp32's answer: ours with 7 and with 8 bits, then the tools'."""
    pairs = re.findall(
        r"^- ours.* against (safe|defaults), .* fp32 on ([\d.]+) against ([\d.]+) %", text("int8.md"), re.M
    )
    (_, seven, sevens), (_, eight, eights), _ = pairs
    return tuple(map(tenths, (seven, eight, sevens, eights)))


def int8_views() -> tuple[str, ...]:
    """The least and the most that ours leads by over views, in all three comparisons."""
    spans = re.findall(
        r"over views, \d+ pairs: \S+ on average, (\S+) to ([^,\s]+), standard error 0.0", text("int8.md")
    )
    assert len(spans) == 3
    return tenths(-min(float(low) for low, _ in spans)), tenths(max(float(high) for _, high in spans))


def int8_scores() -> tuple[str, ...]:
    """How far ours with 7 bits are from fp32 beside the tools' with 7 bits, and how many are nearer."""
    (found,) = re.findall(
        r"^- ours against safe, .*; its scores are ([\d.]+) times as far from fp32's \((\d+) of (\d+) are nearer\)",
        text("int8_without_vnni.md"), re.M,
    )  # fmt: skip
    return tuple(found)


def int8_speed() -> tuple[str, ...]:
    """Against ours in fp32 in either runtime, and against timm in eager mode."""
    rows = list(table("int8_speed.md"))
    onnx, openvino = ([number(r["ours / fp32"]) for r in rows if r["runtime"] == name]
                      for name in ("onnxruntime", "openvino"))  # fmt: skip
    return *span(onnx), *span(openvino), *span(number(row["ours / eager"]) for row in rows)


def cost() -> tuple[str, ...]:
    rows = {row["to"]: row for row in table("convert.md")}
    times = [map(tenths, re.findall(r"[\d.]+", rows[to]["time"])) for to in ("skipinit", "groupnorm")]
    (median, least, most), (_, low, high) = times
    return least, most, median, tenths(number(rows["skipinit"]["peak"])), low, high


def speed() -> tuple[str, str]:
    """The fastest of ours against eager mode with one image, network by network."""
    best: dict[str, float] = {}
    for row in table("runtimes.md"):
        if row.get("batch") == "1" and row.get("ours x eager"):
            best[row["network"]] = max(best.get(row["network"], 0), number(row["ours x eager"]))
    return span(best.values())


def loading() -> tuple[str, str]:
    """The least and the most of the time that opening takes with weights beside the graph."""
    return span(1 / number(row["onnx / data"]) for row in table("loading.md"))


def same_operators() -> tuple[str]:
    """Of how many networks all three runtimes run the same; of normalizer-free ones two run nothing else."""
    found: dict[str, set[str]] = {}
    for row in table("operators.md"):
        found.setdefault(row["network"], set()).add(row["ours has"])
        if row["network"] in NORM_FREE and row["runtime"] in ("onnxruntime", "openvino"):
            assert row["ours has"] in ("same", "fewer")
    return ({5: "five"}[sum(said == {"same"} for said in found.values())],)


def accuracy(network: str) -> tuple[str, ...]:
    """As `schemes.md` has it: top-1 of the source and of its folded form, and the distance."""
    (row,) = (r for r in table("schemes.md") if (r.get("network"), r.get("to")) == (network, "folded"))
    return row["top-1 before"], row["after"], row["relative L2"]


NORM_FREE = ("nf_resnet50", "eca_nfnet_l0", "dm_nfnet_f0")  # of operators.md
CLAIMS: dict[str, Callable[[], tuple[str, ...]]] = {
    "timm: all {} architectures with BatchNorm and at most 100 M parameters fold exactly (1e-8 in float64), no norm "
    "left; torch.fx's own fuser completes {}": timms,
    "torchvision {} of {}": lambda: wild("torchvision"),
    "segmentation_models_pytorch {} of {}": lambda: wild("smp"),
    "Ultralytics {} of {}": lambda: wild("ultralytics"),
    "MONAI {} of {}": lambda: wild("monai"),
    "OpenCLIP {} of {}": lambda: wild("open_clip"),
    "transformers {} of {}": lambda: wild("transformers"),
    "Of {} networks on the list {} were walked, {} is too large to try. `groupnorm --steady 0` runs on {} of {}":
        dressed,
    "end within {} points of BatchNorm trained the same way; NF with its means kept and annealed ends {} points below":
        recovered,
    "four small networks of other kinds GroupNorm ends {} to {} points below BatchNorm": recovered_kinds,
    "BatchNorm loses {} points ({} clipped like the others), the converted and clipped ones at most {};": small_batches,
    "Exported files give the source's answer on all {} CIFAR-10 test images in fp32, and on at least {} % in fp16":
        exports,
    "In ONNX Runtime {} networks lose at most {} points of top-1 on the CIFAR-10 test images": int8,
    "ours give fp32's answer on {} % of the images with 7 bits and {} with 8, the tools' own files {} and {};":
        int8_answers,
    "moves a pair by less than a tenth of a point, ours are at most {} points below the tool's, and up to {} above":
        int8_views,
    "Their scores are {} times as far from fp32's as those of the tools' files with 7 bits, and nearer in {} of {} "
    "cells": int8_scores,
    "by the tool's defaults it falls from {} to {}, by the tool with 7-bit weights to {}, with the factors to {} "
    "(in OpenVINO to {}, {} and {};": mobilenet,
    "on such a CPU int8 is {} to {} times as fast as fp32 in ONNX Runtime, {} to {} in OpenVINO, and {} to {} times as "
    "fast as timm in eager mode": int8_speed,
    "which ONNX Runtime opens in {} to {} of the time": loading,
    "Of {} such networks ONNX Runtime, OpenVINO and TorchScript run what they run of the plain export": same_operators,
    "the fastest of our files is {} to {} times as fast as timm in eager mode": speed,
    "Converting a ResNet-50 takes {} to {} times as long as the least any tool must do, creating, loading and saving "
    "it (`skipinit`, 15 pairs on two threads, {} in the median; peak memory {} checkpoints above); `groupnorm` without "
    "data, which tries signs and constants on noise, takes {} to {} times as long": cost,
    "| `resnet18_narrow` (post-activation) | `folded`, `skipinit` | {} | {} | 10000 of 10000 | {} |":
        lambda: accuracy("resnet18_narrow"),
    "| `resnetv2_18_narrow` (pre-activation) | `folded`, `skipinit` | {} | {} | 10000 of 10000 | {} |":
        lambda: accuracy("resnetv2_18_narrow"),
}  # fmt: skip


@pytest.mark.parametrize("sentence", CLAIMS)
def test_readme_says_what_the_table_says(sentence: str) -> None:
    assert sentence.format(*CLAIMS[sentence]()) in README


TABLES = (
    "kinds.md", "convert.md", "int8.md", "int8_speed.md", "int8_without_vnni.md", "loading.md", "operators.md",
    "planted.md", "robot_policy.md",
)  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_tables_say_what_they_were_made_with(name: str) -> None:
    head = text(name)
    assert re.search(r"^Command: `python tests/\S+\.py", head, re.M)
    assert re.search(r"torch \d.*timm \d.*Python \d.*commit [0-9a-f]{7,}.*, \d{4}-\d\d-\d\d; load [\d.]+", head)
