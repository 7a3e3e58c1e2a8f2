"""Sweeps as the papers do them: every learning rate with several seeds, on one machine or several.

Optuna's storage is all that workers share, and its queue is the list of what is left: the same command may run in
several processes, on several machines; each takes the next waiting trial. A trial whose worker gives no heartbeat any
more is given up by Optuna and offered again here (its run is continued where its folder is in reach). A run that
diverges or fails is a row of the table, which `sweep_table` makes.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from normswap.errors import OptionError, OutputError, SourceError, TrainingError, first_line
from normswap.training import recipe_files
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
_FREE = ("summary", "source", "optim.lr", "train.seed", "data.root", "data.workers")  # may differ between runs
_POWER = re.compile(r"([0-9.]+)\^([-+]?[0-9]{1,3})$")
_FORM = "Write numbers and powers, as in 0.05,0.1 or 2^-4..2^1"


class _StoppedError(Exception):
    """Somebody asked the run to stop."""


def parse_rates(text: str) -> list[float]:
    """Return the learning rates of `0.1`, `0.01,0.02,2^-5` or `2^-4..2^1` (every whole power), ascending, each once.

    Raises:
        OptionError: it names none, or one that is not positive.
    """
    rates: set[float] = set()
    for part in text.split(","):
        first, dots, last = (word.strip() for word in part.partition(".."))
        if not dots:
            rates.add(_rate(first))
            continue
        low, high = _POWER.match(first), _POWER.match(last)
        if not low or not high or low[1] != high[1] or int(low[2]) > int(high[2]):
            why = "a range goes from a power up to another of the same base"
            raise OptionError(f"--lr {first}..{last}", why, _FORM)
        rates |= {_rate(f"{low[1]}^{power}") for power in range(int(low[2]), int(high[2]) + 1)}
    return sorted(rates)


def _rate(text: str) -> float:
    power = _POWER.match(text)
    try:
        value = float(power[1]) ** int(power[2]) if power else float(text)
    except (ValueError, OverflowError, ZeroDivisionError):
        value = 0.0
    if not 0 < value < float("inf"):
        raise OptionError(f"--lr: {text!r} is no positive number", remedy=_FORM)
    return value


class Sweep:
    """One worker's view of a sweep.

    Args:
        recipe: what every run is trained by, but for its lr and seed.
        subject: what else must be the same in all workers: the network, for instance.
        points: every (lr, seed) that is tried.
        place: where this machine's runs go.
        storage: the URL of a database; by default an SQLite file in `place`.

    Raises:
        OptionError: Optuna is not installed; the storage holds another sweep of that name.
        OutputError: nothing can be written to `place`.
        SourceError: the storage cannot be opened.
    """

    def __init__(
        self,
        recipe: Recipe,
        subject: Mapping[str, str],
        points: Sequence[Point],
        place: Path,
        storage: str | None = None,
    ) -> None:
        self.recipe, self.points, self.place = recipe, points, place
        self.optuna = _optuna()
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot write to {place}", error.strerror or str(error)) from None
        self.study = self._open(storage or f"sqlite:///{place / 'sweep.db'}")
        self._require_same(subject)

    def _open(self, url: str) -> optuna.Study:
        for attempt in range(_ATTEMPTS):
            try:
                self.storage = self._storage(url)
                name = f"normswap {self.place.resolve().name}"
                return self.optuna.create_study(
                    study_name=name, storage=self.storage, direction="maximize", load_if_exists=True
                )
            except Exception as error:  # whatever the database's driver raises, for one if two workers make its tables
                why = first_line(error)
            time.sleep(attempt * 0.2)
        raise SourceError(f"{url} is no storage of sweeps", why)

    def _storage(self, url: str) -> optuna.storages.RDBStorage:
        """Open the database; SQLite, where a read locks nothing, is told to lock, or two workers get the same trial."""
        storage = self.optuna.storages.RDBStorage(url, heartbeat_interval=BEAT, grace_period=GRACE)
        if storage.engine.name == "sqlite":  # as SQLAlchemy's documentation has it
            from sqlalchemy import event

            storage.engine.dispose()
            event.listen(storage.engine, "connect", lambda driver, _: setattr(driver, "isolation_level", None))
            event.listen(storage.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
        return storage

    def _require_same(self, subject: Mapping[str, str]) -> None:
        """Write down what this sweep is of, or see that it is what is written there."""
        keys = {key: value for key, value in recipe_files.flat(self.recipe).items() if key not in _FREE}
        settings = {**keys, **subject}
        if "sweep" not in self.study.user_attrs:
            self.study.set_user_attr("sweep", settings)
        differ = recipe_files.differences(self.study.user_attrs["sweep"], settings)
        if differ:
            raise OptionError(f"{self.place} holds another sweep", "; ".join(differ[:3]), "Give another -o")

    def work(self, objective: Objective, *, say: Say = lambda text: None) -> bool:
        """Run points until none is left to begin; returns whether all of them are done.

        Args:
            say: called with what is being run.

        Raises:
            NormswapError: what is wrong with every run: its input.
        """
        waited = 0
        while True:
            self._enqueue_missing()
            states = [trial.state.name for trial in self._valid()]
            if "WAITING" in states:
                if not self._run_next(objective, say):
                    return False
                waited = 0
            elif "RUNNING" not in states:
                return True
            elif waited > GRACE + BEAT:
                return False  # whoever has begun them is alive
            else:
                time.sleep(1)
                waited += 1
                self.optuna.storages.fail_stale_trials(self.study)

    def _enqueue_missing(self) -> None:
        taken = {_point(trial) for trial in self._valid()}
        for lr, seed in self.points:
            if (lr, seed) not in taken:
                self.study.enqueue_trial({"lr": lr, "seed": seed})

    def _run_next(self, objective: Objective, say: Say) -> bool:
        """Take one trial from the queue; Optuna sees to it that no one else has it. Returns False if asked to stop."""

        def run(trial: optuna.Trial) -> float:
            self.storage.record_heartbeat(trial._trial_id)  # also a process that dies at once has lived
            point = self._point_of(trial.number)
            if point is None:
                raise self.optuna.TrialPruned
            trial.suggest_float("lr", 0, 1e308), trial.suggest_int("seed", 0, 2**31)  # as queued; for Optuna's tools
            return self._train(trial, *point, objective, say)

        try:
            self.study.optimize(run, n_trials=1, catch=(TrainingError, RuntimeError))
        except _StoppedError:
            return False
        return True

    def _point_of(self, number: int) -> Point | None:
        """Return what a trial of this number runs: nothing if the queue was empty, or an earlier trial runs that."""
        point = next(_point(trial) for trial in self.study.get_trials(deepcopy=False) if trial.number == number)
        earlier = any(trial.number < number and _point(trial) == point for trial in self._valid())
        return None if earlier else point

    def _train(self, trial: optuna.Trial, lr: float, seed: int, objective: Objective, say: Say) -> float:
        folder = self.place / "runs" / f"lr-{lr:g}-seed-{seed}"
        trial.set_user_attr("folder", str(folder))
        begun = {_point(other) for other in self._valid() if other.state.name != "WAITING"}
        say(f"lr {lr:g}, seed {seed} ({len(begun.intersection(self.points))} of {len(self.points)})")
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
        if top1 is None:  # the trial fails without a word, and is queued again
            raise _StoppedError
        return top1

    def _valid(self) -> list[optuna.trial.FrozenTrial]:
        """List what is waiting, running, or has ended, well or not; not what was given up or stopped."""
        states = ("WAITING", "RUNNING", "COMPLETE")
        trials = self.study.get_trials(deepcopy=False)
        return [trial for trial in trials if trial.state.name in states or "lost" in trial.user_attrs]

    def trials(self) -> list[Trial]:
        """List every point that was begun, by lr and seed; one that is still running has the state `running`."""
        table: dict[Point, Trial] = {}
        for trial in self._valid():
            point = _point(trial)
            if point is not None and trial.state.name != "WAITING":
                state = {"COMPLETE": "done", "RUNNING": "running"}.get(trial.state.name) or trial.user_attrs["lost"]
                seconds = None if trial.duration is None else trial.duration.total_seconds()
                note, folder = trial.user_attrs.get("note", ""), trial.user_attrs.get("folder")
                table.setdefault(point, Trial(*point, state, trial.value, note, folder, seconds))
        return sorted(table.values(), key=lambda trial: (trial.lr, trial.seed))


def _point(trial: optuna.trial.FrozenTrial) -> Point | None:
    """Return what a trial runs, or is about to run."""
    queued = trial.system_attrs.get("fixed_params", {})
    return (queued["lr"], queued["seed"]) if {"lr", "seed"} <= queued.keys() else None


def _optuna() -> ModuleType:
    try:
        import optuna
    except ImportError:
        raise OptionError("sweeps need Optuna", "it is not installed", "pip install 'normswap[train]'") from None
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of its heartbeat, which is from 2021
    return optuna
