"""Where each target ends: short trials with equal updates and the source as teacher, the better half going on.

All trials follow one recipe, which `finetune` takes too, with labels and the teacher's answers in equal parts, and see
the same images in the same order. The first round tries every target at three learning rates. Then the better half of
the targets begins again, each at its best rate, for more updates, until two have done so. Rounds share the time alike.

Source: successive halving, Jamieson & Talwalkar 2016, arXiv:1502.07943.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normswap.analysis.advice import Advice
from normswap.errors import OptionError, spelled
from normswap.images.accuracy import Evaluation, classify
from normswap.images.datasets import Loader, drawn_rows, image_record, make_loader
from normswap.models import devices
from normswap.models.modes import Progress
from normswap.plan import Body
from normswap.surgery import conversion
from normswap.surgery.network import Network
from normswap.training import assembly, recipe_files
from normswap.training.assembly import Task
from normswap.training.engine import Updates
from normswap.training.recipe import Data
from normswap.training.subject import Subject
from normswap.training.training_images import TrainingImages, places

RECIPE = "recover_unlabelled"
# The learning rates, in multiples of the recipe's.
_RATES = (0.25, 1, 4)
# A trial of fewer updates, or on fewer images, says nothing.
_FEWEST_UPDATES, _FEWEST_HELD_OUT, _MOST_HELD_OUT = 5, 20, 500
# The share of the time that is planned for, and that after which a round is given up.
_PLANNED, _LATE = 0.85, 1.1


@dataclass(frozen=True, eq=False)
class Trial:
    """Where a target ended: top-1 in percent at once and after training, loss and answers, on held-out images."""

    advice: Advice
    lr: float
    updates: int
    at_once: float
    after: float
    loss: float
    answers: Tensor

    def record(self, best: Trial) -> Body:
        """Return plain values; `level`: the best is ahead by no more than a deviation of where the two differ."""
        differing = int((self.answers != best.answers).sum())
        is_level = (best.after - self.after) / 100 * len(self.answers) <= math.sqrt(differing)
        values = {name: getattr(self, name) for name in ("lr", "updates", "at_once", "after", "loss")}
        return {"target": self.advice.target, **values, "level": is_level}


class _LateError(Exception):
    """The time is over."""


def keys(advice: Advice, lr: float, batch_size: int) -> list[str]:
    """Return what the recipe is told for a target, as words of `finetune`."""
    words = ["convert=null"]
    if advice.scheme != "batchnorm":
        words = [f"convert.to={advice.scheme}", f"convert.calibrate={str(not advice.exact).lower()}"]
        words += [f"convert.options.{name}={value}" for name, value in advice.options.items()]
    return [*words, "distill.weight=0.5", f"data.batch_size={batch_size}", f"optim.lr={lr:g}"]


class Trials:
    """Trials on images of which some are held out: the validation part, or half of all, at most 500.

    Args:
        minutes: how long all may take.
        progress: called now and then with the seconds that are over, and all.

    Raises NormswapError: no images of the network's classes, too few of them, or no such device.
    """

    def __init__(
        self, source: Network, data: str, batch_size: int, minutes: float, device: str, progress: Progress
    ) -> None:
        if not 0 < minutes < math.inf:
            raise OptionError(spelled("minutes", minutes), "it is a positive number")
        self.source, self.batch_size, self.minutes, self.progress = source, batch_size, minutes, progress
        self.begun, self.device, self.data = time.monotonic(), device, Data(root=data, batch_size=batch_size, workers=0)
        # A teacher that is another module than the network is no earlier source of it.
        self.teacher = copy.deepcopy(source.module)
        self.images, self.to_fit, self.held_out = self._split()
        self.networks: dict[str, tuple[Network, float]] = {}
        self.trials: list[Trial] = []
        # Seconds of an update and of an evaluation, as they were measured last.
        self.updating, self.evaluating = 0.0, 0.0

    def _split(self) -> tuple[TrainingImages, Loader, Loader]:
        """The training images, some of them to fit values to, and the held-out ones, which are others."""
        record, (place, validated) = image_record(self.source.module), places(self.data)
        training = make_loader(record, place, split="train", workers=0)
        rows: Sequence[int] = range(training.count or 0)
        if validated is not None:
            held_out = make_loader(record, validated, workers=0, samples=_MOST_HELD_OUT)
        else:
            measured = drawn_rows(len(rows), min(len(rows) // 2, _MOST_HELD_OUT), 0)
            held_out, rows = training.only(measured), sorted({*rows}.difference(measured))
        fewest = max(self.batch_size, 2)
        if len(rows) < fewest or (held_out.count or 0) < _FEWEST_HELD_OUT:
            what = f"{self.data.root} gives {len(rows)} images to train on, and {held_out.count} others to measure on"
            why = f"trials need {fewest} and {_FEWEST_HELD_OUT}"
            raise OptionError(what, why, f"Give more images, or a lower {spelled('batch_size')}")
        images = TrainingImages(record, self.data, 0, labelled=True)
        images.images.rows = rows
        self.notes = dict.fromkeys([*images.notes, *held_out.notes])
        return images, training.only([rows[i] for i in drawn_rows(len(rows), 100, 0)]), held_out

    def run(self, possible: Sequence[Advice]) -> list[Trial]:
        """Return where each target has ended, the best first; raises OptionError: the minutes are too few."""
        with torch.random.fork_rng(devices=[]):
            usual = recipe_files.load_recipe(RECIPE).optim.lr
            # The first update of a process is slow.
            for updates in (1, 2):
                self._updated(possible[0], self.source, usual, updates)
            self.top1 = self._answers(self.source.module)[0].top1
            return self._halved([(advice, usual * factor) for advice in possible for factor in _RATES])

    def _halved(self, entries: list[tuple[Advice, float]]) -> list[Trial]:
        counts, updates = [len(entries) // len(_RATES)], _FEWEST_UPDATES - 1
        while len(counts) == 1 or counts[-1] > 2:
            counts.append(min(counts[0], max(2, (counts[-1] + 1) // 2)))
        standings: list[Trial] = []
        for number, count in enumerate([*counts[1:], 0]):
            seconds = (_PLANNED * 60 * self.minutes - self._seconds()) / (len(counts) - number)
            before, updates = updates, int((seconds / len(entries) - self.evaluating) / self.updating)
            if updates <= before:
                break
            try:
                ended = [self._trial(advice, rate, updates) for advice, rate in entries]
            except _LateError:
                break
            best: dict[str, Trial] = {}
            # Few images tell losses apart where they do not tell top-1; one that is not finite is the last.
            for trial in sorted(ended, key=lambda trial: (not math.isfinite(trial.loss), trial.loss)):
                best.setdefault(trial.advice.target, trial)
            standings = [*best.values(), *(trial for trial in standings if trial.advice.target not in best)]
            entries = [(trial.advice, trial.lr) for trial in standings[:count]]
        if standings:
            return standings
        needed = len(counts) * len(entries) * (_FEWEST_UPDATES * self.updating + self.evaluating) + self._seconds()
        why = f"an update takes {self.updating:.2g} s, and {len(entries)} trials take {_FEWEST_UPDATES} or more a round"
        remedy = f"Give {spelled('minutes', math.ceil(needed / _PLANNED / 6) / 10)} or more"
        raise OptionError(f"{spelled('minutes', self.minutes)} is too short", why, remedy)

    def ordered(self, ended: Sequence[Trial]) -> list[Advice]:
        """Return the targets in the order in which they ended; the first says how well."""
        best, count = ended[0], self.held_out.count
        why = (
            f"ends with the lowest loss on {count} held-out images: top-1 {best.after:.1f}, {best.at_once:.1f} at once"
        )
        first = replace(best.advice, why=f"{why}, {self.top1:.1f} of the source")
        return [first, *(trial.advice for trial in ended[1:])]

    def record(self, ended: Sequence[Trial]) -> Body:
        """Return what was measured as plain values."""
        sizes = {"images": len(self.images.images), "held_out": self.held_out.count, "top1": self.top1}
        records = [[trial.record(ended[0]) for trial in trials] for trials in (ended, self.trials)]
        return {"seconds": self._seconds(), **sizes, "ended": records[0], "trials": records[1]}

    def _seconds(self) -> float:
        seconds = time.monotonic() - self.begun
        self.progress(int(seconds), math.ceil(60 * self.minutes))
        return seconds

    def _trial(self, advice: Advice, lr: float, updates: int) -> Trial:
        """Train a target from its beginning; what it keeps at once is measured the first time."""
        if advice.target not in self.networks:
            network, options = self.source, dict[str, Any](advice.options)
            if advice.scheme != "batchnorm":
                images = None if advice.exact else self.to_fit
                network = conversion.convert(network, advice.scheme, calibrate=images, **options).network
            self.networks[advice.target] = network, self._answers(network.module)[0].top1
        network, at_once = self.networks[advice.target]
        measured, answers = self._answers(self._updated(advice, network, lr, updates))
        self.trials.append(Trial(advice, lr, updates, at_once, measured.top1, measured.loss, answers))
        return self.trials[-1]

    def _updated(self, advice: Advice, network: Network, lr: float, updates: int) -> nn.Module:
        """A copy of the network after so many updates, of which the first tenth warms up."""
        recipe = recipe_files.load_recipe(RECIPE, keys(advice, lr, self.batch_size))
        epochs = updates / (len(self.images.images) // self.batch_size)
        train = recipe.train.model_copy(update={"epochs": epochs})
        schedule = recipe.schedule.model_copy(update={"warmup": epochs / 10})
        recipe = recipe.model_copy(update={"train": train, "schedule": schedule})
        engine = assembly.accelerator(recipe, self.device, Path(), "none")
        task = Task(Subject(network, self.teacher), self.images, recipe, engine)
        loop, batches = Updates(task), self.images.batches(task.share, 0, updates)
        start = time.monotonic()
        for _ in range(updates):
            if self._seconds() > _LATE * 60 * self.minutes:
                raise _LateError
            loop.update(batches)
            loop.at.update += 1
        # Reading the losses waits for the device.
        loop.sum.item()
        self.updating = (time.monotonic() - start) / updates
        return task.raw

    def _answers(self, model: nn.Module) -> tuple[Evaluation, Tensor]:
        start = time.monotonic()
        answers = classify(devices.place(copy.deepcopy(model), self.device), self.held_out)
        self.evaluating = time.monotonic() - start
        return answers
