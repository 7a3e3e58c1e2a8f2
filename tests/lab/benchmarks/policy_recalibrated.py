"""A robot's policy whose BatchNorms get the statistics of the place where it acts.

    python tests/lab/benchmarks/policy_recalibrated.py --workers 2 -o FILE

The policies are those of `policy_seeds.py`: each seed trains once more, with the rate and clipping
that `after_training.py` chose. Then the policy acts in 40 episodes in another light, or seen from
further away. `normswap recalibrate` measures the statistics of its BatchNorms anew on the frames
that it saw there, without labels and without training. It is scored before and after on the 300
episodes that all ways are scored on.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import circumstances
import numpy as np
import robot_task
import torch
from after_training import ALL, ROWS, Run, train
from after_training_tasks import CAMERAS, TASKS
from kept import Kept, arguments, markdown_head, markdown_row
from policy_seeds import SCORES, ends, with_spread
from torch import Tensor, nn

from normswap import recalibrate

POLICY = TASKS["policy"]
WAYS = ("BatchNorm", "BatchNorm in eval mode")
FRAMES_OF = (4000, 40)  # the seed and the number of the episodes in which it looks around


@torch.inference_mode()
def seen(learner: nn.Module, moments: Tensor, camera: robot_task.Camera) -> Tensor:
    """The frames (N, 3, 64, 64), normalized, that a policy sees where it acts."""
    mean, std = moments
    seed, count = FRAMES_OF
    task = robot_task.Task(count, seed, camera)
    found = []
    for _ in range(robot_task.STEPS):
        going = ~task.done
        frames = (torch.from_numpy(task.frames(going)).float() / 255 - mean) / std
        found.append(frames)
        actions = np.zeros_like(task.hand)
        actions[going] = learner(frames).double().numpy()
        task.step(actions)
    return torch.cat(found).clone()


def measure(job: tuple[str, int], file: Path) -> None:
    """Train a policy, and score it before and after its statistics are those of each place."""
    way, seed = job
    kept = Kept(file)
    if (way, str(seed)) in kept.rows:
        return

    chosen = Kept(ROWS).rows["policy", way, "seed", str(seed)]
    data = POLICY.data()
    converted = ALL[way].convert(POLICY, POLICY.source(), data["train"][0])
    run = Run(POLICY, ALL[way], converted, data, chosen["rate"], chosen["clip"], seed)
    train([run], POLICY.updates, "cpu", data["test"])
    learner = run.model.eval()

    row = dict(POLICY.elsewhere(learner, data["test"]))
    for name, camera in CAMERAS.items():
        frames = seen(learner, data["test"][0], camera)
        there = recalibrate(learner, [*frames.split(100)], inputs=frames[:2]).model
        row[f"{name}, recalibrated"] = POLICY.elsewhere(there, data["test"])[name]
    kept.add((way, str(seed)), **row)


def lines(kept: Kept) -> Iterator[str]:
    yield from ("", *(__doc__ or "").splitlines()[4:], "")
    yield "Percent of the episodes that succeed, mean and standard deviation."
    yield ""
    places = [name for name in SCORES if name in CAMERAS]
    titles = [title for name in places for title in (SCORES[name], f"{SCORES[name]}, recalibrated")]
    yield markdown_head("way", *titles, "seeds")
    for way in WAYS:
        rows = [row for key, row in kept.rows.items() if key[0] == way]
        if rows:
            keys = [key for name in places for key in (name, f"{name}, recalibrated")]
            yield markdown_row(
                way, *(with_spread([row[key] for row in rows]) for key in keys), len(rows)
            )
    others = Kept(ROWS)
    for way in ("`groupnorm --groups 32`",):
        scores = [list(ends(others, way, name).values()) for name in places]
        cells = [cell for values in scores for cell in (with_spread(values), "")]
        yield markdown_row(way, *cells, len(scores[0]))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    given = parser.parse_args()
    file = Path(__file__).resolve().parents[3] / "runs" / "policy_recalibrated.jsonl"
    if given.fresh:
        file.unlink(missing_ok=True)
    POLICY.data()
    jobs = [*itertools.product(given.ways, POLICY.seeds)]
    with multiprocessing.get_context("spawn").Pool(given.workers) as pool:
        pool.map(functools.partial(measure, file=file), jobs, chunksize=1)

    made = f"on {circumstances.processor()}"
    title = "A robot's policy, with the statistics of the place"
    Kept(file).write(given.output, title, lines(Kept(file)), made)


if __name__ == "__main__":
    main()
