"""The control task of lab/benchmarks/robot_cloning.py: the same every time, solved by its expert, not by chance."""

from __future__ import annotations

import numpy as np
from lab.benchmarks.robot_task import SPEED, STEPS, Task, demonstrations


def rolled(act: str) -> Task:
    task, random = Task(50, 3), np.random.default_rng(0)
    for _ in range(STEPS):
        task.step(task.expert() if act == "expert" else random.standard_normal((50, 2)))
    return task


def test_the_expert_arrives_and_chance_does_not() -> None:
    assert rolled("expert").done.all()
    assert rolled("chance").done.mean() < 0.25


def test_it_is_the_same_every_time_and_no_step_is_longer_than_the_speed() -> None:
    (frames, actions), (again, same), (other, _) = (demonstrations(4, seed) for seed in (5, 5, 6))
    assert np.array_equal(frames, again)
    assert np.array_equal(actions, same)
    assert not np.array_equal(frames[0], other[0])
    task = Task(10, 0)
    before = task.hand.copy()
    task.step(np.full((10, 2), 9.0))
    assert np.linalg.norm(task.hand - before, axis=1).max() <= SPEED + 1e-9
