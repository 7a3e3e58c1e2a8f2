"""What conversions keep of every kind of network, before any training.

    python tests/lab/benchmarks/kinds.py -o tests/lab/benchmarks/kinds.md
        [KIND ...] [--samples none 100]

The trained networks of tests/data/zoo (by kinds_zoo.py). Kept: the result's accuracy on the test
images as a share of the source's (top-1; U-Net: mean IoU); calibrated on so many unlabelled
training images, of which a quarter is held out. "Held out" is how often those get the source's
answer (of the U-Net: its pixels); of conversions without images 100 training images say it. Groups
of 4 channels are what 32 groups are of 128 channels. How the rescaling is chosen was settled on the
depthwise network, by looking at test images as well. Rows are kept in runs/kinds.jsonl with their
commit; a second run measures what is missing, and every run writes the table of all that there is.
"""

import functools
import itertools
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kept import Kept, Row, arguments, markdown_head, markdown_row
from kinds_images import of_kind, score
from schemes_table import ROOT, logits
from support.zoo_networks import DATA, KINDS, known, trained
from torch import Tensor

from normswap.errors import NormswapError
from normswap.graph import inspection
from normswap.models import calling
from normswap.proof import held_out
from normswap.surgery import conversion


@dataclass(frozen=True)
class Way:
    """A conversion with its options, and the images it is measured with.

    Schemes that compute what another one does (LayerNorm one group, centred weight normalization
    `nf`) are left out.
    """

    scheme: str
    options: dict[str, Any]
    samples: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(
            [self.scheme, *(f"--{name.replace('_', '-')} {v}" for name, v in self.options.items())]
        )


SAMPLES = ("none", "100")  # images to calibrate on
WAYS = (
    Way("groupnorm", {}, SAMPLES),
    Way("groupnorm", {"group_size": 16}, ("none", "100")),
    Way("groupnorm", {"group_size": 4}, ("none", "100")),
    Way("nf", {}, ("100",)),
    Way("groupnorm", {"relative_eps": 1}, ("none",)),
    Way("folded", {}, ("none",)),
    Way("frozen-bn", {}, ("none",)),
    Way("weightnorm", {}, ("none",)),
)
HELD = 100  # unlabelled images that tell what a conversion without images keeps
OTHERS = {
    "vit": (Way("folded", {}, ("none",)), Way("rmsnorm", {}, ("none",)))
}  # it has no BatchNorm


@functools.cache
def answers(kind: str) -> Tensor:
    return logits(trained(kind), of_kind(kind, "test")[0].split(250))


def measure(kind: str, way: Way, samples: str) -> Row:
    """One row: `why` it was refused, or what was kept."""
    model = trained(kind)
    images, labels = of_kind(kind, "test")
    before = answers(kind)
    pictures = of_kind(kind, "train")[0]
    data = None if samples == "none" else list(pictures[: int(samples)].split(50))
    start = time.perf_counter()

    try:
        done = conversion.convert(
            model, way.scheme, calibrate=data, inputs=images[:8], seed=0, **way.options
        )
    except NormswapError as error:
        return {"why": str(error)}

    seconds = time.perf_counter() - start
    after = logits(done.model, images.split(250))

    held = done.report.kept
    if held is None:  # nothing was fitted: any unlabelled images are held out
        anatomy = inspection.inspect(model, calling.batches(images[:8]))
        held = held_out.measured(model, done.model, calling.batches(pictures[:HELD]), anatomy)

    return {
        "before": score(before, labels),
        "after": score(after, labels),
        "seconds": seconds,
        "tests": len(images),
        "agreement": 100 * float((before.argmax(1) == after.argmax(1)).double().mean()),
        "l2": float((after - before).double().norm() / before.double().norm()),
        "held": held and asdict(held),
    }


def table(kept: Kept) -> list[str]:
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

    lines = ["", (__doc__ or "").split("\n\n", 2)[2], markdown_head(*head)]
    for kind in KINDS:
        rows = [row for row in kept.rows.values() if row["key"][0] == kind]
        rows.sort(key=lambda row: SAMPLES.index(row["key"][2]))
        lines += [
            f"| {kind} | `{row['key'][1]}` | {row['key'][2]} | {cells(row)} |" for row in rows
        ]

    lines += ["", markdown_head("network", "what", "accuracy", "parameters")]
    for name in KINDS:
        if (DATA / f"{name}.json").is_file():
            note = known(name)
            what = " ".join((KINDS[name].__doc__ or "").split()).rstrip(".")
            accuracy = f"{note['accuracy']} ({note['measure']})"
            lines.append(markdown_row(name, what, accuracy, f"{note['parameters']:,}"))

    return lines


def cells(row: Row) -> str:
    if "why" in row:
        return f"| | refused: {row['why'].splitlines()[0]} | | | | | | {row['commit']}"
    held = row["held"]
    agreement = "" if held is None else f"{100 * held['agreement']:.1f} % of {held['count']}"
    return (
        f"{row['before']:.1f} | {row['after']:.1f} | {100 * row['after'] / row['before']:.1f} % |"
        f" {row['agreement']:.1f} % | {row['l2']:.2g} | {agreement} | {row['seconds']:.0f} |"
        f" {row['tests']:,} | {row['commit']}"
    )


def measured_rows(kinds: list[str], sampled: list[str]) -> Iterator[tuple[str, Any, str]]:
    """Yield (kind, way, samples) of each row: one way for all kinds, then the next."""
    for samples, number, kind in itertools.product(sampled, range(len(WAYS)), kinds):
        ways = OTHERS.get(kind, WAYS)
        if number >= len(ways) or not (DATA / f"{kind}.json").is_file():
            continue
        if samples in ways[number].samples:
            yield kind, ways[number], samples


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("kinds", nargs="*")
    parser.add_argument(
        "--samples", nargs="*", default=list(SAMPLES), help="images to calibrate on"
    )
    given = parser.parse_args()
    kept = Kept(ROOT / "runs" / "kinds.jsonl", fresh=given.fresh)

    for kind, way, samples in measured_rows(given.kinds or [*KINDS], given.samples):
        key = (kind, str(way), samples)
        row = kept.get(key, functools.partial(measure, kind, way, samples))
        print(
            key,
            {name: row[name] for name in ("after", "agreement", "why") if name in row},
            flush=True,
        )

    kept.write(given.output, "What conversions keep, by kind of network", table(kept))


if __name__ == "__main__":
    main()
