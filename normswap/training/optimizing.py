"""The optimizer of a recipe, its learning rate at every update, and what its gradients are clipped to; from timm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler.cosine_lr import CosineLRScheduler
from timm.scheduler.multistep_lr import MultiStepLRScheduler
from timm.scheduler.poly_lr import PolyLRScheduler
from timm.scheduler.scheduler import Scheduler
from timm.utils import dispatch_clip_grad
from torch import nn

from normswap import provenance, schemes
from normswap.analysis.weight_decay import param_groups
from normswap.errors import OptionError, first_line
from normswap.models.weight_files import quiet
from normswap.surgery.network import Network
from normswap.training.recipe import Clip, Optim, Schedule


def optimizer(model: nn.Module, part: Optim, network: Network | None = None) -> torch.optim.Optimizer:
    """timm's optimizer of that name, over groups by the role of every parameter.

    Args:
        network: the record of the network that `model` is a copy of, where one has been made.

    Raises:
        OptionError: timm does not know it, or it does not take such groups.
    """
    policy = _paper(model) if part.decay == "auto" else part.decay
    groups = param_groups(
        model, part.weight_decay, policy, layer_decay=part.layer_decay, scalar_lr_scale=part.scalar_lr, network=network
    )
    try:
        with quiet():
            return create_optimizer_v2(groups, part.name, lr=part.lr, momentum=part.momentum, **part.args)
    except Exception as error:  # timm raises what it likes
        with_args = f" with optim.args {part.args}" if part.args else ""
        raise OptionError(f"optim.name {part.name!r}{with_args} cannot be used", first_line(error)) from None


def _paper(model: nn.Module) -> str:
    record = provenance.of(model)
    return schemes.get(record.plan.steps[-1].scheme).decay if record and record.plan.steps else "kim2022"


class Rate:
    """The learning rate: a function of the update alone, so that there is nothing to save.

    Args:
        optimizer: its groups' `lr_scale` are heeded.
        part: `schedule` of the recipe.
        updates: in all.
        per_epoch: updates.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, part: Schedule, updates: int, per_epoch: int) -> None:
        self.optimizer = optimizer
        self.scheduler = _scheduler(optimizer, part, updates, per_epoch)

    def set(self, update: int) -> float:
        """Set the groups' rates for an update, counted from 0; returns the rate before `lr_scale`."""
        self.scheduler.step_update(update)
        first = self.optimizer.param_groups[0]
        return float(first["lr"] / first.get("lr_scale", 1.0))


def _scheduler(optimizer: torch.optim.Optimizer, part: Schedule, updates: int, per_epoch: int) -> Scheduler:
    warmup = round(part.warmup * per_epoch)
    start = optimizer.param_groups[0]["lr"] / (warmup + 1)  # the first update is one step up from 0, not at 0
    common: dict[str, Any] = {"warmup_t": warmup, "warmup_lr_init": start, "t_in_epochs": False}
    if part.name in ("cosine", "poly"):
        kind: Callable[..., Scheduler] = CosineLRScheduler if part.name == "cosine" else PolyLRScheduler
        with quiet():
            return kind(optimizer, t_initial=updates - warmup, lr_min=part.min_lr, warmup_prefix=True, **common)
    epochs = list(part.milestones) if part.name == "multistep" else []
    if part.name == "step":
        every = part.milestones[0]
        epochs = [every * i for i in range(1, int(updates / per_epoch / every) + 1)]
    steps = [round(epoch * per_epoch) + 1 for epoch in epochs]  # timm's milestone m acts at update m - 1
    return MultiStepLRScheduler(optimizer, decay_t=steps, decay_rate=part.rate, warmup_prefix=False, **common)


class Clipping:
    """Gradient clipping; adaptive clipping leaves the classifier alone (Brock et al. 2021, arXiv:2102.06171).

    Args:
        model: the network, not wrapped.
        part: `optim.clip` of the recipe.
        head: its classifier, for adaptive clipping.
    """

    def __init__(self, model: nn.Module, part: Clip, head: nn.Module | None = None) -> None:
        self.part = part
        spared = {id(p) for p in head.parameters()} if part.mode == "agc" and head is not None else set()
        self.parameters = [p for p in model.parameters() if p.requires_grad and id(p) not in spared]

    def clip(self) -> None:
        """Clip the gradients in place."""
        dispatch_clip_grad(self.parameters, self.part.value, mode=self.part.mode)
