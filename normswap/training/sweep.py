"""Sweeps as the papers do them: every learning rate with several seeds, on one machine or several.

Optuna's storage is all that workers share, and its queue is the list of what is left: the same command may run in
several processes, on several machines; each takes the next waiting trial. A trial whose worker gives no heartbeat any
more is given up by Optuna and offered again here (its run is continued where its folder is in reach). A run that
diverges or fails is a row of the table.

What it came to is `sweep_table`'s. Source: De & Smith 2020, arXiv:2002.10444, which tunes the lr by powers of two and
reports mean and deviation of the best runs.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from normswap.errors import OptionError, OutputError, SourceError, TrainingError, first_line
from normswap.training.recipe import Recipe
from normswap.training.sweep_table import Trial

if TYPE_CHECKING:  # an optional package
    import optuna

Objective = Callable[[Recipe, Path], float | None]
"""Trains by the recipe into the folder: top-1 in percent at the end, or None if it was asked to stop before."""
Point = tuple[float, int]
Say = Callable[[str], None]

BEAT, GRACE = 15, 60  # seconds between a worker's signs of life, and without one until it counts as dead
_ATTEMPTS = 5  # at opening the storage


class _StoppedError(Exception):
    """Somebody asked the run to stop."""


@dataclass(frozen=True)
class Grid:
    """What is tried: every lr with every seed."""

    lrs: Sequence[float]
    seeds: Sequence[int]

    def points(self) -> list[Point]:
        return [(lr, seed) for lr in self.lrs for seed in self.seeds]


class Sweep:
    """One worker's view of a sweep.

    Args:
        recipe: what every run is trained by, but for its lr and seed.
        subject: what else must be the same in all workers: the network, for instance.
        place: where this machine's runs go.
        storage: the URL of a database; by default an SQLite file in `place`.

    Raises:
        OptionError: Optuna is not installed; the storage holds another sweep of that name.
        SourceError: the storage cannot be opened.
    """

    def __init__(
        self, recipe: Recipe, subject: Mapping[str, str], grid: Grid, place: Path, storage: str | None = None
    ) -> None:
        self.recipe, self.grid, self.place = recipe, grid, place
        self.optuna = _optuna()
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot write to {place}", error.strerror or str(error)) from None
        self.study = self._open(storage)
        self._agree(subject)

    def _open(self, url: str | None) -> optuna.Study:
        name, url = f"normswap {self.place.resolve().name}", url or f"sqlite:///{self.place / 'sweep.db'}"
        for attempt in range(_ATTEMPTS):
            try:
                self.storage = self._storage(url)
                return self.optuna.create_study(
                    study_name=name, storage=self.storage, direction="maximize", load_if_exists=True
                )
            except Exception as error:  # whatever the database's driver raises, for one if two workers make its tables
                why = first_line(error)
            time.sleep(attempt * 0.2)
        raise SourceError(f"{url} is no storage of sweeps", why)

    def _storage(self, url: str) -> optuna.storages.RDBStorage:
        """The database; SQLite, where a read locks nothing, is told to lock it, or two workers get the same trial."""
        with self._quiet():
            storage = self.optuna.storages.RDBStorage(url, heartbeat_interval=BEAT, grace_period=GRACE)
        if storage.engine.name == "sqlite":  # as SQLAlchemy's documentation has it
            from sqlalchemy import event

            storage.engine.dispose()
            event.listen(storage.engine, "connect", lambda driver, _: setattr(driver, "isolation_level", None))
            event.listen(storage.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
        return storage

    def _agree(self, subject: Mapping[str, str]) -> None:
        """Write down what this sweep is of, or see that it is what is written there."""
        tree = self.recipe.model_dump(mode="json", exclude={"summary", "source"})
        for part, key in (("optim", "lr"), ("train", "seed"), ("data", "root"), ("data", "workers")):
            del tree[part][key]
        ours = json.loads(json.dumps({"recipe": tree, "subject": dict(subject)}))
        theirs = self.study.user_attrs.get("sweep")
        if theirs is None:
            self.study.set_user_attr("sweep", ours)
            theirs = ours
        differ = [f"{key} was {was!r}, is {now!r}" for key, was, now in _differences(theirs, ours)]
        if differ:
            raise OptionError(f"{self.place} holds another sweep", "; ".join(differ[:3]), "Give another -o")

    def work(self, objective: Objective, *, retake: bool = False, say: Say = lambda text: None) -> bool:
        """Run points until none is left to begin; returns whether all of them are done.

        Args:
            retake: do not wait for signs of life, but begin again at once whatever has been begun and not ended.
            say: told what is being run.

        Raises:
            NormswapError: what is wrong with every run: its input.
        """
        states = self.optuna.trial.TrialState
        for one in self._of(states.RUNNING) if retake else ():
            self.study.tell(one.number, state=states.FAIL, skip_if_finished=True)
        waited = 0.0
        while True:
            self._offer()
            if self._of(states.WAITING):
                if not self._next(objective, say):
                    return False
                waited = 0.0
            elif not self._of(states.RUNNING):
                return True
            elif waited > GRACE + BEAT:
                return False  # whoever has begun them is alive
            else:
                time.sleep(1)
                waited += 1
                with self._quiet():
                    self.optuna.storages.fail_stale_trials(self.study)

    def _offer(self) -> None:
        """Put into the queue what no one does, has done or is about to do."""
        owned = {_point(one) for one in self._trials() if self._counts(one)}
        for point in self.grid.points():
            if point not in owned:
                self.study.enqueue_trial(dict(zip(("lr", "seed"), point, strict=True)))

    def _next(self, objective: Objective, say: Say) -> bool:
        """Take one trial from the queue, Optuna sees to it that no one else has it; False if asked to stop."""

        def run(trial: optuna.Trial) -> float:
            self.storage.record_heartbeat(trial._trial_id)  # also a process that dies at once has lived
            point = self._mine(trial.number)
            if point is None:
                raise self.optuna.TrialPruned
            trial.suggest_float("lr", 0, 1e308), trial.suggest_int("seed", 0, 2**31)  # as queued; for Optuna's tools
            return self._run(trial, *point, objective, say)

        try:
            with self._quiet():
                self.study.optimize(run, n_trials=1, catch=(TrainingError, RuntimeError))
        except _StoppedError:
            return False
        return True

    def _mine(self, number: int) -> Point | None:
        """The point that a trial of this number runs; None if the queue was empty, or an earlier trial has it."""
        trials = self._trials()
        point = next(_point(one) for one in trials if one.number == number)
        rivals = [one for one in trials if one.number < number and _point(one) == point and self._counts(one)]
        return None if rivals else point

    def _run(self, trial: optuna.Trial, lr: float, seed: int, objective: Objective, say: Say) -> float:
        folder = self._folder(lr, seed)
        trial.set_user_attr("folder", str(folder))
        points = self.grid.points()
        begun = {_point(one) for one in self._trials() if self._counts(one) and one.state.name != "WAITING"}
        say(f"lr {lr:g}, seed {seed} ({len(begun.intersection(points))} of {len(points)})")
        recipe = self.recipe.model_copy(update={
            "optim": self.recipe.optim.model_copy(update={"lr": lr}),
            "train": self.recipe.train.model_copy(update={"seed": seed}),
        })  # fmt: skip
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            top1 = objective(recipe, folder)
        except (TrainingError, RuntimeError) as error:  # out of memory, for one
            trial.set_user_attr("note", str(error) if isinstance(error, TrainingError) else first_line(error))
            trial.set_user_attr("lost", "diverged" if isinstance(error, TrainingError) else "failed")
            raise
        if top1 is None:  # the trial fails without a word, so that it is offered again
            raise _StoppedError
        return top1

    def _trials(self) -> list[optuna.trial.FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def _of(self, state: optuna.trial.TrialState) -> list[optuna.trial.FrozenTrial]:
        return [one for one in self._trials() if one.state == state]

    def _counts(self, one: optuna.trial.FrozenTrial) -> bool:
        """Whether it is waiting, running, or has ended, well or not; one that was given up does not."""
        return one.state.name in ("WAITING", "RUNNING", "COMPLETE") or "lost" in one.user_attrs

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Without the warning that Optuna's heartbeat is new (it is from 2021)."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self.optuna.exceptions.ExperimentalWarning)
            yield

    def _folder(self, lr: float, seed: int) -> Path:
        return self.place / "runs" / f"lr-{lr:g}-seed-{seed}"

    def trials(self) -> list[Trial]:
        """Every point that was begun, by lr and seed; one that is still running has the state `running`."""
        found: dict[Point, Trial] = {}
        for one in self._trials():
            point = _point(one)
            if point is None or not self._counts(one) or one.state.name == "WAITING":
                continue
            state = {"COMPLETE": "done", "RUNNING": "running"}.get(one.state.name) or one.user_attrs["lost"]
            seconds = None if one.duration is None else one.duration.total_seconds()
            note, folder = one.user_attrs.get("note", ""), one.user_attrs.get("folder")
            found.setdefault(point, Trial(*point, state, one.value, note, folder, seconds))
        return sorted(found.values(), key=lambda trial: (trial.lr, trial.seed))


def _point(one: optuna.trial.FrozenTrial) -> Point | None:
    """What a trial runs, or is about to run."""
    queued = one.system_attrs.get("fixed_params", {})
    return (queued["lr"], queued["seed"]) if {"lr", "seed"} <= queued.keys() else None


def _differences(then: object, now: object, above: str = "") -> Iterator[tuple[str, object, object]]:
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted(then.keys() | now.keys()):
            yield from _differences(then.get(key), now.get(key), f"{above}.{key}" if above else key)
    elif then != now:
        yield above.removeprefix("recipe.").removeprefix("subject."), then, now


def _optuna() -> ModuleType:
    try:
        import optuna
    except ImportError:
        raise OptionError("sweeps need Optuna", "it is not installed", "pip install 'normswap[train]'") from None
    return optuna
