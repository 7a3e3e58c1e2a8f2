"""What a run needs, put together from a recipe: the network and its teacher, the images, the optimizer."""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from timm.utils import ModelEmaV3
from torch import nn

from normswap import provenance
from normswap.errors import OptionError, first_line
from normswap.images import datasets
from normswap.models import zoo
from normswap.plan import Body
from normswap.storage import checkpoint
from normswap.surgery import conversion
from normswap.training import launching, synced_batchnorm, teachers
from normswap.training.filter_means import Means
from normswap.training.objective import Objective, Teacher
from normswap.training.optimizing import Clipping, Rate, optimizer
from normswap.training.recipe import Recipe
from normswap.training.training_images import Share, Training, drawn_by, places, validation

if TYPE_CHECKING:  # an optional package
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

Say = Callable[[str], None]
DEVICES = ("auto", "cpu", "cuda", "mps")


@dataclass
class Start:
    """Where training begins: the network, before and after the recipe's own conversion."""

    given: nn.Module
    before: nn.Module | None
    model: nn.Module


def start(model: nn.Module | None, recipe: Recipe, say: Say) -> Start:
    """Open the recipe's network if none is given, and convert it if the recipe says so; `model` is not changed.

    Raises:
        NormswapError: whatever opening and converting raise; OptionError: there is no network.
    """
    if model is None:
        if recipe.model is None:
            raise OptionError("nothing to train", "neither a MODEL is given nor does the recipe name one")
        part = recipe.model
        with drawn_by(recipe.train.seed, "weights"):  # random ones are the seed's, or no run could be continued
            model = checkpoint.open_model(part.name, weights=part.weights, arch_args=part.args, named=False)
    if recipe.convert is None:
        return Start(model, None, model)
    places(recipe.data)  # that none are named is said before anything is converted
    say(f"converting to {recipe.convert.to}")
    images: datasets.Loader | None = None
    if recipe.convert.calibrate:
        place = places(recipe.data)[0]
        images = datasets.make_loader(
            model, place, split="train", samples=recipe.convert.samples, seed=recipe.train.seed, workers=0
        )
    done = conversion.convert(model, recipe.convert.to, calibrate=images, **recipe.convert.options)
    for note in done.notes:
        say(note)
    return Start(model, model, done.model)


def advice(model: nn.Module) -> str | None:
    """What should be said about training this network, if anything."""
    record = provenance.of(model)
    if record is None or not record.plan.steps or record.plan.steps[-1].scheme != "folded":
        return None
    return (
        "a folded network fine-tunes badly (arXiv:2305.11624): its weights have taken in the norms' scales. "
        "Convert it with --to tune, skipinit or unfold first"
    )


def accelerator(recipe: Recipe, device: str, out: Path, trackers: list[str]) -> Accelerator:
    """Accelerate's view of the machine: processes, device, precision.

    Raises:
        OptionError: a device that is not there, or a precision that it has not; or accelerate is not installed.
    """
    try:
        from accelerate import Accelerator, DistributedDataParallelKwargs
        from accelerate.state import AcceleratorState, GradientState
    except ImportError as error:
        raise OptionError("fine-tuning needs accelerate", first_line(error), "pip install 'normswap[train]'") from None
    if device not in DEVICES:
        raise OptionError(f"device {device!r}", f"must be one of {', '.join(DEVICES)}")
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(device, True):
        raise OptionError(f"device {device} is not available here", remedy="Use --device cpu, or auto")
    cpu = device == "cpu" or not any(there.values())
    if recipe.train.precision == "fp16" and cpu:
        raise OptionError("train.precision fp16 needs a GPU", remedy="Use bf16, or no")
    launching.meet("gloo" if cpu else "nccl")
    # Accelerate keeps one state per process and refuses another precision later; runs may follow each other here
    AcceleratorState._reset_state(reset_partial_state=not dist.is_initialized())
    GradientState._reset_state()
    part = recipe.distill
    idle = part is not None and part.kind == "features" and part.weight == 1  # then the classifier has no gradient
    return Accelerator(
        cpu=cpu, mixed_precision=recipe.train.precision, gradient_accumulation_steps=recipe.train.accumulate,
        log_with=trackers or None, project_dir=str(out / "trackers"),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=idle)],
    )  # fmt: skip


def trackers(wanted: str) -> list[str]:
    """Accelerate's names of the trackers to use: `auto` (those that are set up here), `none`, or a comma list.

    Raises:
        OptionError: unknown, or not installed.
    """
    known = ("tensorboard", "wandb", "mlflow")
    here = [name for name in known if importlib.util.find_spec(name) is not None]
    if wanted == "auto":  # asking for a login, or writing ./mlruns, is not for us to decide
        told = {"wandb": ("WANDB_API_KEY", "WANDB_MODE"), "mlflow": ("MLFLOW_TRACKING_URI",)}
        return [name for name in here if name == "tensorboard" or any(v in os.environ for v in told[name])]
    names = [] if wanted == "none" else wanted.split(",")
    for name in names:
        if name not in known:
            raise OptionError(f"unknown tracker {name!r}", remedy=f"Known: {', '.join(known)}, auto, none")
        if name not in here:
            raise OptionError(f"tracker {name} is not installed", remedy=f"pip install {name}")
    return names


class Task:
    """All that the training loop moves.

    Args:
        begin: where training begins.
        recipe: what to do.
        engine: Accelerate's view of the machine.
    """

    def __init__(self, begin: Start, recipe: Recipe, engine: Accelerator) -> None:
        train = recipe.train
        self.recipe, self.engine = recipe, engine
        self.share = Share(engine.process_index, engine.num_processes, train.accumulate)
        micro = self.share.micro(recipe.data.batch_size)
        if (recipe.data.augment.mixup or recipe.data.augment.cutmix) and micro % 2:
            raise OptionError(f"mixup needs an even number of images per process, not {micro}")
        record = _preprocessing(begin.model, recipe.data.input_size)
        labelled = recipe.distill is None or recipe.distill.weight < 1
        self.images = Training(record, recipe.data, train.seed, labelled=labelled)
        self.per_epoch = self.images.updates_per_epoch
        self.updates = max(round(train.epochs * self.per_epoch), 1)
        self.validation = validation(record, recipe.data, self.share, train.seed, batch=max(micro, 64))
        self.classes: int | None = getattr(begin.model, "num_classes", None) if labelled else None

        self.layout = torch.channels_last if train.channels_last else torch.contiguous_format
        self.raw = copy.deepcopy(begin.model).to(engine.device).to(memory_format=self.layout)
        self.dtype = next(self.raw.parameters()).dtype
        self.means = Means(self.raw, recipe.anneal, self.updates) if recipe.anneal else None
        if train.sync_bn and engine.num_processes > 1:
            synced_batchnorm.synchronize(self.raw)
        self.ema = ModelEmaV3(self.raw, train.ema.decay, use_warmup=train.ema.warmup) if train.ema else None
        self.objective = Objective(recipe, self.raw, self._teacher(begin))
        optim = optimizer(self.raw, recipe.optim)
        self.rate = Rate(optim, recipe.schedule, self.updates, self.per_epoch)
        self.clipping = Clipping(self.raw, recipe.optim.clip) if recipe.optim.clip else None
        if train.compile:
            self.raw.compile()
        self.model: nn.Module = engine.prepare_model(self.raw)
        self.optimizer: AcceleratedOptimizer = engine.prepare_optimizer(optim)
        if self.ema is not None:
            self.ema.set(self.raw)  # DDP has given every process the weights of the first

    def _teacher(self, begin: Start) -> Teacher | None:
        part = self.recipe.distill
        if part is None:
            return None
        network = teachers.find(part, begin.model, begin.before)
        teacher = Teacher(network, begin.model, features=part.kind == "features")
        return teacher.to(self.engine.device).to(memory_format=self.layout)

    def parts(self) -> dict[str, object]:
        """The tensors of a state."""
        scaler = self.engine.scaler
        return {
            "model": self.raw.state_dict(),
            "ema": self.ema.module.state_dict() if self.ema else None,
            "optimizer": self.optimizer.state_dict(),
            "scaler": scaler.state_dict() if scaler else None,
        }

    def restore(self, parts: Mapping[str, Any]) -> None:
        """Continue from the tensors of a state."""
        self.raw.load_state_dict(parts["model"])
        if self.ema is not None:
            self.ema.module.load_state_dict(parts["ema"])
        self.optimizer.load_state_dict(parts["optimizer"])
        if self.engine.scaler is not None and parts["scaler"] is not None:
            self.engine.scaler.load_state_dict(parts["scaler"])


def _preprocessing(model: nn.Module, side: int | None) -> Body:
    """The network's record, for images of another size if the recipe says so."""
    origin = provenance.of(model)
    record = dict(origin.pretrained_cfg) if origin else {}
    config = {**zoo.data_config(model), "num_classes": getattr(model, "num_classes", record.get("num_classes"))}
    if record.get("label_names"):
        config["label_names"] = record["label_names"]
    if side is not None:
        config["input_size"] = (config["input_size"][0], side, side)
    return config
