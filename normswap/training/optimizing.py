"""The optimizer of a recipe, its learning rate at every update, and what its gradients are clipped to; from timm."""

from __future__ import annotations

from typing import Any

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler.cosine_lr import CosineLRScheduler
from timm.scheduler.multistep_lr import MultiStepLRScheduler
from timm.scheduler.poly_lr import PolyLRScheduler
from timm.scheduler.scheduler import Scheduler
from timm.utils import adaptive_clip_grad, dispatch_clip_grad
from torch import nn

from normswap import provenance, schemes
from normswap.analysis.weight_decay import param_groups
from normswap.errors import OptionError, TraceError, first_line
from normswap.graph import inspection
from normswap.models.weight_files import quiet
from normswap.training.recipe import Clip, Optim, Schedule


def optimizer(model: nn.Module, part: Optim) -> torch.optim.Optimizer:
    """timm's optimizer of that name, over groups by the role of every parameter.

    Raises:
        OptionError: timm does not know it, or it does not take such groups.
    """
    policy = _paper(model) if part.decay == "auto" else part.decay
    groups = param_groups(
        model, part.weight_decay, policy, layer_decay=part.layer_decay, scalar_lr_scale=part.scalar_lr
    )
    try:
        with quiet():
            return create_optimizer_v2(groups, part.name, lr=part.lr, momentum=part.momentum)
    except Exception as error:  # timm raises what it likes
        raise OptionError(f"optim.name {part.name!r} cannot be used", first_line(error)) from None


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
        self.optimizer, self.peak = optimizer, optimizer.param_groups[0]["lr"]
        self.scheduler = _scheduler(optimizer, part, updates, per_epoch)

    def set(self, update: int, factor: float = 1.0) -> float:
        """Set the groups' rates for an update, counted from 0; returns the rate before `lr_scale`."""
        self.scheduler.step_update(update)
        for group in self.optimizer.param_groups:
            group["lr"] *= factor
        first = self.optimizer.param_groups[0]
        return float(first["lr"] / first.get("lr_scale", 1.0))


def _scheduler(optimizer: torch.optim.Optimizer, part: Schedule, updates: int, per_epoch: int) -> Scheduler:
    warmup = round(part.warmup * per_epoch)
    start = optimizer.param_groups[0]["lr"] / (warmup + 1)  # the first update is one step up from 0, not at 0
    rest: dict[str, Any] = {"warmup_t": warmup, "warmup_lr_init": start, "t_in_epochs": False}
    if part.name in ("cosine", "poly"):
        kind: Any = CosineLRScheduler if part.name == "cosine" else PolyLRScheduler
        with quiet():
            return kind(optimizer, t_initial=updates - warmup, lr_min=part.min_lr, warmup_prefix=True, **rest)
    at: list[float] = list(part.milestones) if part.name == "multistep" else []
    if part.name == "step":
        every = part.milestones[0] * per_epoch
        at = [every * i / per_epoch for i in range(1, int(updates / every) + 1)]
    steps = [round(epochs * per_epoch) + 1 for epochs in at]  # timm's milestone m acts at update m - 1
    return MultiStepLRScheduler(optimizer, decay_t=steps, decay_rate=part.rate, warmup_prefix=False, **rest)


class Clipping:
    """Gradient clipping; adaptive clipping leaves the classifier alone (Brock et al. 2021, arXiv:2102.06171).

    Args:
        model: the network, not wrapped.
        part: `optim.clip` of the recipe.
    """

    def __init__(self, model: nn.Module, part: Clip) -> None:
        self.part = part
        spared = {id(p) for p in classifier(model).parameters()} if part.mode == "agc" else set()
        self.parameters = [p for p in model.parameters() if p.requires_grad and id(p) not in spared]

    def clip(self) -> None:
        """Clip the gradients in place."""
        if self.part.mode == "agc":
            adaptive_clip_grad([p for p in self.parameters if p.grad is not None], self.part.value)
        else:
            dispatch_clip_grad(self.parameters, self.part.value, mode=self.part.mode)


def classifier(model: nn.Module) -> nn.Module:
    """The layer that gives the logits: what timm says it is, else the last linear layer of the traced network.

    Raises:
        OptionError: it has none.
    """
    ask = getattr(model, "get_classifier", None)
    found: Any = ask() if callable(ask) else None
    if isinstance(found, nn.Module) and any(True for _ in found.parameters()):
        return found
    try:
        path = inspection.inspect(model).classifier
    except TraceError:
        path = None
    if path is None:
        raise OptionError("the classifier of this network is not known", "optim.clip.mode agc and distill.kind need it")
    return model.get_submodule(path)
