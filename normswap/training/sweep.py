"""Sweeps as the papers do them: every learning rate with several seeds, on one machine or several.

Optuna's grid sampler deals out the points, and its storage is all that workers share: the same command may run in
several processes, on several machines. What a killed worker has begun is begun again (its run is continued where its
folder is in reach). A run that diverges or fails is a row of the table.

What it came to is `sweep_table`'s. Source: De & Smith 2020, arXiv:2002.10444, which tunes the lr by powers of two and
reports mean and deviation of the best runs.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normswap.errors import OptionError, OutputError, SourceError, TrainingError
from normswap.training.recipe import Recipe
from normswap.training.sweep_table import Trial

Objective = Callable[[Recipe, Path], float | None]
"""Trains by the recipe into the folder: top-1 in percent at the end, or None if it was asked to stop before."""

_ATTEMPTS = 5  # at opening the storage
_PATIENCE = 100  # looks at a rival, before it counts as dead


@dataclass(frozen=True)
class Grid:
    """What is tried: every lr with every seed."""

    lrs: Sequence[float]
    seeds: Sequence[int]

    def points(self) -> list[tuple[float, int]]:
        return [(lr, seed) for lr in self.lrs for seed in self.seeds]


class Sweep:
    """One worker's view of a sweep.

    Args:
        recipe: what every run is trained by, but for its lr and seed.
        subject: what else must be the same in all workers: the network, for instance.
        place: where this machine's runs go.
        storage: an Optuna storage URL; by default a journal file in `place`.

    Raises:
        OptionError: Optuna is not installed; the storage holds another sweep of that name.
        SourceError: the storage cannot be opened.
    """

    def __init__(
        self, recipe: Recipe, subject: Mapping[str, Any], grid: Grid, place: Path, storage: str | None = None
    ) -> None:
        self.recipe, self.grid, self.place = recipe, grid, place
        self.optuna = _optuna()
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot write to {place}", error.strerror or str(error)) from None
        self.study = self._open(storage)
        self._agree(subject)

    def _open(self, url: str | None) -> Any:
        sampler = _dealer(self.optuna, {"lr": list(self.grid.lrs), "seed": list(self.grid.seeds)})
        for attempt in range(_ATTEMPTS):
            try:
                return self.optuna.create_study(
                    study_name=f"normswap {self.place.resolve().name}", storage=self._storage(url),
                    sampler=sampler, direction="maximize", load_if_exists=True,
                )  # fmt: skip
            except Exception as error:  # whatever the database's driver raises, for one if two workers make its tables
                why = (str(error).splitlines() or [type(error).__name__])[0]
            time.sleep(attempt * 0.2)
        raise SourceError(f"{url or self.place} is no storage of sweeps", why)

    def _storage(self, url: str | None) -> Any:
        if url is not None:
            return url
        journal = self.optuna.storages.journal
        return self.optuna.storages.JournalStorage(journal.JournalFileBackend(str(self.place / "journal.log")))

    def _agree(self, subject: Mapping[str, Any]) -> None:
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

    def work(
        self, objective: Objective, *, retake: bool = False, say: Callable[[str], None] = lambda text: None
    ) -> bool:
        """Run points until none is left to begin; returns whether all of them are done.

        Args:
            retake: also begin again what workers of other machines have begun and not ended.
            say: told what is being run.

        Raises:
            NormswapError: what is wrong with every run: its input.
        """
        self._forget(retake)
        while left := self._left():
            self._offer(left)
            trial = self.study.ask()
            lr, seed = trial.suggest_float("lr", 0, 1e308), trial.suggest_int("seed", 0, 2**31)  # from the grid
            if not self._claim(trial, (lr, seed)):
                self.study.tell(trial, state=self.optuna.trial.TrialState.FAIL)
                continue
            say(f"lr {lr:g}, seed {seed} ({len(self.grid.points()) - len(left) + 1} of {len(self.grid.points())})")
            if not self._run(trial, lr, seed, objective):
                return False
        return all(one.state != "running" for one in self.trials()) and not self._left()

    def _run(self, trial: Any, lr: float, seed: int, objective: Objective) -> bool:
        """One point; returns False if the run was asked to stop."""
        folder = self._folder(lr, seed)
        recipe = self.recipe.model_copy(update={
            "optim": self.recipe.optim.model_copy(update={"lr": lr}),
            "train": self.recipe.train.model_copy(update={"seed": seed}),
        })  # fmt: skip
        begun = time.monotonic()
        top1, state, note = None, "", ""
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            top1 = objective(recipe, folder)
            state = "done" if top1 is not None else ""
        except TrainingError as error:
            state, note = "diverged", str(error)
        except RuntimeError as error:  # out of memory, for one
            state, note = "failed", (str(error).splitlines() or [type(error).__name__])[0]
        finally:  # without a state the point is begun again
            if state:
                trial.set_user_attr("seconds", time.monotonic() - begun)
                trial.set_user_attr("note", note)
                trial.set_user_attr("top1", top1)
                trial.set_user_attr("state", state)
            states = self.optuna.trial.TrialState
            self.study.tell(trial, top1, state=states.COMPLETE if state == "done" else states.FAIL)
        return bool(state)

    def _forget(self, retake: bool) -> None:
        """Give up what was begun by workers that are no more."""
        for one in self._frozen():
            if one.state != self.optuna.trial.TrialState.RUNNING:
                continue
            here = one.user_attrs.get("host") == socket.gethostname()
            if (here and not _alive(one.user_attrs.get("pid"))) or (not here and retake):
                self.study.tell(one.number, state=self.optuna.trial.TrialState.FAIL, skip_if_finished=True)

    def _offer(self, left: Sequence[tuple[float, int]]) -> None:
        """If the sampler has dealt out all that is left before (to workers that stopped), put it back."""
        dealt = {_point(one) for one in self._frozen() if one.state.is_finished()}
        waiting = any(one.state == self.optuna.trial.TrialState.WAITING for one in self._frozen())
        if not waiting and dealt.issuperset(left):
            self.study.enqueue_trial(dict(zip(("lr", "seed"), left[0], strict=True)))

    def _frozen(self) -> list[Any]:
        return list(self.study.get_trials(deepcopy=False))

    def _counts(self, one: Any) -> bool:
        return one.state == self.optuna.trial.TrialState.RUNNING or "state" in one.user_attrs

    def _left(self) -> list[tuple[float, int]]:
        """Points that no one has done or is doing."""
        owned = {_point(one) for one in self._frozen() if self._counts(one)}
        return [point for point in self.grid.points() if point not in owned]

    def _claim(self, trial: Any, point: tuple[float, int]) -> bool:
        """Whether this worker has the point: workers that ask at the same moment may be given the same one.

        Every worker has written down its point before it looks for rivals, so of two at least one sees the other. The
        later trial gives way; the earlier one waits until the other has done so, unless that has claimed already.
        """
        for _ in range(_PATIENCE):
            rivals = [one for one in self._frozen()
                      if one.number != trial.number and _point(one) == point and self._counts(one)]  # fmt: skip
            if any(one.number < trial.number or "host" in one.user_attrs for one in rivals):
                return False
            if not rivals:
                break
            time.sleep(0.05)
        claim = {"folder": str(self._folder(*point)), "pid": os.getpid(), "host": socket.gethostname()}
        for key, value in claim.items():
            trial.set_user_attr(key, value)
        return True

    def _folder(self, lr: float, seed: int) -> Path:
        return self.place / "runs" / f"lr-{lr:g}-seed-{seed}"

    def trials(self) -> list[Trial]:
        """Every point that was begun, by lr and seed; one that is still running has the state `running`."""
        found: dict[tuple[float, int], Trial] = {}
        for one in self._frozen():
            point = _point(one)
            if point is None or not self._counts(one):
                continue
            known = {name: one.user_attrs.get(name) for name in ("top1", "note", "folder", "seconds")}
            trial = Trial(*point, one.user_attrs.get("state", "running"), **known)
            found.setdefault(point, trial)
        return sorted(found.values(), key=lambda trial: (trial.lr, trial.seed))


def _dealer(optuna: Any, space: dict[str, Any]) -> Any:
    """Optuna's grid sampler, which would stop a study that it does not run."""

    class Dealer(optuna.samplers.GridSampler):  # type: ignore[misc, name-defined]
        def after_trial(self, *given: Any) -> None:
            pass

    return Dealer(space, seed=0)


def _point(one: Any) -> tuple[float, int] | None:
    """What a trial runs, or is about to run."""
    params = one.params or one.system_attrs.get("fixed_params", {})
    return (params["lr"], params["seed"]) if {"lr", "seed"} <= params.keys() else None


def _alive(pid: Any) -> bool:
    if not isinstance(pid, int):  # killed before it could say who it is
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _differences(then: Any, now: Any, above: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted(then.keys() | now.keys()):
            yield from _differences(then.get(key), now.get(key), f"{above}.{key}" if above else key)
    elif then != now:
        yield above.removeprefix("recipe.").removeprefix("subject."), then, now


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise OptionError("sweeps need Optuna", "it is not installed", "pip install 'normswap[train]'") from None
    return optuna
