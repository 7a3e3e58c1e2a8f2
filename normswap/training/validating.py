"""The accuracy of a network while it trains, over the shares of all processes, and what the best one is chosen by."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from normswap.images.accuracy import Evaluation, evaluate
from normswap.images.datasets import Loader
from normswap.training.run_folder import Row

if TYPE_CHECKING:  # an optional package
    from accelerate import Accelerator


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
