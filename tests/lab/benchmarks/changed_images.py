"""A classifier that has trained on, by what becomes of its norms, on test images that were changed.

    python tests/lab/benchmarks/after_training.py --tasks labels -o FILE
    python tests/lab/benchmarks/changed_images.py -o tests/lab/benchmarks/changed_images.md

The runs are those of `after_training.py`: a narrow ResNet-18 that was trained on CIFAR-10 trains on
for 160 updates of 128 images, with the rate that was best on held-out images. The images of
training are as they are. The same test images are scored four times: as they are, darkened to 40 %,
with 30 % of their contrast, and blurred.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from after_training import ROWS
from after_training_tasks import TASKS
from kept import Kept, arguments, markdown_head, markdown_row, write_table
from policy_seeds import WAYS, ends, with_spread

TASK = "labels"
# What a run's row calls its scores, and the titles of their columns.
SCORES = {"end": "as in training", **{name: name for name in TASKS[TASK].tested_on}}


def lines(kept: Kept) -> Iterator[str]:
    yield from ("", *(__doc__ or "").splitlines()[5:], "")
    yield "Top-1 in percent, mean and standard deviation."
    yield ""
    yield markdown_head("way", *SCORES.values(), "seeds")
    for way in (*WAYS, "`tune`"):
        scores = [list(ends(kept, TASK, way, score).values()) for score in SCORES]
        if all(scores):
            yield markdown_row(way, *map(with_spread, scores), len(scores[-1]))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=Path, default=ROWS)
    given = parser.parse_args()
    command = f"benchmarks/changed_images.py -o {given.output}"
    table = lines(Kept(given.rows))
    write_table(given.output, "A classifier, on changed images", command, table)


if __name__ == "__main__":
    main()
