"""Whether a network of `nf` must be trained with clipped gradients: `nf_clipped.md`.

    python tests/lab/benchmarks/nf_clipped.py -o tests/lab/benchmarks/nf_clipped.md

The tasks are shorter ones of `after_training.py`. With and without clipping (to norm 1) the rate is
chosen alike: each is tried with half of the updates and a seed of its own, scored on held-out
training images, and the best one trains with three seeds and is scored on test images. Every run is
kept, a line each, in runs/nf_clipped.jsonl, so that a second call measures what is missing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean, stdev
from typing import ClassVar

from after_training import TRIAL_SEED, WAYS, Run, machine, train
from after_training_tasks import Split, Task
from kept import Kept, Row, arguments, markdown_head, markdown_row
from schemes_table import ROOT
from torch import nn

CLIPS = (0.0, 1.0)
WAY = "`nf`, 500 images"
RATES = (0.0002, 0.0005, 0.002, 0.005)
COLUMNS = ("task", "gradients", "rate", "top-1: at once", "after a tenth", "at the end")


@dataclass(frozen=True)
class Measured:
    """The runs of a task with or without clipping.

    Args:
        trials: The rows of the trials, one for each rate.
        finals: The rows of the runs at the best rate, one for each seed.
    """

    trials: list[Row]
    finals: list[Row]


class ShortTask(Task):
    """A task whose scores take fewer images."""

    held_out: ClassVar[int] = 1000
    tested: ClassVar[int] = 2000


TASKS = {
    "labels": ShortTask("128 images an update, labels alone", updates=80, rates=RATES),
    "preact": ShortTask(
        "a pre-activation network, 128 images an update, the source as teacher",
        "resnetv2_18_narrow",
        updates=80,
        rates=RATES,
        teacher=True,
    ),
    "shifted": ShortTask(
        "blurred, 3,000 images, 32 an update",
        batch=32,
        updates=160,
        images=3000,
        shift="blurred, 5 x 5",
        rates=RATES,
    ),
}


class Bench:
    """A task with its images and its converted network, made when first needed."""

    def __init__(self, task: Task) -> None:
        self.task = task

    @functools.cached_property
    def data(self) -> dict[str, Split]:
        """The images of each part, with their labels."""
        return self.task.data()

    @functools.cached_property
    def converted(self) -> nn.Module:
        """The network before training, fitted to training images."""
        images, _ = self.data["train"]
        return WAYS[WAY].convert(self.task, self.task.source(), images)

    def run(self, rate: float, clip: float, seed: int, *, trial: bool) -> Row:
        """Train one network, and return its scores.

        Args:
            rate: The learning rate.
            clip: The norm to which gradients are clipped; 0 leaves them as they are.
            seed: The seed of the order of the images.
            trial: Whether it trains with half of the updates, scored on held-out images.
        """
        run = Run(self.task, WAYS[WAY], self.converted, self.data, rate, clip, seed)
        updates = self.task.updates // 2 if trial else self.task.updates
        part = "held-out" if trial else "test"
        [row] = train([run], updates, "cpu", self.data[part])
        return {**row, "rate": rate, "device": machine("cpu")}


def measure(kept: Kept, bench: Bench, name: str, clip: float) -> Measured:
    """Choose the rate of a task with or without clipping, and train with all seeds."""
    key = (name, WAY, f"{clip:g}")

    trials: list[Row] = []
    for rate in bench.task.rates:
        trial = functools.partial(bench.run, rate, clip, TRIAL_SEED, trial=True)
        trials.append(kept.get((*key, "trial", f"{rate:g}"), trial))
    best = max(trials, key=lambda row: float(row["end"]))

    rows: list[Row] = []
    for seed in bench.task.seeds:
        final = functools.partial(bench.run, best["rate"], clip, seed, trial=False)
        rows.append(kept.get((*key, "seed", str(seed)), final))
        print(*key, rows[-1], flush=True)
    return Measured(trials, rows)


def gradients(clip: float) -> str:
    return f"clipped to {clip:g}" if clip else "as they are"


def table_row(name: str, clip: float, rows: list[Row]) -> str:
    """Return a line of the table: the means over seeds, and the deviation at the end."""
    averages = [mean(row[when] for row in rows) for when in ("before", "tenth", "end")]
    spread = stdev(row["end"] for row in rows)
    scores = [f"{average:.1f}" for average in averages]
    return markdown_row(
        name, gradients(clip), f"{rows[0]['rate']:g}", *scores[:2], f"{scores[2]} ± {spread:.1f}"
    )


def lines(measured: dict[tuple[str, float], Measured]) -> Iterator[str]:
    """Yield the lines of the table's file."""
    yield from ("", *(__doc__ or "").splitlines()[4:], "")
    rates = ", ".join(f"{rate:g}" for rate in RATES)
    yield f"`nf` is fitted to 500 images. Rates {rates}."
    for name, task in TASKS.items():
        yield f"`{name}`: CIFAR-10, `{task.network}`, {task.about}; {task.updates} updates."
    yield from ("Percent, mean and standard deviation over three seeds.", "")
    yield markdown_head(*COLUMNS)
    for (name, clip), runs in measured.items():
        yield table_row(name, clip, runs.finals)

    yield from ("", "The trials: top-1 on held-out images, by rate.", "")
    yield markdown_head("task", "gradients", *(f"{rate:g}" for rate in RATES))
    for (name, clip), runs in measured.items():
        yield markdown_row(name, gradients(clip), *(f"{row['end']:.1f}" for row in runs.trials))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    given = parser.parse_args()
    kept = Kept(ROOT / "runs" / "nf_clipped.jsonl", fresh=given.fresh)

    benches = {name: Bench(TASKS[name]) for name in given.tasks}
    measured: dict[tuple[str, float], Measured] = {}
    for name in given.tasks:
        for clip in CLIPS:
            measured[name, clip] = measure(kept, benches[name], name, clip)
    kept.write(given.output, "`nf` with and without clipping", lines(measured))


if __name__ == "__main__":
    main()
