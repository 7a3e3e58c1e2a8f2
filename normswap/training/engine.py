"""Fine-tune: one loop, on one device or many, that can be killed at any moment and continued.

Accelerate does processes, devices, precision, accumulation and trackers; timm transforms,
optimizers, schedules, clipping and averaging. The files of a run's folder are complete at every
moment (`run_folder`). Random numbers are a function of (seed, update, process), so a continued run
needs no state of them.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from normswap.copying import duplicate
from normswap.errors import OptionError, SourceError, TrainingError
from normswap.images.accuracy import Evaluation, evaluate
from normswap.images.datasets import Loader
from normswap.models.modes import evaluating
from normswap.models.pace import Pace
from normswap.models.preprocessing import assumption
from normswap.storage import atomic_write
from normswap.training import assembly, recipe_files
from normswap.training.assembly import Task, begin, converted, from_first, stop_on_request
from normswap.training.optimizing import clip_gradients
from normswap.training.recipe import Recipe
from normswap.training.run_folder import COLUMNS, Folder, Row, TrainingState, identify
from normswap.training.training_images import TrainingImages, image_notes, key

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class TrainingProgress:
    """How far a run is, in updates and epochs.

    Args:
        update: The number of updates done.
        updates: The number of updates of the whole run.
        epoch: The number of epochs done, as a fraction.
        epochs: The number of epochs of the whole run.
        images_per_s: The images per second over all processes, without validation.
        lr: The learning rate of the latest update.
        loss: The mean loss over the epoch so far.
        top1: The accuracy at the latest validation, in percent. None if it was not measured.
    """

    update: int
    updates: int
    epoch: float
    epochs: float
    images_per_s: float
    lr: float
    loss: float
    top1: float | None


Progress = Callable[[TrainingProgress], None]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Args:
        best: The directory of the network with the best validation accuracy. Without accuracies it
            is the network with the lowest loss on held-out inputs. The network before training, and
            the averaged weights (EMA) of each epoch, are candidates, too.
        last: The directory of the network after the last update.
        model: The network after the last update, in eval mode, on the CPU.
        rows: The rows of metrics.csv.
        best_epoch: The epoch of the network in `best`.
        updates: The number of updates done.
        finished: Whether the run has come to its end. If not, it was asked to stop, and can be
            continued.
        notes: Sentences that the user should read.
        validated: The number of validation images of this process. None if it is not known.
    """

    best: Path
    last: Path
    model: nn.Module
    rows: tuple[Row, ...]
    best_epoch: float | None
    updates: int
    finished: bool
    notes: tuple[str, ...]
    validated: int | None = None


def finetune(
    model: nn.Module | None,
    recipe: Recipe,
    out: str | Path,
    *,
    resume: str | None = None,
    device: str = "auto",
    track: str = "auto",
    progress: Progress | None = None,
    say: Say | None = None,
) -> Result:
    """Train `model`, which is not changed, as the recipe says.

    Training runs in one process, or in each process that torchrun has started. The processes share
    a disk. The first process writes the run's folder, and all processes read the images.

    Args:
        model: The network, converted by normswap or not. With None the recipe names it.
        recipe: The recipe, as `load_recipe` gives it.
        out: The run's folder.
        resume: "auto" continues the run in `out` if there is one. With None, `out` must be new, or
            hold a run that was killed before it wrote its first state.
        device: One of auto, cpu, cuda and mps.
        track: One of auto (TensorBoard) and none, or a comma list of Accelerate's trackers.
        progress: A function that is called now and then, in the first process.
        say: Called in the first process with each sentence that the user should read.

    Returns:
        Where the best and the last network are, and what was measured.

    Raises:
        NormswapError: The recipe does not fit the network, the images or the machine.
        TrainingError: The loss is not finite.
    """
    if resume not in (None, "auto"):
        raise OptionError(
            f"resume {resume!r} is not auto", remedy="Copy the run's folder, and continue the copy"
        )
    engine = assembly.accelerator(recipe, device, Path(out), track)
    notes: list[str] = []

    def say_and_keep(text: str) -> None:
        notes.append(text)
        if say is not None and engine.is_main_process:
            say(text)

    # Each update sets torch's seed, so the caller's random state is put back at the end.
    random_state = torch.get_rng_state()
    with ExitStack() as stack:
        stack.callback(torch.set_rng_state, random_state)
        # Open the network, then the images. A `Subject` is the network that is trained, with the
        # module that it was before the recipe's conversion.
        subject = begin(model, recipe)
        # If the teacher has the whole weight of the loss, labels have none, and need not be there.
        labelled = recipe.distill is None or recipe.distill.weight < 1
        record = subject.preprocessing(recipe.data.input_size)
        # Errors about the images come before the conversion, which may take long.
        images = TrainingImages(record, recipe.data, recipe.train.seed, labelled=labelled)
        assembly.require_the_same_images(images.digest)

        # Check the folder, then convert the network, and say what the user should know.
        folder = Folder(Path(out), identify(subject.source, recipe, images.digest))
        if engine.is_main_process:
            if resume is None or not folder.state.is_file():
                folder.check_new()
            folder.hold()
            stack.callback(folder.release)
        # A fit may take minutes before the first update. Its pace is said, and is no note.
        pace = None
        if say is not None and engine.is_main_process:
            pace = Pace("fitting values to images", say)
        subject = converted(subject, recipe, say_and_keep, pace)
        task = Task(subject, images, recipe, engine)
        assumed = assumption(subject.module)
        if assumed:
            say_and_keep(assumed)
        for note in image_notes(recipe.data, images, task.validation):
            if note:
                say_and_keep(note)

        # Train. Progress is shown in the first process alone.
        run = TrainingRun(
            task,
            folder,
            subject.blank(recipe.data.input_size),
            progress if engine.is_main_process else None,
            say_and_keep,
        )
        run.open(resume=resume is not None)
        with stop_on_request() as stop:
            finished = run.train(stop)
        engine.end_training()

    return Result(
        best=folder.best,
        last=folder.last,
        model=run.network(task.raw).eval(),
        rows=tuple(run.at.rows),
        best_epoch=run.at.best_epoch,
        updates=run.at.update,
        finished=finished,
        notes=tuple(notes),
        validated=task.validation.count if task.validation is not None else None,
    )


class TrainingRun:
    """A training run: its loop, and the files that it writes.

    Args:
        task: The objects of the loop: network, images, loss, optimizer and more.
        folder: The run's folder.
        blank: The network as training begins. Copies of it take the tensors that are saved.
        progress: A function that is called now and then. None in all processes but the first.
        say: Called with each sentence that the user should read.
    """

    def __init__(
        self, task: Task, folder: Folder, blank: nn.Module, progress: Progress | None, say: Say
    ) -> None:
        self.task = task
        self.folder = folder
        # The network before the first update. Networks are saved as copies of it (`network`).
        self.blank = blank
        self.progress = progress
        self.say = say
        self.engine = task.engine
        self.recipe = task.recipe
        # The position of the run: its updates, losses and rows of metrics.csv.
        self.at = TrainingState()

        device = task.engine.device
        # The sum of this process's losses since they were last read.
        self.sum = torch.zeros((), device=device, dtype=precise(device))
        # The learning rate of the latest update.
        self.lr = 0.0
        # Reading the losses waits for the device, so a GPU's are read at every tenth update only.
        self.every = 1 if device.type == "cpu" else 10

    def open(self, *, resume: bool) -> None:
        """Begin the run, or continue the run in the folder if there is one.

        Args:
            resume: Whether a run in the folder is continued.
        """
        # The first process reads the folder and tells the others. It alone writes, and puts back
        # what a killed process had moved aside.
        continues = resume and from_first(self.engine, self.folder.state.is_file)
        if continues:
            if self.engine.is_main_process:
                self.folder.put_back()
            self.at, parts = from_first(self.engine, self.folder.read_state)
            # What is held out of training is no part of the identity: its path may be another.
            if self.at.per_epoch not in (0, self.task.per_epoch):
                raise OptionError(
                    f"an epoch had {self.at.per_epoch} updates, and has {self.task.per_epoch}",
                    "other images are held out of training",
                    "Name data.validation as before, or leave it out as before",
                )
            self.task.restore(parts)
            self.say(f"continuing at update {self.at.update} of {self.task.updates}")
        elif self.engine.is_main_process:
            self.folder.begin(self.recipe)
        self.at.per_epoch = self.task.per_epoch

        # The trackers take the recipe's values as numbers and texts.
        tracked: dict[str, float | str] = {}
        for name, value in recipe_files.flat(self.recipe).items():
            tracked[name] = value if isinstance(value, float | str) else str(value)
        self.engine.init_trackers("normswap", tracked)
        # A new run first measures the network before training.
        if not continues:
            self._end_epoch(began=False)

    def train(self, stop: threading.Event) -> bool:
        """Do the updates that are left, and write the run's files now and then.

        Args:
            stop: Set if somebody asks the run to stop.

        Returns:
            Whether all updates are done. False if the run was stopped before the end.

        Raises:
            TrainingError: The loss or a weight is not finite.
        """
        task = self.task
        position = self.at
        save_every = self.recipe.train.checkpoint
        batches = task.images.batches(
            task.share, position.update, task.updates, pin=self.engine.device.type == "cuda"
        )
        while position.update < task.updates:
            start = time.perf_counter()
            self.update(batches)
            position.update += 1
            position.seconds += time.perf_counter() - start

            ends_epoch = position.update % task.per_epoch == 0 or position.update == task.updates
            saves = ends_epoch or (save_every is not None and position.update % save_every == 0)
            # Reading the losses waits for the device, so what follows is not done at each update.
            if not saves and position.update % self.every:
                continue

            # A network is saved only if the losses and its weights are finite, in all processes.
            is_finite, must_stop = self._agree(stop.is_set())
            if is_finite and (saves or must_stop):
                # A class may have a method `parameters` of its own, so torch's is called.
                is_finite = all(
                    bool(parameter.isfinite().all()) for parameter in nn.Module.parameters(task.raw)
                )
            if not is_finite:
                raise self._not_finite()

            # The end of an epoch saves the state, too.
            self._show()
            if ends_epoch:
                self._end_epoch()
            elif saves or must_stop:
                self._save()
            if must_stop:
                break
        return position.update == task.updates

    def _not_finite(self) -> TrainingError:
        """Return the error about a loss that is not finite, which names the last good network."""
        at = self.at
        last = (
            f"The last good checkpoint is {self.folder.last}, of update {at.rows[-1]['update']:g}"
        )
        return TrainingError(
            f"the loss is not finite at update {at.update} of {self.task.updates}",
            remedy=f"{last}. Lower optim.lr",
        )

    def update(self, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
        """Do one update of the weights, on the next micro-batches.

        The recipe says how many of them an update takes (`train.accumulate`).

        Args:
            batches: The images (N, C, H, W) and labels (N,) of each micro-batch.
        """
        task = self.task
        engine = self.engine
        update = self.at.update
        seed = self.recipe.train.seed
        # What is drawn in this update, as by dropout, depends on seed, update and process alone.
        torch.manual_seed(key(seed, "update", update, engine.process_index))

        # Set the learning rate and mixup for this update. A schedule by epoch keeps the rate of the
        # epoch's first update.
        scheduled_update = update
        if self.recipe.schedule.by_epoch:
            scheduled_update = update - update % task.per_epoch
        task.scheduler.step_update(scheduled_update)
        task.objective.begin_update(update / task.per_epoch)
        # The rate that is shown is the recipe's, without a group's own multiplier.
        first_group = task.optimizer.param_groups[0]
        self.lr = float(first_group["lr"] / first_group.get("lr_scale", 1.0))

        # In `accumulate`, Accelerate lets the optimizer step only at the last micro-batch, and
        # `sync_gradients` is true there alone. `task.model` is the network as Accelerate wraps it,
        # and `task.raw` is the network itself.
        task.model.train()
        for _ in range(self.recipe.train.accumulate):
            images, labels = self._placed(*next(batches))
            with engine.accumulate(task.model):
                with engine.autocast():
                    loss = task.objective(task.model, images, labels, (seed, "mixup", update))
                engine.backward(loss)
                if engine.sync_gradients and task.clip is not None:
                    engine.unscale_gradients()
                    clip_gradients(task.raw, task.clip)
                task.optimizer.step()
                task.optimizer.zero_grad()
            # The loss of an update is the mean over its micro-batches.
            self.sum += loss.detach() / self.recipe.train.accumulate
        if task.ema is not None:
            task.ema.update(task.raw, step=update + 1)

    def _placed(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return images and labels on the device, the images in the network's dtype and layout.

        Args:
            images: The images (N, C, H, W).
            labels: Their labels (N,).

        Raises:
            SourceError: A label is none of the network's classes.
        """
        classes = self.task.classes
        if classes is not None and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            wrong = next(label for label in labels.tolist() if not 0 <= label < classes)
            raise SourceError(f"label {wrong} is no class of this network", f"it has {classes}")

        device = self.engine.device
        task = self.task
        images = images.to(device, task.dtype, non_blocking=True).contiguous(
            memory_format=task.layout
        )
        return images, labels.to(device, non_blocking=True)

    def _agree(self, asked: bool) -> tuple[bool, bool]:
        """Agree in all processes on whether the run goes on.

        The losses since the last call are read, and added to the sum of the epoch.

        Args:
            asked: Whether this process was asked to stop.

        Returns:
            Whether the losses since the last call are finite in all processes, and whether any
            process was asked to stop.
        """
        # A request is a 1 beside the losses, so that one sum over the processes serves for both.
        sums = torch.stack([self.sum, torch.full_like(self.sum, float(asked))])
        loss, requests = self.engine.reduce(sums, "sum").tolist()
        # Each process has the mean loss of its own images, so the sum is divided by their number.
        self.at.loss += loss / self.engine.num_processes
        self.sum.zero_()
        return math.isfinite(loss), requests > 0

    @property
    def _updates_in_epoch(self) -> int:
        """How many updates of the present epoch are done: from 1 to the number in an epoch.

        After the last update of an epoch, that epoch is still the present one. The run must have
        done at least one update.
        """
        return (self.at.update - 1) % self.task.per_epoch + 1

    def _end_epoch(self, *, began: bool = True) -> None:
        """Measure the network, and write last/, metrics.csv, the state, and best/ if it is better.

        Args:
            began: Whether updates were done. If not, this is the network before training.
        """
        # Measure the network (`task.raw`, without Accelerate's wrapper) and, if they are kept, the
        # averaged weights (EMA).
        position = self.at
        task = self.task
        plain = measure(task.raw, task.validation, self.engine)
        loss = self._held_out_loss(task.raw)
        averaged: Evaluation | None = None
        averaged_loss: float | None = None
        if task.ema and began:
            averaged = measure(task.ema.module, task.validation, self.engine)
            averaged_loss = self._held_out_loss(task.ema.module)

        # If the averaged network is better than the trained one, it is the candidate for best/.
        network = task.raw
        is_more_accurate = averaged is not None and plain is not None and averaged.top1 > plain.top1
        has_less_loss = averaged_loss is not None and loss is not None and averaged_loss < loss
        if is_more_accurate or has_less_loss:
            assert task.ema is not None
            network = task.ema.module
        if has_less_loss:
            loss = averaged_loss

        # Note the figures, and begin the sums of the next epoch.
        row = self._row(plain, averaged, loss, began=began)
        position.rows = [*position.rows, row]
        position.loss = 0.0
        position.seconds = 0.0
        is_better = position.best is None or score(row) > position.best
        if is_better:
            position.best = score(row)
            position.best_epoch = row["epoch"]
        self._warn_of_rise(loss)

        # The first process writes the files. The state comes last: best/ and last/ must be there
        # before it.
        if self.engine.is_main_process:
            if is_better:
                self.folder.write_network(self.network(network), self.folder.best)
            self.folder.write_network(self.network(task.raw), self.folder.last)
            atomic_write.table(self.folder.metrics, COLUMNS, position.rows)
            self.engine.log(
                {name: value for name, value in row.items() if value is not None},
                step=position.update,
            )
        self._save()

    @torch.no_grad()
    def _held_out_loss(self, model: nn.Module) -> float | None:
        """Return the mean loss of a network in eval mode on the held-out inputs.

        The result is None if no inputs are held out, because accuracies are measured. Every process
        measures all inputs.
        """
        task = self.task
        if task.held_out is None:
            return None

        total = 0.0
        count = 0
        with evaluating(model):
            for batch in task.held_out:
                images, labels = self._placed(*batch)
                # Labels that have no weight in the loss are not read.
                total += float(task.objective.loss(model, images, labels)) * len(images)
                count += len(images)
        return total / count

    def _warn_of_rise(self, loss: float | None) -> None:
        """Tell the user if training has raised the held-out loss above its value at the beginning.

        The user is told once, and again at the end of the run.

        Args:
            loss: The held-out loss at the end of this epoch. None if it was not measured.
        """
        rows = self.at.rows
        began_with = rows[0]["val_loss"]
        if loss is None or began_with is None or not _is_risen(loss, began_with):
            return

        # The first row is the network before training, and the last row is this epoch.
        rose_before = any(_is_risen(row["val_loss"], began_with) for row in rows[1:-1])
        is_end = self.at.update == self.task.updates
        if is_end or not rose_before:
            in_best = f"the network of epoch {self.at.best_epoch:g}"
            if self.at.best_epoch == 0:
                in_best = "the network as it began; lower optim.lr"
            self.say(
                f"the loss on held-out inputs has risen from {began_with:.4g} to {loss:.4g}: best/"
                f" stays {in_best}"
            )

    def _row(
        self,
        plain: Evaluation | None,
        averaged: Evaluation | None,
        held_out_loss: float | None,
        *,
        began: bool,
    ) -> Row:
        """Return the row of metrics.csv for this epoch, with None for what was not measured.

        Args:
            plain: The accuracy of the network. None if it was not measured.
            averaged: The accuracy of the averaged weights (EMA). None if it was not measured.
            held_out_loss: The loss on held-out inputs, for a network without accuracy.
            began: Whether any update of this epoch was made.
        """
        position = self.at
        row: Row = dict.fromkeys(COLUMNS)
        epoch = position.update / self.task.per_epoch
        row.update(epoch=int(epoch) if epoch.is_integer() else epoch, update=position.update)

        if began:
            images_per_s = self._updates_in_epoch * self.recipe.data.batch_size / position.seconds
            row.update(
                lr=self.lr,
                train_loss=position.loss / self._updates_in_epoch,
                images_per_s=images_per_s,
                seconds=position.seconds,
            )
        if plain is not None:
            row.update(top1=plain.top1, top5=plain.top5, val_loss=plain.loss)
        elif held_out_loss is not None:
            row.update(val_loss=held_out_loss)
        if averaged is not None and plain is not None:
            row.update(ema_top1=averaged.top1)
        return row

    def _save(self) -> None:
        """Write the state from which the run can be continued, in the first process."""
        if self.engine.is_main_process:
            self.folder.write_state(self.at, self.task.parts())

    def _show(self) -> None:
        """Tell the trackers and the user how far the run is."""
        position = self.at
        task = self.task
        # The mean over the updates of this epoch so far.
        loss = position.loss / self._updates_in_epoch
        self.engine.log({"loss": loss, "lr": self.lr}, step=position.update)
        if self.progress is None:
            return

        training_progress = TrainingProgress(
            update=position.update,
            updates=task.updates,
            epoch=position.update / task.per_epoch,
            epochs=task.updates / task.per_epoch,
            images_per_s=self.recipe.data.batch_size * self._updates_in_epoch / position.seconds,
            lr=self.lr,
            loss=loss,
            top1=position.rows[-1]["top1"] if position.rows else None,
        )
        self.progress(training_progress)

    def network(self, trained: nn.Module) -> nn.Module:
        """Return a network on the CPU with the tensors of `trained`.

        It has the structure that training began with: no SyncBatchNorm, no compiled code.
        """
        fresh = duplicate(self.blank, memo={})
        fresh.load_state_dict(trained.state_dict())
        return fresh


def measure(model: nn.Module, share: Loader | None, engine: Accelerator) -> Evaluation | None:
    """Return a network's accuracy, loss and speed on the validation images.

    Every process measures its share of the images, and gets the result for all of them.

    Args:
        model: The network.
        share: The validation images of this process.
        engine: Accelerate's view of the processes.

    Returns:
        The measurements, or None if there are no validation images.
    """
    if share is None:
        return None
    if engine.num_processes > 1:
        # Without SyncBN every process has running statistics of its own. All take those of the
        # first process.
        for buffer in nn.Module.buffers(model):
            dist.broadcast(buffer, 0)

    # Each value is multiplied by the number of images of its process, and added up over the
    # processes. The sum for 1 is the number of all images, by which the other sums are divided. The
    # speed is divided by the number of images first, so that its sum is the sum of the speeds.
    measured = evaluate(model, share)
    values = [
        measured.top1,
        measured.top5,
        measured.loss,
        1.0,
        measured.images_per_s / measured.count,
    ]
    sums = torch.tensor(values, device=engine.device, dtype=precise(engine.device)) * measured.count
    top1, top5, loss, count, speed = engine.reduce(sums, "sum").tolist()
    return Evaluation(
        top1=top1 / count,
        top5=top5 / count,
        loss=loss / count,
        count=round(count),
        images_per_s=speed,
    )


def precise(device: torch.device) -> torch.dtype:
    """Return the dtype in which losses and accuracies are summed on a device.

    It is float64, in which the order of the summands hardly matters. On MPS, which has no float64,
    it is float32.
    """
    if device.type == "mps":
        return torch.float32
    return torch.float64


def _is_risen(loss: float | None, began_with: float) -> bool:
    """Whether a loss is above the loss that training began with by more than rounding.

    A loss that is NaN counts as risen. None is a loss that was not measured.
    """
    return loss is not None and not loss <= began_with * 1.01 + 1e-6


def score(row: Row) -> float:
    """Return the score of a network. A higher score is better.

    The score is the accuracy. Where no accuracy was measured, it is minus the loss on held-out
    inputs. The training loss is no score: it is a mean over an epoch, in which the weights change,
    and only the weights at its end are kept.

    Args:
        row: The row of metrics.csv for the epoch.
    """
    accuracies = [value for value in (row["top1"], row["ema_top1"]) if value is not None]
    if accuracies:
        return max(accuracies)
    if row["val_loss"] is None or math.isnan(row["val_loss"]):
        return -math.inf
    return -row["val_loss"]
