"""Law: what a user asks of a fit reaches it, alone and beside everything else that is asked.

The rows are the fields of `FitTask`, so that a new one that nothing sets fails by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any

import pytest
from support.six_networks import images, trained

import normswap
from normswap import schemes
from normswap.models.calling import Example
from normswap.schemes.scheme import FitTask


class Reached(BaseException):
    """The fit has its task."""

    def __init__(self, task: FitTask) -> None:
        super().__init__()
        self.task = task


def reach(task: FitTask) -> None:
    raise Reached(task)


def numbers(calls: Iterable[Example] | None) -> object:
    return None if calls is None else [round(float(call.images.sum()), 6) for call in calls]


def parts(task: FitTask) -> tuple[str, ...]:
    return tuple(path for path in dict(task.result.named_modules()) if task.takes_part(path))


def silent(done: int, total: int) -> None:
    """A callback for progress."""


# What is asked for, by the field of the task that must feel it: two values, neither a default.
ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "step": ({"relative_eps": 0.01}, {"relative_eps": 0.02}),
    "batches": ({"calibrate": [images(8, 1)]}, {"calibrate": [images(12, 2)]}),
    "example": ({"inputs": images(2, 3)}, {"inputs": images(3, 4)}),
    "takes_part": ({"skip": "blocks.0"}, {"only": "blocks.1"}),
    "seed": ({"seed": 3}, {"seed": 4}),
    "progress": ({"progress": silent}, {"progress": lambda done, total: None}),
}
# How the value of each field is compared.
SEEN: dict[str, Callable[[FitTask], object]] = {
    "step": lambda task: task.step.options["relative_eps"],
    "batches": lambda task: numbers(task.batches),
    "example": lambda task: numbers([task.example]),
    "takes_part": parts,
    "seed": lambda task: task.seed,
    "progress": lambda task: task.progress,
}
# They are made of the network, and no option is theirs alone.
OF_THE_NETWORK = {"source", "result", "after"}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], FitTask]:
    """A function that returns the task of the fit of a conversion with these options."""
    target = replace(schemes.get("groupnorm"), fit=reach)
    monkeypatch.setattr(schemes, "get", lambda name: target)

    def task(options: dict[str, Any]) -> FitTask:
        given = {"inputs": images(2), "calibrate": [images(4)], **options}
        with pytest.raises(Reached) as reached:
            normswap.convert(trained("post"), "groupnorm", **given)
        return reached.value.task

    return task


def test_every_field_has_a_row() -> None:
    assert {*ASKED} | OF_THE_NETWORK == {field.name for field in fields(FitTask)}
    assert {*SEEN} == {*ASKED}


@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked_reaches_the_fit(
    name: str, asked: Callable[[dict[str, Any]], FitTask]
) -> None:
    one, other = ASKED[name]

    for beside in ({}, *(values[0] for field, values in ASKED.items() if field != name)):
        first = SEEN[name](asked({**beside, **one}))
        second = SEEN[name](asked({**beside, **other}))
        plain = SEEN[name](asked(beside))
        assert first != second, beside
        assert plain not in (first, second), beside
