"""Fine-tune: one loop, on one device or many, that can be killed at any moment and continued.

It stands on Accelerate (processes, devices, precision, accumulation, trackers), timm (transforms, optimizers,
schedules, clipping, averaging), and a folder whose files are whole at every moment (`run_folder`). Random numbers are a
function of (seed, update, process), so a continued run needs none of an interrupted one's.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from normswap.errors import OptionError, SourceError, TrainingError, spelled
from normswap.images.accuracy import Evaluation, evaluate
from normswap.images.datasets import Loader
from normswap.models.preprocessing import assumption
from normswap.training import assembly, recipe_files
from normswap.training.assembly import Task
from normswap.training.processes import Stop, from_first, stop_on_request
from normswap.training.progress_records import GONE, Result, TrainingProgress
from normswap.training.recipe import Recipe
from normswap.training.run_folder import COLUMNS, Folder, Row, TrainingState, identify
from normswap.training.subject import begin, converted
from normswap.training.training_images import UNMEASURED, image_notes, key

if TYPE_CHECKING:  # an optional package
    from accelerate import Accelerator


def finetune(
    model: nn.Module | None,
    recipe: Recipe,
    out: str | Path,
    *,
    resume: str | None = None,
    device: str = "auto",
    track: str = "auto",
    progress: Callable[[TrainingProgress], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> Result:
    """Train `model`, which is not changed, as the recipe says; in one process, or in each of those torchrun started.

    The processes share a disk: the first one writes the run's folder, and all read the images.

    Args:
        model: a source or a converted network; None for the one that the recipe names.
        out: the run's folder.
        resume: "auto" continues the run in `out` if there is one. None: `out` must be new.
        device: auto, cpu, cuda or mps.
        track: auto, none, or a list of tensorboard, wandb, mlflow.
        progress: called now and then, in the first process.
        say: called with what the user should know, in the first process.

    Returns:
        Where the best and the last network are, and what was measured.

    Raises:
        NormswapError: the recipe does not fit the network, the images or the machine; TrainingError: the loss is not
            finite.
    """
    if resume not in (None, "auto"):
        raise OptionError(f"resume {resume!r} is not auto", remedy="Copy the run's folder, and continue the copy")
    tracked = assembly.trackers(track)
    engine = assembly.accelerator(recipe, device, Path(out), tracked)
    notes: list[str] = []

    def remark(text: str) -> None:
        if say is not None and engine.is_main_process:
            say(text)

    def log(text: str) -> None:
        notes.append(text)
        remark(text)

    before = torch.get_rng_state()
    try:
        subject = begin(model, recipe)
        images = subject.images(recipe)  # what is wrong with them is said before anything is converted for them
        folder = Folder(Path(out), identify(subject.given, recipe, images.digest))
        if resume is None and engine.is_main_process:
            folder.check_new()
        subject = converted(subject, recipe, log)
        task = Task(subject, images, recipe, engine)
        for note in filter(None, [assumption(subject.module), *image_notes(recipe.data, images, task.validation)]):
            remark(note)
        if task.validation is None:
            log(UNMEASURED)
        run = TrainingRun(task, folder, subject.blank(), progress if engine.is_main_process else None, log)
        run.open(resume=resume is not None)
        with stop_on_request() as stop:
            finished = run.train(stop)
        engine.end_training()
    except RuntimeError as error:
        if engine.num_processes > 1 and ("gloo" in str(error) or isinstance(error, dist.DistError)):
            raise TrainingError(GONE, remedy=f"{spelled('resume', 'auto')} continues the run") from None
        raise
    finally:
        torch.set_rng_state(before)
    at = run.at
    return Result(
        folder.best, folder.last, run.network(task.raw).eval(), tuple(at.rows), at.best_epoch, at.update, finished,
        tuple(notes),
    )  # fmt: skip


class TrainingRun:
    """The loop and what it leaves behind.

    Args:
        task: what is trained.
        folder: where it is kept.
        blank: the network as training begins, for its structure.
        progress, log: as in `finetune`.
    """

    def __init__(
        self,
        task: Task,
        folder: Folder,
        blank: nn.Module,
        progress: Callable[[TrainingProgress], None] | None,
        log: Callable[[str], None],
    ) -> None:
        self.task, self.folder, self.blank, self.progress, self.log = task, folder, blank, progress, log
        self.engine, self.recipe, self.at = task.engine, task.recipe, TrainingState()
        device = task.engine.device
        self.sum = torch.zeros((), device=device, dtype=precise(device))  # of this process's losses since the last look
        self.lr = 0.0
        self.every = 1 if task.engine.device.type == "cpu" else 10  # a look waits for the device

    def open(self, *, resume: bool) -> None:
        """Begin the run, or continue the one in the folder if there is one."""
        if not (resume and from_first(self.engine, self.folder.state.is_file)):
            self._main(lambda: self.folder.begin(self.recipe))
            self._watch()
            self._end_epoch(began=False)
            return
        self.at, parts = from_first(self.engine, self.folder.read_state)
        self.task.restore(parts)
        self._watch()
        self.log(f"continuing at update {self.at.update} of {self.task.updates}")

    def _watch(self) -> None:
        items = recipe_files.flat(self.recipe).items()
        plain = {key: value if isinstance(value, float | str) else str(value) for key, value in items}
        self.engine.init_trackers("normswap", plain)

    def train(self, stop: Stop) -> bool:
        """Do all updates that are left; returns False if somebody asked to stop before the end."""
        task, every = self.task, self.recipe.train.checkpoint
        batches = self._batches()
        while self.at.update < task.updates:
            start = time.perf_counter()
            self._update(batches)
            self.at.update += 1
            self.at.seconds += time.perf_counter() - start
            ends = self.at.update % task.per_epoch == 0 or self.at.update == task.updates
            due = ends or (every is not None and self.at.update % every == 0)
            if not due and self.at.update % self.every:
                continue
            finite, asked = self._agree(stop.asked)
            if not finite or ((due or asked) and not self._sound()):
                raise self._not_finite()
            self._show()
            if ends:
                self._end_epoch()
            elif due or asked:
                self._save()
            if asked:
                break
        return self.at.update == task.updates

    def _update(self, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
        """Take one step of the optimizer, on a whole batch over all micro-batches and processes."""
        task, engine, update, seed = self.task, self.engine, self.at.update, self.recipe.train.seed
        torch.manual_seed(key(seed, "update", update, engine.process_index))  # dropout and its like
        self.lr = task.rate.set(update)
        task.model.train()
        for _ in range(self.recipe.train.accumulate):
            images, labels = self._placed(*next(batches))
            with engine.accumulate(task.model):
                with engine.autocast():
                    loss = task.objective(task.model, images, labels, (seed, "mixup", update))
                engine.backward(loss)
                if engine.sync_gradients and task.clipping is not None:
                    engine.unscale_gradients()
                    task.clipping.clip()
                task.optimizer.step()
                task.optimizer.zero_grad()
            self.sum += loss.detach() / self.recipe.train.accumulate
        if task.ema is not None:
            task.ema.update(task.raw, step=update + 1)

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        pin = self.engine.device.type == "cuda"
        return self.task.images.batches(self.task.share, self.at.update, self.task.updates, pin=pin)

    def _placed(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        classes = self.task.classes
        if classes is not None and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            wrong = next(label for label in labels.tolist() if not 0 <= label < classes)
            raise SourceError(f"label {wrong} is no class of this network", f"it has {classes}")
        device, task = self.engine.device, self.task
        images = images.to(device, task.dtype, non_blocking=True).contiguous(memory_format=task.layout)
        return images, labels.to(device, non_blocking=True)

    def _agree(self, asked: bool) -> tuple[bool, bool]:
        """Return whether the losses since the last look are finite, and whether any process was asked to stop."""
        sums = torch.stack([self.sum, torch.full_like(self.sum, float(asked))])
        loss, stop = self.engine.reduce(sums, "sum").tolist()
        self.at.loss += loss / self.engine.num_processes
        self.sum.zero_()
        return math.isfinite(loss), stop > 0

    def _sound(self) -> bool:
        """Return whether the weights are finite; every process has the same."""
        return bool(torch.stack([parameter.isfinite().all() for parameter in self.task.raw.parameters()]).all())

    def _not_finite(self) -> TrainingError:
        at = self.at
        remedy = f"The last good checkpoint is {self.folder.last}, of update {at.rows[-1]['update']:g}. Lower optim.lr"
        return TrainingError(f"the loss is not finite at update {at.update} of {self.task.updates}", remedy=remedy)

    def _end_epoch(self, *, began: bool = True) -> None:
        """Validate, write a row, the network and, if it is the best so far, the best one."""
        at, task = self.at, self.task
        plain = measure(task.raw, task.validation, self.engine)
        averaged = measure(task.ema.module, task.validation, self.engine) if task.ema and began else None
        count = (at.update - 1) % task.per_epoch + 1
        epoch = at.update / task.per_epoch
        row: Row = dict.fromkeys(COLUMNS)
        row.update(epoch=int(epoch) if epoch == int(epoch) else epoch, update=at.update)
        if began:
            rate = count * self.recipe.data.batch_size / at.seconds
            row.update(lr=self.lr, train_loss=at.loss / count, images_per_s=rate, seconds=at.seconds)
        if plain is not None:
            row.update(
                top1=plain.top1, top5=plain.top5, val_loss=plain.loss, ema_top1=averaged.top1 if averaged else None
            )
        at.rows, at.loss, at.seconds = [*at.rows, row], 0.0, 0.0
        points, network = score(row), task.raw
        if task.ema is not None and averaged is not None and plain is not None and averaged.top1 > plain.top1:
            network = task.ema.module
        better = at.best is None or points > at.best
        if better:
            at.best, at.best_epoch = points, row["epoch"]
        self._main(lambda: self._write(row, network if better else None))
        self._save()

    def _write(self, row: Row, best: nn.Module | None) -> None:
        if best is not None:
            self.folder.write_network(self.network(best), self.folder.best)
        self.folder.write_network(self.network(self.task.raw), self.folder.last)
        self.folder.write_metrics(self.at.rows)
        values = {name: value for name, value in row.items() if value is not None}
        self.engine.log(values, step=self.at.update)

    def _save(self) -> None:
        self._main(lambda: self.folder.write_state(self.at, self.task.parts()))

    def _main(self, work: Callable[[], None]) -> None:
        """Let the first process do it. Where it fails, the others learn of it when they next wait for the first."""
        if self.engine.is_main_process:
            work()

    def _show(self) -> None:
        at, task = self.at, self.task
        count = (at.update - 1) % task.per_epoch + 1
        loss = at.loss / count
        self.engine.log({"loss": loss, "lr": self.lr}, step=at.update)
        if self.progress is None:
            return
        top1 = at.rows[-1]["top1"] if at.rows else None
        speed = self.recipe.data.batch_size * count / at.seconds
        epochs = task.updates / task.per_epoch
        self.progress(
            TrainingProgress(at.update, task.updates, at.update / task.per_epoch, epochs, speed, self.lr, loss, top1)
        )

    def network(self, trained: nn.Module) -> nn.Module:
        """Return a network of the structure that training began with, on the CPU, with the tensors of `trained`."""
        fresh = copy.deepcopy(self.blank)
        fresh.load_state_dict(trained.state_dict())
        return fresh


def measure(model: nn.Module, share: Loader | None, engine: Accelerator) -> Evaluation | None:
    """Make one pass over the validation images, or None where there are none.

    Args:
        model: not wrapped; in every process.
        share: this process's share of the images.
        engine: Accelerate's view of the machine.
    """
    if share is None:
        return None
    if engine.num_processes > 1:
        for buffer in model.buffers():  # without SyncBN, every process has running statistics of its own
            dist.broadcast(buffer, 0)
    measured = evaluate(model, share)
    means = [measured.top1, measured.top5, measured.loss, 1.0, measured.images_per_s / measured.count]
    parts = torch.tensor(means, device=engine.device, dtype=precise(engine.device)) * measured.count
    top1, top5, loss, count, speed = engine.reduce(parts, "sum").tolist()
    return Evaluation(top1 / count, top5 / count, loss / count, round(count), speed)


def precise(device: torch.device) -> torch.dtype:
    """Return what to add figures up in: the order, which depends on the number of processes, should not show."""
    return torch.float32 if device.type == "mps" else torch.float64


def score(row: Row) -> float:
    """Return what the best network is chosen by: accuracy, or without validation the training loss; more is better."""
    known = [value for value in (row["top1"], row["ema_top1"]) if value is not None]
    if known:
        return max(known)
    return -math.inf if row["train_loss"] is None else -row["train_loss"]
