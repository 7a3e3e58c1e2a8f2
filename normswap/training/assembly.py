"""All that a run moves, put together from a recipe and its network; the machine it runs on, and its trackers."""

from __future__ import annotations

import copy
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from timm.layers import convert_sync_batchnorm
from timm.utils import ModelEmaV3
from torch import nn

from normswap.errors import OptionError, first_line
from normswap.layers.site_norm import SiteNorm
from normswap.models import devices
from normswap.training import processes, recipe_files
from normswap.training.objective import Objective, Teacher
from normswap.training.optimizing import Clipping, Rate, optimizer
from normswap.training.recipe import Recipe
from normswap.training.run_folder import State
from normswap.training.subject import Subject, classifier
from normswap.training.training_images import Share, TrainingImages, validation

if TYPE_CHECKING:  # an optional package
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer


def accelerator(recipe: Recipe, device: str, out: Path, trackers: list[str]) -> Accelerator:
    """Set up Accelerate's view of the machine: processes, device, precision.

    Raises:
        RecipeError: it is no recipe.
        OptionError: a device that is not there, or a precision that it has not; or accelerate is not installed.
    """
    recipe_files.require_recipe(recipe)
    try:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState
    except ImportError as error:
        raise OptionError("fine-tuning needs accelerate", first_line(error), "pip install 'normswap[train]'") from None
    cpu = devices.find(device).type == "cpu"
    if recipe.train.precision == "fp16" and cpu:
        raise OptionError("train.precision fp16 needs a GPU", remedy="Use bf16, or no")
    processes.read_slurm()
    processes.meet("gloo" if cpu else "nccl")
    # Accelerate keeps one state per process and refuses another precision later; runs may follow each other here
    AcceleratorState._reset_state(reset_partial_state=not dist.is_initialized())
    GradientState._reset_state()
    return Accelerator(
        cpu=cpu, mixed_precision=recipe.train.precision, gradient_accumulation_steps=recipe.train.accumulate,
        log_with=trackers or None, project_dir=str(out / "trackers"),
    )  # fmt: skip


def trackers(wanted: str) -> list[str]:
    """Return Accelerate's names of the trackers to use: `auto` (those that are set up here), `none`, or a comma list.

    Raises:
        OptionError: unknown, or not installed.
    """
    asked_by = {"tensorboard": (), "wandb": ("WANDB_API_KEY", "WANDB_MODE"), "mlflow": ("MLFLOW_TRACKING_URI",)}
    if wanted == "auto":  # asking for a login, or writing ./mlruns, is not for us to decide
        here = [name for name in asked_by if importlib.util.find_spec(name) is not None]
        return [name for name in here if name == "tensorboard" or any(v in os.environ for v in asked_by[name])]
    names = [] if wanted == "none" else wanted.split(",")
    for name in names:
        if name not in asked_by:
            raise OptionError(f"unknown tracker {name!r}", remedy=f"Known: {', '.join(asked_by)}, auto, none")
        if importlib.util.find_spec(name) is None:
            raise OptionError(f"tracker {name} is not installed", remedy=f"pip install {name}")
    return names


class Task:
    """All that the training loop moves.

    Args:
        subject: the network as training begins; images: what it is trained on.
        recipe: what to do.
        engine: Accelerate's view of the machine.
    """

    def __init__(self, subject: Subject, images: TrainingImages, recipe: Recipe, engine: Accelerator) -> None:
        train = recipe.train
        self.recipe, self.engine = recipe, engine
        self.share = Share(engine.process_index, engine.num_processes, train.accumulate)
        micro = self.share.micro(recipe.data.batch_size)
        if (recipe.data.augment.mixup or recipe.data.augment.cutmix) and micro % 2:
            raise OptionError(f"mixup needs an even number of images per process, not {micro}")
        record = subject.preprocessing(recipe.data.input_size)
        self.images = images
        self.per_epoch = self.images.updates_per_epoch
        self.updates = max(round(train.epochs * self.per_epoch), 1)
        self.validation = validation(record, recipe.data, self.share, train.seed, batch=max(micro, 64))
        self.classes: int | None = getattr(subject.module, "num_classes", None) if images.labelled else None

        self.layout = torch.channels_last if train.channels_last else torch.contiguous_format
        self.raw = copy.deepcopy(subject.module).to(engine.device).to(memory_format=self.layout)
        self.dtype = next(self.raw.parameters()).dtype
        if train.sync_bn and engine.num_processes > 1:
            self.raw = synchronized(self.raw, engine.device)
        self.ema = ModelEmaV3(self.raw, train.ema.decay, use_warmup=train.ema.warmup) if train.ema else None
        clip = recipe.optim.clip
        adaptive = clip is not None and clip.mode == "agc"
        head = self.raw.get_submodule(classifier(subject.network)) if adaptive else None
        self.objective = Objective(recipe, self.raw, self._teacher(subject))
        optim = optimizer(self.raw, recipe.optim, subject.network)
        self.rate = Rate(optim, recipe.schedule, self.updates, self.per_epoch)
        self.clipping = Clipping(self.raw, clip, head) if clip else None
        if train.compile:
            self.raw.compile()
        self.model: nn.Module = engine.prepare_model(self.raw)
        self.optimizer: AcceleratedOptimizer = engine.prepare_optimizer(optim)
        if self.ema is not None:
            self.ema.set(self.raw)  # DDP has given every process the weights of the first

    def _teacher(self, subject: Subject) -> Teacher | None:
        part = self.recipe.distill
        if part is None:
            return None
        teacher = Teacher(subject.teacher(part), subject.module)
        return teacher.to(self.engine.device).to(memory_format=self.layout)

    def parts(self) -> State:
        """Return the tensors of a state."""
        scaler = self.engine.scaler
        return {
            "model": self.raw.state_dict(),
            "ema": self.ema.module.state_dict() if self.ema else None,
            "optimizer": self.optimizer.state_dict(),
            "scaler": scaler.state_dict() if scaler else None,
        }

    def restore(self, parts: State) -> None:
        """Continue from the tensors of a state."""
        self.raw.load_state_dict(parts["model"])
        if self.ema is not None:
            self.ema.module.load_state_dict(parts["ema"])
        self.optimizer.load_state_dict(parts["optimizer"])
        if self.engine.scaler is not None and parts["scaler"] is not None:
            self.engine.scaler.load_state_dict(parts["scaler"])


def synchronized(model: nn.Module, device: torch.device) -> nn.Module:
    """Let torch's SyncBatchNorm take the place of every BatchNorm; the tensors and their names stay.

    Raises:
        OptionError: torch has none for the device, or for a norm of the network.
    """
    if device.type == "cpu":
        raise OptionError("train.sync_bn needs GPUs", "torch's SyncBatchNorm does not run on a CPU")
    for path, norm in model.named_modules():
        if isinstance(norm, SiteNorm) and (norm.ghost or norm.act is not None):
            why = "torch's SyncBatchNorm has no ghost batches and no activation"
            raise OptionError(f"train.sync_bn does not fit the norm {path}", why)
    converted: nn.Module = convert_sync_batchnorm(model)
    return converted
