"""The control task of lab/benchmarks/robot_cloning.py: the same every time, solved by its expert, not by chance."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent / "benchmarks"))
from robot_task import SIDE, SPEED, STEPS, Task, demonstrations


def rolled(act: str) -> Task:
    task, random = Task(50, 3), np.random.default_rng(0)
    for _ in range(STEPS):
        task.step(task.expert() if act == "expert" else random.standard_normal((50, 2)))
    return task


def test_the_expert_arrives_and_chance_does_not() -> None:
    assert rolled("expert").done.all()
    assert rolled("chance").done.mean() < 0.25


def test_frames_show_where_things_are() -> None:
    """Found again by their colours alone."""
    task = Task(20, 1)
    frames = task.frames().astype(float)
    assert frames.shape == (20, 3, SIDE, SIDE)
    red = (frames[:, 0] > 200) & (frames[:, 1] < 30)
    white = frames.min(1) > 240
    for seen, places in ((red, task.thing), (white, task.hand)):
        for mask, place in zip(seen, places, strict=True):
            rows, columns = np.nonzero(mask)
            if len(rows) > 25:  # not hidden behind another
                assert (np.array([columns.mean(), rows.mean()]) + 0.5) / SIDE == pytest.approx(place, abs=2.5 / SIDE)


def test_it_is_the_same_every_time() -> None:
    (frames, actions), (again, same), (other, _) = (demonstrations(4, seed) for seed in (5, 5, 6))
    assert np.array_equal(frames, again)
    assert np.array_equal(actions, same)
    assert not np.array_equal(frames[0], other[0])
    assert np.linalg.norm(actions, axis=1).max() <= 1 + 1e-9


def test_a_step_is_no_longer_than_the_speed() -> None:
    task = Task(10, 0)
    before = task.hand.copy()
    task.step(np.full((10, 2), 9.0))
    assert np.linalg.norm(task.hand - before, axis=1).max() <= SPEED + 1e-9
