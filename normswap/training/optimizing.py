"""The optimizer of a recipe, its learning rate at every update, and what its gradients are clipped to; from timm.

torch and timm are imported inside functions: recipes, whose keys these are, are listed and checked without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from normswap import schemes
from normswap.errors import OptionError, first_line
from normswap.plan import Body
from normswap.training.recipe_part import NotNegative, Part, Positive, Share

if TYPE_CHECKING:
    import torch
    from timm.scheduler.scheduler import Scheduler
    from torch import nn

    from normswap.surgery.network import Network


class Clip(Part):
    """`optim.clip`: gradient clipping; AGC leaves the classifier alone, by role."""

    mode: Literal["agc", "norm", "value"] = "agc"
    value: Positive = 0.01


class Optim(Part):
    """`optim`: a timm optimizer and its groups."""

    name: str = Field("sgd", description="timm's name: sgd (with Nesterov), momentum, adamw, lamb ...")
    lr: Positive = Field(0.1, description="Peak, for the whole batch (not per image).")
    momentum: Share = 0.9
    weight_decay: NotNegative = 5e-5
    decay: Literal["auto", "kim2022", "timm", "all", "weights-only"] = Field(
        "auto", description="Who decays: a policy of `normswap decay`; auto: kim2022, or the scheme's paper's."
    )
    scalar_lr: Positive = Field(1.0, description="Factor on the lr of scalars (Fixup: 0.1).")
    layer_decay: Positive | None = Field(None, description="Factor on the lr per layer below the head.")
    args: Body = Field(default_factory=dict, description="More of timm's, e.g. {betas: [0.9, 0.95]}.")
    clip: Clip | None = None


class Schedule(Part):
    """`schedule`: a timm scheduler, stepped per update."""

    name: Literal["cosine", "step", "multistep", "poly", "constant"] = "cosine"
    warmup: NotNegative = Field(0.0, description="Epochs (may be a fraction) from lr 0 to the peak.")
    min_lr: NotNegative = 0.0
    milestones: tuple[Positive, ...] = Field((), description="multistep: epochs; step: one number, every so many.")
    rate: Positive = Field(0.1, description="step, multistep: the factor.")


def optimizer(model: nn.Module, part: Optim, network: Network | None = None) -> torch.optim.Optimizer:
    """timm's optimizer of that name, over groups by the role of every parameter.

    Args:
        network: the record of the network that `model` is a copy of, where one has been made.

    Raises:
        OptionError: timm does not know it, or it does not take such groups.
    """
    from timm.optim import create_optimizer_v2

    from normswap.analysis.weight_decay import param_groups
    from normswap.models.weight_files import quiet

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
    from normswap import provenance

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
    from timm.scheduler.cosine_lr import CosineLRScheduler
    from timm.scheduler.multistep_lr import MultiStepLRScheduler
    from timm.scheduler.poly_lr import PolyLRScheduler

    from normswap.models.weight_files import quiet

    kinds: dict[str, Callable[..., Scheduler]] = {
        "cosine": CosineLRScheduler, "poly": PolyLRScheduler, "multistep": MultiStepLRScheduler}  # fmt: skip
    warmup = round(part.warmup * per_epoch)
    start = optimizer.param_groups[0]["lr"] / (warmup + 1)  # the first update is one step up from 0, not at 0
    rest: dict[str, object] = {"warmup_t": warmup, "warmup_lr_init": start, "t_in_epochs": False}
    if part.name in ("cosine", "poly"):
        with quiet():
            return kinds[part.name](
                optimizer, t_initial=updates - warmup, lr_min=part.min_lr, warmup_prefix=True, **rest
            )
    at: list[float] = list(part.milestones) if part.name == "multistep" else []
    if part.name == "step":
        every = part.milestones[0] * per_epoch
        at = [every * i / per_epoch for i in range(1, int(updates / every) + 1)]
    steps = [round(epochs * per_epoch) + 1 for epochs in at]  # timm's milestone m acts at update m - 1
    return kinds["multistep"](optimizer, decay_t=steps, decay_rate=part.rate, warmup_prefix=False, **rest)


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
        from timm.utils import dispatch_clip_grad

        from normswap.training import adaptive_clipping

        if self.part.mode == "agc":
            adaptive_clipping.clip(self.parameters, self.part.value)
        else:
            dispatch_clip_grad(self.parameters, self.part.value, mode=self.part.mode)
