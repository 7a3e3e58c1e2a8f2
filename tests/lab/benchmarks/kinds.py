"""What conversions keep of every kind of network, before any training.

    python tests/lab/benchmarks/kinds.py [KIND ...] [--samples none synthetic 100 1000] [--draws 3]

The trained networks of tests/data/zoo (by kinds_zoo.py). Kept: the result's accuracy on the test images as a share of
the source's (top-1; U-Net: mean IoU); calibrated on so many unlabelled training images, or on 128 that are made from
the network's own statistics ("synthetic"), of which a quarter is held out. "Held out" is how often those get the
source's answer (of the U-Net: its pixels); of conversions without images 100 training images say it.
Groups of 4 channels are what 32 groups are of 128 channels. How the rescaling is
chosen was settled on the depthwise network, by looking at test images as well. Rows are kept in runs/kinds.jsonl with
their commit; a second run measures what is missing, and every run writes kinds.md from all that there is.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import circumstances
import torch
from kept import Kept, Row
from kinds_images import ROOT, of_kind, score
from torch import Tensor, nn
from zoo_networks import DATA, KINDS, known, trained

from normswap.errors import NormswapError
from normswap.models import calling
from normswap.surgery import conversion, held_out


@dataclass(frozen=True)
class Way:
    """A conversion with its options, the images it is measured with, and how often those are drawn.

    Schemes that compute what another one does (LayerNorm one group, centred weight normalization `nf`) show it once.
    """

    scheme: str
    options: dict[str, Any]
    samples: tuple[str, ...]
    draws: int = 1

    def __str__(self) -> str:
        return " ".join([self.scheme, *(f"--{name.replace('_', '-')} {v}" for name, v in self.options.items())])


SAMPLES = ("none", "synthetic", "100", "1000")  # images to calibrate on
WAYS = (
    Way("groupnorm", {}, SAMPLES, 3),
    Way("groupnorm", {"group_size": 16}, SAMPLES, 3),
    Way("groupnorm", {"group_size": 4}, ("none", "100", "1000")),
    Way("nf", {}, SAMPLES[1:], 3),
    Way("groupnorm", {"relative_eps": 1}, ("none", "100")),
    Way("layernorm", {}, ("100",)),
    Way("centered-weightnorm", {}, ("100",)),
    Way("folded", {}, ("none",)),
    Way("frozen-bn", {}, ("none",)),
    Way("weightnorm", {}, ("none",)),
)
HELD = 100  # unlabelled images that tell what a conversion without images keeps
TABLE = Path(__file__).with_name("kinds.md")
OTHERS = {"vit": (Way("folded", {}, ("none",)), Way("rmsnorm", {}, ("none",)))}  # it has no BatchNorm


@torch.inference_mode()
def outputs(model: nn.Module, images: Tensor) -> Tensor:
    return torch.cat([model(part) for part in images.split(250)])


def measure(kind: str, way: Way, samples: str, draw: int) -> Row:
    """One row: `why` it was refused, or what was kept."""
    model, (images, labels) = trained(kind), of_kind(kind, "test")
    pictures = of_kind(kind, "train")[0]
    data: Any = None if samples == "none" else samples
    if samples.isdigit():
        first = draw * int(samples)
        data = list(pictures[first : first + int(samples)].split(50))
    start = time.perf_counter()
    try:
        done = conversion.convert(model, way.scheme, calibrate=data, inputs=images[:8], seed=draw, **way.options)
    except NormswapError as error:
        return {"why": str(error)}
    seconds = time.perf_counter() - start
    before, after = outputs(model, images), outputs(done.model, images)
    held = done.report.kept
    if held is None:  # nothing was fitted: any unlabelled images are held out
        held = held_out.measured(model, done.model, calling.batches(pictures[:HELD]))
    rights = [(answers.argmax(1) == labels).double().view(len(images), -1).mean(1) for answers in (before, after)]
    return {
        "before": score(before, labels), "after": score(after, labels), "seconds": seconds, "tests": len(images),
        "agreement": 100 * float((before.argmax(1) == after.argmax(1)).double().mean()),
        "right": [100 * float(right.mean()) for right in rights],
        "error": 100 * float((rights[1] - rights[0]).std() / len(images) ** 0.5 / rights[0].mean()),
        "l2": float((after - before).double().norm() / before.double().norm()),
        "held": held and asdict(held),
    }  # fmt: skip


def table(kept: Kept) -> str:
    """All rows that there are, in Markdown."""
    head = (
        "kind",
        "to",
        "images",
        "before",
        "after",
        "kept",
        "same answer",
        "relative L2",
        "held out",
        "seconds",
        "test images",
        "commit",
    )
    lines = ["# What conversions keep, by kind of network", "",
             *circumstances.lines("python tests/lab/benchmarks/kinds.py", "cpu"),
             (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].strip(), "",
             f"| {' | '.join(head)} |", "|---" * len(head) + "|"]  # fmt: skip
    for kind in KINDS:
        rows = [row for row in kept.rows.values() if row["key"][0] == kind]
        rows.sort(key=lambda row: SAMPLES.index(row["key"][2]))
        names: dict[tuple[str, str], list[Row]] = {}
        for row in rows:
            names.setdefault((row["key"][1], row["key"][2]), []).append(row)
        for (way, samples), draws in names.items():
            lines.append(f"| {kind} | `{way}` | {samples} | {cells(draws)} |")
    lines += ["", "| network | what | accuracy | parameters |", "|---|---|---|---|"]
    for name in KINDS:
        if (DATA / f"{name}.json").is_file():
            note, what = known(name), (KINDS[name].__doc__ or "").strip().rstrip(".")
            accuracy = f"{note['accuracy']} ({note['measure']})"
            lines.append(f"| {name} | {what} | {accuracy} | {note['parameters']:,} |")
    return "\n".join(lines) + "\n"


def cells(draws: list[Row]) -> str:
    """The figures of a row; over several draws of images the mean, and the range of what is kept."""
    good = [row for row in draws if "why" not in row]
    if not good:
        return f"| | refused: {draws[0]['why'].splitlines()[0]} | | | | | | {draws[0]['commit']}"
    shares = [100 * row["after"] / row["before"] for row in good]
    span = f" ({min(shares):.1f} to {max(shares):.1f}, {len(shares)} draws)" if len(shares) > 1 else ""
    held = [row["held"] for row in good if row["held"] and row["held"]["agreement"] is not None]
    said = [f"{100 * mean([h['agreement'] for h in held]):.1f} % of {held[0]['count']}"] if held else []
    figures = [mean([row[name] for row in good]) for name in ("before", "after", "agreement", "l2", "seconds")]
    before, after, same, error, seconds = figures
    return (f"{before:.1f} | {after:.1f} | {mean(shares):.1f} %{span} | {same:.1f} % | {error:.2g} | "
            f"{'; '.join(said)} | {seconds:.0f} | {good[0]['tests']:,} | {good[0]['commit']}")  # fmt: skip


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--samples", nargs="*", default=list(SAMPLES), help="images to calibrate on")
    parser.add_argument("--draws", type=int, default=3, help="at most, of calibration images")
    parser.add_argument("--fresh", action="store_true", help="measure again what was kept")
    given = parser.parse_args()
    kept = Kept(ROOT / "runs" / "kinds.jsonl", fresh=given.fresh)
    todo = [
        (kind, way, samples, draw)
        for draw in range(given.draws)
        for samples in given.samples
        for place in range(len(WAYS))  # one way for all kinds, then the next
        for kind in given.kinds or KINDS
        for way in OTHERS.get(kind, WAYS)[place : place + 1]
        if samples in way.samples
        if draw < (way.draws if samples != "none" else 1)
        if (DATA / f"{kind}.json").is_file()
    ]
    for kind, way, samples, draw in todo:
        key = (kind, str(way), samples, str(draw))
        row = kept.get(key, lambda: measure(kind, way, samples, draw))  # noqa: B023
        print(key, {name: row[name] for name in ("after", "agreement", "why") if name in row}, flush=True)
    TABLE.write_text(table(kept))


if __name__ == "__main__":
    main()
