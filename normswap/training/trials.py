"""Short trainings of a network, converted to each scheme that it admits, to choose one of them.

A scheme with its options is a target. All targets of a round have equally many updates, and the
better half goes on to the next round.

All trials follow one recipe, which `finetune` takes too. The labels and the teacher, which is the
source, have the same weight in the loss. All trials see the same images in the same order.

The first round tries every target at three learning rates. In each further round the better half of
the targets begins again, each at its best rate, for more updates. The last round has two targets.
Each round gets the same share of the time. BatchNorm as it is and BatchNorm in eval mode, whose
gammas and betas learn, take part in every round, so that the targets are compared with them.

Only trials of equally many updates are compared.

Source: successive halving, Jamieson & Talwalkar 2016, arXiv:1502.07943.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normswap import copying
from normswap.analysis.advice import Advice
from normswap.errors import OptionError, spelled
from normswap.images.accuracy import Evaluation, classify
from normswap.images.datasets import Loader, drawn_rows, image_record, make_loader
from normswap.models import devices
from normswap.models.modes import Progress
from normswap.plan import Body
from normswap.sites.site import site_of, sites_of
from normswap.surgery import conversion
from normswap.surgery.network import Network
from normswap.training import assembly, recipe_files
from normswap.training.engine import TrainingRun
from normswap.training.recipe import Data
from normswap.training.run_folder import Folder
from normswap.training.training_images import TrainingImages, places

RECIPE = "recover_unlabelled"
_IN_EVAL_MODE = "batchnorm in eval mode"
# What every target is compared with.
REFERENCES = ("batchnorm", _IN_EVAL_MODE)
# The learning rates, in multiples of the recipe's.
_RATES = (0.25, 1, 4)
# A trial of fewer updates, or on fewer images, says nothing.
_FEWEST_UPDATES = 5
_FEWEST_HELD_OUT = 20
_MOST_HELD_OUT = 500
# The share of the time that is planned for: in the last round a machine may take twice as long as
# it did before.
_PLANNED = 0.8


@dataclass(frozen=True, eq=False)
class TargetTrial:
    """The accuracy and loss that one short training reached, measured on held-out images.

    Args:
        advice: The scheme that the network was converted to, and why it is advised.
        lr: The learning rate.
        updates: The number of updates.
        at_once: The accuracy before training, in percent.
        loss_at_once: The mean cross-entropy before training.
        after: The accuracy after training, in percent.
        loss: The mean cross-entropy after training.
        answers: The class of each image after training, (N,).
    """

    advice: Advice
    lr: float
    updates: int
    at_once: float
    loss_at_once: float
    after: float
    loss: float
    answers: Tensor

    def record(self, best: "TargetTrial") -> Body:
        """Return the trial as plain values for JSON.

        `level` says that the best trial is not known to be better than this one. This is so if its
        lead, in images, is at most the root of the number of images on which the two differ (one
        standard deviation). `compared` says that both had equally many updates.

        Args:
            best: The best trial.
        """
        differing = int((self.answers != best.answers).sum())
        more_right = (best.after - self.after) / 100 * len(self.answers)
        return {
            "target": self.advice.target,
            "lr": self.lr,
            "updates": self.updates,
            "at_once": self.at_once,
            "after": self.after,
            "loss": self.loss,
            "level": more_right <= math.sqrt(differing),
            "compared": self.updates == best.updates,
        }


def keys(advice: Advice, lr: float, batch_size: int) -> list[str]:
    """Return the changes to the recipe `RECIPE` with which a target is trained.

    Each is a word such as `optim.lr=0.001`, which `normswap finetune` takes, too.

    Args:
        advice: The target, with its options.
        lr: The learning rate.
        batch_size: The number of images in a batch.
    """
    # A reference with BatchNorm is not converted. A scheme that is not exact is fitted to images.
    # The labels and the teacher each have half of the loss (`distill.weight`).
    words = ["convert=null"]
    if advice.scheme != "batchnorm":
        words = [
            f"convert.to={advice.scheme}",
            f"convert.calibrate={str(not advice.exact).lower()}",
        ]
        words += [f"convert.options.{name}={value}" for name, value in advice.options.items()]
    return [*words, "distill.weight=0.5", f"data.batch_size={batch_size}", f"optim.lr={lr:g}"]


def references(model: nn.Module) -> list[Advice]:
    """Return the two baselines of a trial, which the schemes that are tried are compared with.

    They are the network with its BatchNorms as they are, and with its BatchNorms in eval mode. For
    a network without BatchNorm, the list is empty.
    """
    if not any(site.is_batchnorm for site in sites_of(model)):
        return []
    why = {
        "batchnorm": "as it is, with statistics of the batch",
        _IN_EVAL_MODE: "statistics are constants, gammas and betas learn",
    }
    return [
        Advice("batchnorm", target=target, why=why[target], command="", exact=True)
        for target in REFERENCES
    ]


def is_at_edge(lr: float) -> bool:
    """Whether a learning rate is the lowest or the highest that is tried."""
    usual = recipe_files.load_recipe(RECIPE).optim.lr
    return lr in (usual * min(_RATES), usual * max(_RATES))


def _norms_to_eval(model: nn.Module, args: tuple[object, ...]) -> None:
    """Put every BatchNorm in eval mode. It is a hook, which torch calls before each forward.

    Args:
        model: The network.
        args: The arguments of its forward, which torch passes to each hook. They are not read.
    """
    # A class may have a method `modules` of its own, so torch's is called.
    for module in nn.Module.modules(model):
        if site_of(module).is_batchnorm:
            module.eval()


class Trials:
    """Short trainings that compare the targets of a conversion, on labelled images.

    Some of the images are held out of training, to measure on.

    The held-out images are those of the validation part or, if there is none, half of all images;
    500 at most.

    Args:
        source: The network before it is converted, which teaches.
        data: Where the images are.
        batch_size: The number of images in a batch.
        minutes: How long all trials may take.
        device: One of auto, cpu, cuda and mps.
        progress: A function that is called now and then with the seconds that have passed, and the
            seconds that all trials may take.

    Raises:
        NormswapError: There are no images of the network's classes, or too few of them, or there is
            no such device.
    """

    def __init__(
        self,
        source: Network,
        data: str,
        batch_size: int,
        minutes: float,
        device: str,
        progress: Progress,
    ) -> None:
        if not 0 < minutes < math.inf:
            raise OptionError(spelled("minutes", minutes), "it is a positive number")
        self.source = source
        self.batch_size = batch_size
        self.minutes = minutes
        self.progress = progress
        # The time that the trials may take begins now.
        self.begun = time.monotonic()
        self.device = device

        # Only the recipe's part on images is needed here. The images are divided into those to
        # train on, some of these to fit values to, and those to measure on.
        recipe = recipe_files.load_recipe(RECIPE, [f"data.batch_size={batch_size}"])
        images = recipe.data.model_copy(update={"root": data})
        self.images, self.to_fit, self.held_out = self._split(images)

        # By target: the converted network, and its accuracy before training.
        self.networks: dict[str, tuple[Network, Evaluation]] = {}
        self.trials: list[TargetTrial] = []
        # Seconds of an update and of an evaluation, as they were measured last.
        self.updating = 0.0
        self.evaluating = 0.0

    def _split(self, data: Data) -> tuple[TrainingImages, Loader, Loader]:
        """Return training images, up to 100 of them to fit values to, and held-out images.

        Args:
            data: The user's images.
        """
        record = image_record(self.source.module)
        place, validated = places(data)
        training = make_loader(record, place, split="train", workers=0)
        # The numbers of the images that are trained on.
        rows: Sequence[int] = range(training.count or 0)
        if validated is not None:
            held_out = make_loader(record, validated, workers=0, samples=_MOST_HELD_OUT)
        else:
            held_out_rows = drawn_rows(len(rows), min(len(rows) // 2, _MOST_HELD_OUT), 0)
            held_out = training.only(held_out_rows)
            rows = sorted({*rows}.difference(held_out_rows))

        fewest = max(self.batch_size, 2)
        if len(rows) < fewest or (held_out.count or 0) < _FEWEST_HELD_OUT:
            raise OptionError(
                f"{data.root} gives {len(rows)} images to train on, and {held_out.count} others to"
                " measure on",
                f"trials need {fewest} and {_FEWEST_HELD_OUT}",
                f"Give more images, or a lower {spelled('batch_size')}",
            )

        # `TrainingImages` takes all images of the training part. It is given those of `rows` alone.
        images = TrainingImages(record, data, 0, labelled=True)
        images.images.rows = rows
        to_fit = training.only([rows[index] for index in drawn_rows(len(rows), 100, 0)])
        return images, to_fit, held_out

    @torch.random.fork_rng(devices=[])
    def run(self, possible: Sequence[Advice]) -> list[TargetTrial]:
        """Try targets in rounds, and return the last trial of each target, the best first.

        The caller's random state is put back.

        Args:
            possible: The targets: schemes to convert to, with their options.

        Raises:
            OptionError: The minutes are too few.
        """
        # Each round must have more updates than the one before. So the first round gets
        # `_FEWEST_UPDATES` at least.
        usual = recipe_files.load_recipe(RECIPE).optim.lr
        updates = _FEWEST_UPDATES - 1
        # Each trial measures how long an update (`updating`) and an evaluation take (`evaluating`).
        # The first update of a process is slow, so of these two trials only the second counts.
        for few in (1, 2):
            self._trial(possible[0], usual, few)
        self.trials.clear()

        # The first round trains each target at each rate. Every round halves the targets, until two
        # are left. `standings` has the latest trial of each target, the best first.
        entries: list[tuple[Advice, float]] = []
        for advice in possible:
            entries += [(advice, usual * factor) for factor in _RATES]
        rounds = max(2, math.ceil(math.log2(len(possible))))
        standings: list[TargetTrial] = []
        for number in range(rounds):
            # The rounds to come share the time that is left, of which a part is kept in reserve
            # (`_PLANNED`). The trials of a round share its time. Each also measures its network.
            seconds = (_PLANNED * 60 * self.minutes - self.seconds()) / (rounds - number)
            former_updates = updates
            updates = int((seconds / len(entries) - self.evaluating) / self.updating)
            if updates <= former_updates:
                break

            ended = [self._trial(advice, rate, updates) for advice, rate in entries]
            # Trials are ranked by loss, NaN last. On few images top-1 is often equal.
            ended.sort(key=lambda trial: (math.isnan(trial.loss), trial.loss))
            # Each target keeps one trial: its best of this round or, if it was left behind, the one
            # of its last round. Targets that were left behind come last.
            standing_trial: dict[str, TargetTrial] = {}
            for trial in (*ended, *standings):
                standing_trial.setdefault(trial.advice.target, trial)
            standings = list(standing_trial.values())
            targets = [trial for trial in standings if trial.advice.target not in REFERENCES]
            # The better half goes on: as `targets` has those of all rounds, it is a half of them, a
            # quarter, an eighth ... The references always go on.
            better = max(2, math.ceil(len(targets) / 2 ** (number + 1)))
            going_on = targets[:better]
            going_on += [trial for trial in standings if trial.advice.target in REFERENCES]
            entries = [(trial.advice, trial.lr) for trial in going_on]

        if not standings:
            raise self._too_short(len(entries), rounds)
        return standings

    def _too_short(self, trials: int, rounds: int) -> OptionError:
        """Return the error about too few minutes, which says how many are needed.

        Args:
            trials: The number of trials in a round.
            rounds: The number of rounds.
        """
        # Each round needs the fewest updates at least. Only the share `_PLANNED` of the minutes is
        # planned for. The minutes are rounded up to a tenth: seconds / 6 are tenths of a minute.
        a_trial = _FEWEST_UPDATES * self.updating + self.evaluating
        needed_seconds = rounds * trials * a_trial + self.seconds()
        minutes = math.ceil(needed_seconds / _PLANNED / 6) / 10
        return OptionError(
            f"{spelled('minutes', self.minutes)} is too short",
            f"an update takes {self.updating:.2g} s, and each of {trials} trials"
            f" {_FEWEST_UPDATES} or more",
            f"Give {spelled('minutes', minutes)} or more",
        )

    def seconds(self) -> float:
        """Return how many seconds all trials have taken so far, and show them to the user."""
        seconds = time.monotonic() - self.begun
        self.progress(int(seconds), math.ceil(60 * self.minutes))
        return seconds

    def _trial(self, advice: Advice, lr: float, updates: int) -> TargetTrial:
        """Train a target's network, as it is after its conversion, and return what it reached.

        At a target's first trial the network is converted, and measured before it is trained.

        Args:
            advice: The target, with its options.
            lr: The learning rate.
            updates: The number of updates.
        """
        if advice.target not in self.networks:
            network = self.source
            options = dict[str, Any](advice.options)
            # With BatchNorm as a target, the source is trained without a conversion.
            if advice.scheme != "batchnorm":
                # An exact conversion has no values to fit to images.
                images = None if advice.exact else self.to_fit
                network = conversion.convert(
                    network, advice.scheme, calibrate=images, **options
                ).network
            before, _ = self._classified(network.module)
            self.networks[advice.target] = network, before

        network, before = self.networks[advice.target]
        measured, answers = self._classified(self._updated(advice, network, lr, updates))
        trial = TargetTrial(
            advice=advice,
            lr=lr,
            updates=updates,
            at_once=before.top1,
            loss_at_once=before.loss,
            after=measured.top1,
            loss=measured.loss,
            answers=answers,
        )
        self.trials.append(trial)
        return trial

    def _updated(self, advice: Advice, network: Network, lr: float, updates: int) -> nn.Module:
        """Return a copy of the network after `updates` updates. The first tenth is warm-up.

        Args:
            advice: The target, with its options.
            network: The converted network.
            lr: The learning rate.
            updates: The number of updates.
        """
        # A recipe counts epochs. An epoch has as many updates as there are whole batches of images.
        epochs = updates / (len(self.images.images) // self.batch_size)
        words = [f"train.epochs={epochs}", f"schedule.warmup={epochs / 10}"]
        recipe = recipe_files.load_recipe(RECIPE, [*keys(advice, lr, self.batch_size), *words])

        engine = assembly.accelerator(recipe, self.device, Path(), "none")
        # The teacher is the source. It is copied to be another module than the network's: for one
        # and the same module, `Subject.teacher` may open what the network was once made from.
        subject = assembly.Subject(network, copying.duplicate(self.source.module, memo={}))
        task = assembly.Task(subject, self.images, recipe, engine, validates=False)
        # Each update puts the network into training mode, which the hook undoes for the BatchNorms.
        if advice.target == _IN_EVAL_MODE:
            task.model.register_forward_pre_hook(_norms_to_eval)
        # `update` reads no folder and writes none, saves no network and says nothing. So these
        # arguments only fill the place of a run's.
        loop = TrainingRun(
            task,
            folder=Folder(place=Path(), identity={}),
            blank=network.module,
            progress=None,
            say=print,
        )
        batches = self.images.batches(task.share, 0, updates)

        start = time.monotonic()
        while loop.at.update < updates:
            loop.update(batches)
            loop.at.update += 1
            # The call shows the user how long the trials have taken. Its result is not needed.
            self.seconds()
        # Reading the losses waits until the device has done all updates.
        loop.sum.item()
        self.updating = (time.monotonic() - start) / updates
        return task.raw

    def _classified(self, model: nn.Module) -> tuple[Evaluation, Tensor]:
        """Return a network's accuracy and loss, and its answers (N,), on the held-out images.

        The answer to an image is the class with the highest score. How long it takes is noted in
        `evaluating`.
        """
        start = time.monotonic()
        result = classify(
            devices.place(copying.duplicate(model, memo={}), self.device), self.held_out
        )
        self.evaluating = time.monotonic() - start
        return result
