"""A classifier that has trained on, by what becomes of its norms, on test images that were changed.

    python tests/lab/benchmarks/changed_images.py --workers 2 -o FILE

The task is "labels" of `after_training.py`: a narrow ResNet-18 that was trained on CIFAR-10 trains
on for 160 updates of 128 images, which are as they are. Each way trains at the rate that
after_training.md found best for it. The same 5,000 test images are scored four times: as they are,
darkened to 40 %, with 30 % of their contrast, and blurred.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev

import circumstances
from after_training import ALL, Run, train
from after_training_tasks import TASKS
from kept import Kept, arguments, markdown_head, markdown_row
from recalibrate import shifts
from support.lab_tables import row_of

TASK = TASKS["labels"]
# The ways, in the words of after_training.md. The last one stands in its table of `nf`.
WAYS = (
    "BatchNorm",
    "BatchNorm in eval mode",
    "`frozen-bn`",
    "`skipinit`",
    "`groupnorm`",
    "`groupnorm --groups 32`",
    "`groupnorm --relative-eps 0`",
    "GroupNorm, gamma and beta copied, groups of 16",
    "`nf`, 500 images, clipped",
)


def setting(way: str) -> tuple[float, float]:
    """The rate and the clipping that after_training.md names for a way."""
    named = row_of("after_training.md", task="labels", way=way.replace("`", ""))["rate"]
    rate, _, clip = named.partition(", clipped to ")
    return float(rate), float(clip or 0)


def measure(way: str, file: Path) -> None:
    """Train with each seed that is not kept yet, and score the network on each kind of images."""
    kept = Kept(file)
    lacking = [seed for seed in TASK.seeds if (way, str(seed)) not in kept.rows]
    if not lacking:
        return

    data = TASK.data()
    converted = ALL[way].convert(TASK, TASK.source(), data["train"][0])
    rate, clip = setting(way)
    images, labels = data["test"]
    for seed in lacking:
        run = Run(TASK, ALL[way], converted, data, rate, clip, seed)
        train([run], TASK.updates, "cpu", data["test"])
        scores = {
            name: run.score((change(images), labels))
            for name, change in shifts(TASK.source()).items()
        }
        kept.add((way, str(seed)), **scores)


def lines(kept: Kept) -> Iterator[str]:
    yield from ("", *(__doc__ or "").splitlines()[4:], "")
    yield "Top-1 in percent, mean and standard deviation."
    yield ""
    kinds = [*shifts(TASK.source())]
    yield markdown_head("way", "as in training", *kinds[1:], "seeds")
    for way in WAYS:
        rows = [kept.rows[way, str(seed)] for seed in TASK.seeds]
        scores = [[row[kind] for row in rows] for kind in kinds]
        cells = [f"{mean(values):.1f} ± {stdev(values):.1f}" for values in scores]
        yield markdown_row(way, *cells, len(rows))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    file = Path(__file__).resolve().parents[3] / "runs" / "changed_images.jsonl"
    if given.fresh:
        file.unlink(missing_ok=True)
    # Read the data once, for all processes.
    TASK.data()
    with multiprocessing.get_context("spawn").Pool(given.workers) as pool:
        pool.map(functools.partial(measure, file=file), WAYS, chunksize=1)

    made = f"on {circumstances.processor()}"
    Kept(file).write(given.output, "A classifier, on changed images", lines(Kept(file)), made)


if __name__ == "__main__":
    main()
