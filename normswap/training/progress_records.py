"""The progress of a run, and its result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from normswap.training.run_folder import Row

GONE = "another process is gone"  # of which the launcher knows more


@dataclass(frozen=True)
class TrainingProgress:
    """The progress of a run.

    Args:
        update, updates: done, and in all.
        epoch, epochs: the same in epochs.
        images_per_s: over all processes, validation left out.
        lr: of the latest update.
        loss: mean over the epoch so far.
        top1: of the latest validation, in percent.
    """

    update: int
    updates: int
    epoch: float
    epochs: float
    images_per_s: float
    lr: float
    loss: float
    top1: float | None


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Args:
        best: directory of the network with the best validation accuracy, averaged or not; without validation images,
            with the lowest training loss.
        last: directory of the network after the last update.
        model: that network, in eval mode, on the CPU.
        rows: of metrics.csv.
        best_epoch: when the best was found.
        updates: done.
        finished: False if the run was asked to stop, and can be continued.
        notes: what the user should know.
    """

    best: Path
    last: Path
    model: nn.Module
    rows: tuple[Row, ...]
    best_epoch: float | None
    updates: int
    finished: bool
    notes: tuple[str, ...]
