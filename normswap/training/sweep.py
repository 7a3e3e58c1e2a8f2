"""Sweeps as in papers: every learning rate with several seeds, and the best k of n runs of each.

A worker is a process that was started by the sweep's command, on any machine. Workers share nothing
but Optuna's storage; each takes the next waiting trial. If a worker's heartbeat stops, its trial is
queued again, and the next worker continues the run if it can read the run's folder. A run that ends
without an accuracy, or at chance, is one of the n, so a learning rate with fewer than k successes
cannot win. No torch here.

Source: De & Smith 2020, arXiv:2002.10444, section 2.3: the best 5 of 7 runs at every learning rate
of a grid.
"""

from __future__ import annotations

import math
import re
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from normswap.errors import (
    OptionError,
    OutputError,
    SourceError,
    TrainingError,
    first_line,
    require_packages,
)
from normswap.training import recipe_files
from normswap.training.recipe import Recipe

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    Args:
        lr: The learning rate.
        seed: The seed.
        state: One of done, at chance, diverged, failed and running.
        top1: The accuracy after the last epoch, in percent.
        train_loss: The mean training loss of the last epoch.
        note: A sentence on why the run has failed, has diverged or is at chance.
        folder: The run's folder.
        seconds: How long the run took.
    """

    lr: float
    seed: int
    state: str
    top1: float | None = None
    train_loss: float | None = None
    note: str | None = None
    folder: str | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class RunEnd:
    """The end of a run that has not failed.

    Args:
        top1: The accuracy after the last epoch, in percent.
        train_loss: The mean training loss of the last epoch.
        classes: The number of classes. None if it is not known.
        images: The number of validation images. None if it is not known.
    """

    top1: float
    train_loss: float | None = None
    classes: int | None = None
    images: int | None = None

    @property
    def is_at_chance(self) -> bool:
        """Whether top-1 is less than three standard deviations above guessing.

        It is False if the number of classes or of validation images is not known. De & Smith, too,
        leave out networks that stay at the accuracy of random weights (Table 1).
        """
        if not self.classes or not self.images:
            return False
        share = 1 / self.classes
        deviation = math.sqrt(share * (1 - share) / self.images)
        return self.top1 < 100 * (share + 3 * deviation)


@dataclass(frozen=True)
class Line:
    """The runs of one learning rate, summed up.

    Of n runs with different seeds, the k with the highest accuracies count.

    Args:
        lr: The learning rate.
        runs: The number of runs that have ended.
        mean: The mean top-1 of the best k runs in percent, or of fewer if fewer have succeeded.
            None if none has.
        std: The standard deviation of the same runs as a sample. None for one run.
        counted: The number of runs in mean and std.
        lost: The number of runs that have ended without an accuracy, or at chance.
        full: Whether all n runs have ended and k have succeeded. Only then this can be the best
            learning rate.
        best: Whether this is the best learning rate.
    """

    lr: float
    runs: int
    mean: float | None
    std: float | None
    counted: int
    lost: int
    full: bool
    best: bool = False

    @property
    def text(self) -> str:
        """Mean and standard deviation of top-1 in percent, as a text such as `91.20 ± 0.31`.

        With one run it is the mean alone. It is empty if no run has succeeded.
        """
        if self.mean is None:
            return ""
        if self.std is None:
            return f"{self.mean:.2f}"
        return f"{self.mean:.2f} ± {self.std:.2f}"


def count_best(seeds: int, best: int | None = None) -> int:
    """Return how many runs of a learning rate count.

    Args:
        seeds: The number of its runs.
        best: The number that the user asked for. With None all runs count, or all but two if there
            are more than four.

    Raises:
        OptionError: The learning rate has fewer runs than were asked for.
    """
    if best is None:
        return seeds - 2 if seeds > 4 else seeds
    if not 1 <= best <= seeds:
        raise OptionError(
            f"--best {best} of {seeds} runs", remedy="It says how many runs of each lr count"
        )
    return best


def lines(trials: Sequence[Trial], seeds: int, best: int) -> list[Line]:
    """Sum up each learning rate, in ascending order.

    The highest mean is the best, unless two are equal.

    Args:
        trials: The runs.
        seeds: The number n of runs that each learning rate should have.
        best: The number k of runs that count.
    """
    summed: list[Line] = []
    for lr in sorted({trial.lr for trial in trials}):
        summed.append(_line([trial for trial in trials if trial.lr == lr], seeds, best))
    # If two means are equal, `highest` has two lines, and no line is the best.
    highest = _highest(summed)
    return [replace(line, best=highest == [line]) for line in summed]


def _highest(rates: Sequence[Line]) -> list[Line]:
    """Return the lines of the best learning rates: those with the highest mean accuracy.

    There are several if means are equal. Learning rates whose runs have not all ended, or with too
    few successful runs, are left out.

    Args:
        rates: The table: one line for each learning rate.
    """
    # A full line has successes, and so a mean.
    means = [line.mean for line in rates if line.full and line.mean is not None]
    return [line for line in rates if line.full and line.mean == max(means)]


def _line(trials: Sequence[Trial], seeds: int, best: int) -> Line:
    """Sum up the runs of one learning rate.

    Args:
        trials: The runs.
        seeds: The number of runs that are planned for each rate.
        best: The number of best runs of which the mean is taken.
    """
    ended = [trial for trial in trials if trial.state != "running"]
    successes = [trial for trial in ended if trial.state == "done"]
    accuracies = [trial.top1 for trial in successes if trial.top1 is not None]
    scores = sorted(accuracies, reverse=True)[:best]

    return Line(
        lr=trials[0].lr,
        runs=len(ended),
        mean=statistics.fmean(scores) if scores else None,
        std=statistics.stdev(scores) if len(scores) > 1 else None,
        counted=len(scores),
        lost=len(ended) - len(accuracies),
        full=len(ended) >= seeds and len(scores) == best,
    )


def notes(trials: Sequence[Trial], rates: Sequence[Line], finished: bool) -> list[str]:
    """List what the reader should know of a sweep.

    The notes name runs that have not ended or have failed, learning rates that are as good or
    nearly as good as the best, and a best learning rate at the edge of the grid.

    Args:
        trials: The runs.
        rates: The table of learning rates that `lines` makes of them.
        finished: Whether this worker has found all runs done.
    """
    texts: list[str] = []
    if not finished or any(trial.state == "running" for trial in trials):
        texts.append(
            "not all runs have ended; the same command continues those that were stopped or killed"
        )
    # At most three runs that failed are named, so that the list stays short.
    failures = [trial for trial in trials if trial.note]
    for trial in failures[:3]:
        texts.append(f"lr {trial.lr:g}, seed {trial.seed}: {trial.state}: {trial.note}")

    winners = _highest(rates)
    if len(winners) > 1:
        level = ", ".join(f"{line.lr:g}" for line in winners)
        texts.append(
            f"lr {level} are level: none is the best; more seeds or images tell them apart"
        )
    for line in rates:
        if not line.best:
            continue
        # A rate is good if its mean is within one standard deviation of the best mean.
        least = (line.mean or 0.0) - (line.std or 0.0)
        good = [other.lr for other in rates if other.full and (other.mean or 0.0) >= least]
        if len(good) > 1:
            texts.append(
                f"good rates: {good[0]:g} to {good[-1]:g}, within one standard deviation of the"
                " best"
            )
    if len(rates) > 1 and (rates[0].best or rates[-1].best):
        texts.append("the best lr is at the edge of the grid: try further ones")
    return texts


Objective = Callable[[Recipe, Path], RunEnd | None]
"""A function that trains by a recipe into a folder.

It returns how the run has ended, or None if it was asked to stop before.
"""
Point = tuple[float, int]
Progress = Callable[[str], None]

# A worker gives a sign of life every BEAT seconds. Without one for GRACE seconds it counts as dead.
BEAT = 15
GRACE = 60
# Two workers that create a database's tables at once fail, and try again.
_ATTEMPTS = 5
# Keys of the recipe that may differ between workers.
_FREE = ("summary", "source", "optim.lr", "train.seed", "data.root", "data.workers")
# Our names for Optuna's states of a trial. A trial that was lost has its state as an attribute.
_STATES = {"COMPLETE": "done", "RUNNING": "running"}
_POWER = re.compile(r"([0-9.]+)\^([-+]?[0-9]{1,3})$")


class _StoppedError(Exception):
    """Raised in a trial when somebody has asked its run to stop."""


def parse_rates(text: str) -> list[float]:
    """Return the learning rates that a text names, ascending, each once.

    Args:
        text: Numbers and powers between commas, such as `0.01,0.02,2^-5`. `2^-4..2^1` names every
            whole power between the two.

    Raises:
        OptionError: A part names no learning rate, or one that is not positive.
    """
    rates: set[float] = set()
    for word in text.split(","):
        # A word is 0.01, or 2^-5, or 2^-4..2^1. A power without dots counts as a range of one.
        first, dots, last = (bound.strip() for bound in word.partition(".."))
        low = _POWER.match(first)
        high = _POWER.match(last if dots else first)
        # Both bounds must be powers of the same base. Any other word must be a number.
        try:
            if low and high and low[1] == high[1]:
                named = [float(low[1]) ** power for power in range(int(low[2]), int(high[2]) + 1)]
            else:
                named = [float(word)]
        except (ValueError, OverflowError, ZeroDivisionError):
            named = []

        # A range whose first power is the higher one names none.
        if not named or not all(0 < rate < math.inf for rate in named):
            remedy = (
                "Write numbers and powers of one base, the lower first, as in 0.05,0.1 or 2^-4..2^1"
            )
            raise OptionError(f"--lr: {word.strip()!r} names no positive rates", remedy=remedy)
        rates.update(named)
    return sorted(rates)


class Sweep:
    """One worker's view of a sweep: many runs, with several learning rates and seeds.

    Several workers, which are processes, share the runs by a database.

    Args:
        recipe: The recipe of every run. Its learning rate and seed are replaced.
        subject: The other values that must be the same in all workers, by name, such as the MODEL
            that is trained.
        points: Every pair (lr, seed) to run.
        place: The folder of this machine's runs.
        url: The address of a database. The default is an SQLite file in `place`.

    Raises:
        NormswapError: Optuna is not installed, or the storage cannot be opened, or holds another
            sweep of that name.
    """

    def __init__(
        self,
        recipe: Recipe,
        subject: Mapping[str, str],
        points: Sequence[Point],
        place: Path,
        url: str | None = None,
    ) -> None:
        self.recipe = recipe
        self.points = points
        self.place = place
        require_packages("a sweep", ("optuna",), "train")
        import optuna

        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        self.optuna: ModuleType = optuna

        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot write to {place}", error.strerror or str(error)) from None
        self.study = self._open(url or f"sqlite:///{place / 'sweep.db'}")

        # All workers of a sweep must agree on the recipe's keys and on what is trained (`subject`).
        # The first worker has stored its own settings in the database.
        keys = {key: value for key, value in recipe_files.flat(recipe).items() if key not in _FREE}
        settings = {**keys, **subject}
        if "sweep" not in self.study.user_attrs:
            self.study.set_user_attr("sweep", settings)
        if differ := recipe_files.differences(self.study.user_attrs["sweep"], settings):
            raise OptionError(
                f"{place} holds another sweep", "; ".join(differ[:3]), "Give another -o"
            )

    def _open(self, url: str) -> optuna.Study:
        """Return Optuna's study of this sweep. It is made if the database has none.

        Args:
            url: The address of the database.

        Raises:
            SourceError: The storage cannot be opened.
        """
        name = f"normswap {self.place.resolve().name}"
        why = ""
        # Workers that start together may find the database locked, or half made, and wait a little.
        for attempt in range(_ATTEMPTS):
            time.sleep(attempt * 0.2)
            try:
                self.storage = self._storage(url)
                return self.optuna.create_study(
                    study_name=name, storage=self.storage, direction="maximize", load_if_exists=True
                )
            # A database's driver raises errors of its own.
            except Exception as error:
                why = first_line(error)
        # A password is not printed, as what is printed may be kept in a log.
        shown = re.sub(r"(://[^/:]*:).*@", r"\1***@", url)
        raise SourceError(f"{shown} is no storage of sweeps", why)

    def _storage(self, url: str) -> optuna.storages.RDBStorage:
        """Return Optuna's storage in a database.

        In SQLite, every transaction is made to take the write lock when it begins. By default a
        transaction takes the lock at its first write, and two transactions that have both read by
        then block each other.
        """
        storage = self.optuna.storages.RDBStorage(url, heartbeat_interval=BEAT, grace_period=GRACE)
        if storage.engine.name == "sqlite":
            from sqlalchemy import event

            # Connections that are open already do not know the listeners below, so they are closed.
            storage.engine.dispose()
            # The driver begins no transaction by itself, so the engine says how one begins.
            event.listen(
                storage.engine,
                "connect",
                lambda driver, _: setattr(driver, "isolation_level", None),
            )
            event.listen(
                storage.engine,
                "begin",
                lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"),
            )
        return storage

    def work(self, objective: Objective, *, progress: Progress = lambda text: None) -> bool:
        """Train with each pair (lr, seed) that waits, until none waits.

        Args:
            objective: The function that trains.
            progress: A function that is called with the name of each run.

        Returns:
            Whether all pairs are done. False if this worker was asked to stop, or if other workers
            still train when it has waited long enough for them.

        Raises:
            NormswapError: Every run would fail.
        """
        # Seconds since the last run of this worker, while others train.
        waited = 0
        while True:
            # Queue the points that neither wait nor run, and have not ended.
            taken = {_point(trial) for trial in self._valid()}
            for lr, seed in self.points:
                if (lr, seed) not in taken:
                    self.study.enqueue_trial({"lr": lr, "seed": seed})

            states = [trial.state.name for trial in self._valid()]
            if "WAITING" in states:
                try:
                    self._run_next(objective, progress)
                except _StoppedError:
                    return False
                waited = 0
            elif "RUNNING" not in states:
                return True
            elif waited > GRACE + BEAT:
                # The run of a dead worker would be queued again by now. So the workers of the runs
                # that are left are alive, and finish them.
                return False
            else:
                # Optuna is told to look for dead workers. Their runs fail, so that the loop queues
                # their points again.
                time.sleep(1)
                waited += 1
                self.optuna.storages.fail_stale_trials(self.study)

    def _run_next(self, objective: Objective, progress: Progress) -> None:
        """Run the next trial of the queue. Optuna gives it to no other worker.

        A trial is a training with one pair (lr, seed).

        Args:
            objective: The function that trains by a recipe in a folder.
            progress: Called with each message on progress.
        """

        def run(trial: optuna.Trial) -> float:
            """Train with the pair (lr, seed) that the trial was queued with."""
            # Optuna never looks after a trial without a heartbeat, and its own thread may not have
            # given the first one before this worker dies.
            self.storage.record_heartbeat(trial._trial_id)
            point_by_trial = {
                other.number: _point(other) for other in self.study.get_trials(deepcopy=False)
            }
            point = point_by_trial[trial.number]
            earlier = [_point(other) for other in self._valid() if other.number < trial.number]
            # The trial has no point if another worker has emptied the queue. It has the point of an
            # earlier trial if two workers have queued the same one.
            if point is None or point in earlier:
                raise self.optuna.TrialPruned
            # Optuna notes the queued values as the trial's parameters. The bounds let any pass.
            trial.suggest_float("lr", 0, 1e308)
            trial.suggest_int("seed", 0, 2**31)
            return self._train(trial, *point, objective, progress)

        self.study.optimize(run, n_trials=1, catch=(TrainingError, RuntimeError))

    def _train(
        self, trial: optuna.Trial, lr: float, seed: int, objective: Objective, progress: Progress
    ) -> float:
        """Train with one pair (lr, seed), and return the top-1 in percent.

        How the run ended is noted in the trial, also if it ended in an error.

        Args:
            trial: Optuna's record of the run.
            lr: The learning rate.
            seed: The seed.
            objective: The function that trains by a recipe in a folder.
            progress: Called with each message on progress.
        """
        folder = self.place / "runs" / f"lr-{lr:g}-seed-{seed}"
        trial.set_user_attr("folder", str(folder))
        # The message counts the runs that any worker has begun, this one among them.
        begun = {_point(other) for other in self._valid() if other.state.name != "WAITING"}
        progress(
            f"lr {lr:g}, seed {seed} ({len(begun.intersection(self.points))} of {len(self.points)})"
        )

        optim = self.recipe.optim.model_copy(update={"lr": lr})
        train = self.recipe.train.model_copy(update={"seed": seed})
        recipe = self.recipe.model_copy(update={"optim": optim, "train": train})
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            end = objective(recipe, folder)
        except (TrainingError, RuntimeError) as error:
            trial.set_user_attr("note", first_line(error))
            state = "diverged" if isinstance(error, TrainingError) else "failed"
            trial.set_user_attr("lost", state)
            raise

        # Somebody asked the run to stop. The error makes the trial fail in Optuna's eyes. Such a
        # trial does not count as ended (`_valid`), so its point is queued again.
        if end is None:
            raise _StoppedError
        trial.set_user_attr("train_loss", end.train_loss)
        if end.is_at_chance:
            trial.set_user_attr("lost", "at chance")
            trial.set_user_attr("note", f"top-1 is {end.top1:.1f} % of {end.classes} classes")
        return end.top1

    def _valid(self) -> list[optuna.trial.FrozenTrial]:
        """List the trials that wait, run or have ended.

        A trial that was stopped, or whose worker has died, is left out, as it is queued again.
        """
        # Runs that have failed, have diverged or are at chance have ended. They have the attribute
        # `lost`.
        states = ("WAITING", "RUNNING", "COMPLETE")
        return [
            trial
            for trial in self.study.get_trials(deepcopy=False)
            if trial.state.name in states or "lost" in trial.user_attrs
        ]

    def trials(self) -> list[Trial]:
        """List the run of every pair (lr, seed) that was begun, in their order."""
        # The runs by their pair (lr, seed).
        table: dict[Point, Trial] = {}
        for trial in self._valid():
            point = _point(trial)
            if point is None or trial.state.name == "WAITING":
                continue

            lr, seed = point
            # The attribute `lost` says why a run that has ended is no success, such as `diverged`.
            row = Trial(
                lr=lr,
                seed=seed,
                state=trial.user_attrs.get("lost") or _STATES[trial.state.name],
                top1=trial.value,
                train_loss=trial.user_attrs.get("train_loss"),
                note=trial.user_attrs.get("note", ""),
                folder=trial.user_attrs.get("folder"),
                seconds=None if trial.duration is None else trial.duration.total_seconds(),
            )
            # Two workers may have queued the same point. The first trial counts.
            table.setdefault(point, row)
        return [table[point] for point in sorted(table)]


def _point(trial: optuna.trial.FrozenTrial) -> Point | None:
    """Return the learning rate and seed that a trial was queued with.

    None stands for a trial that Optuna started without a queued point, as the queue was empty.
    """
    queued = trial.system_attrs.get("fixed_params", {})
    if {"lr", "seed"} <= queued.keys():
        return queued["lr"], queued["seed"]
    return None
