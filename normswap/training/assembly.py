"""A run's objects: its network, opened and converted as the recipe says; the machine and processes;
trackers.
"""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from timm.layers import convert_sync_batchnorm
from timm.utils import ModelEmaV3
from torch import nn

from normswap import provenance
from normswap.errors import NormswapError, OptionError, RecipeError, SourceError, require_packages
from normswap.images import datasets
from normswap.layers.site_norm import SiteNorm
from normswap.models import devices, network_input
from normswap.plan import Body
from normswap.storage import checkpoint
from normswap.surgery import conversion, reverification, unfolding
from normswap.surgery.network import Network
from normswap.training.optimizing import Objective, Teacher, find_head, optimizer, scheduler
from normswap.training.recipe import Distill, Recipe
from normswap.training.run_folder import State
from normswap.training.training_images import Share, TrainingImages, drawn_by, places, validation

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

T = TypeVar("T")
_FOLDED = (
    "a folded network fine-tunes badly (arXiv:2305.11624): its weights have absorbed the norms'"
    " scales. Convert it to tune, skipinit or unfold first"
)
_NO_SOURCE = "Name the teacher: distill.teacher=MODEL"


@dataclass(frozen=True, eq=False)
class Subject:
    """The network as training begins, and before the recipe's conversion (`source`)."""

    network: Network
    source: nn.Module

    @property
    def module(self) -> nn.Module:
        return self.network.module

    def blank(self) -> nn.Module:
        """Return a copy with its architecture recorded, which saving would look for each time."""
        record = replace(provenance.of(self.module), arch=unfolding.architecture(self.module))
        return provenance.attach(copy.deepcopy(self.module), record)

    def preprocessing(self, side: int | None) -> Body:
        """Return the preprocessing of its images, `side` pixels high and wide if the recipe says
        so.
        """
        record = datasets.image_record(self.module)
        if side is not None:
            record["input_size"] = (record["input_size"][0], side, side)
        return record

    def teacher(self, distill: Distill) -> nn.Module:
        """Return the teacher: a MODEL, this network's source, or, of an unconverted network, a
        copy.

        Raises SourceError: the source cannot be opened, or has changed.
        """
        if distill.teacher != "source":
            return checkpoint.open_model(distill.teacher, named=False)
        if self.source is not self.module or not self.network.provenance.plan.steps:
            return copy.deepcopy(self.source)
        module = self.module
        try:
            origin = reverification.recorded(module, Path("the network"))
            source = checkpoint.open_model(origin, **reverification.how(module))
        except NormswapError as error:
            raise SourceError(
                "the teacher, the network's source, cannot be had", error.what, _NO_SOURCE
            ) from None
        if reverification.unchanged(source, module) is False:
            raise SourceError(
                f"the teacher {origin} is not what the network was made from", remedy=_NO_SOURCE
            )
        return source


def begin(model: nn.Module | None, recipe: Recipe) -> Subject:
    """Open the recipe's network if `model` is None; raises NormswapError: it cannot."""
    settings = recipe.model
    if model is None:
        if settings is None:
            raise OptionError(
                "nothing to train", "neither a MODEL is given nor does the recipe name one"
            )
        # Random weights depend on the seed, so that a run can be continued.
        with drawn_by(recipe.train.seed, "weights"):
            model = checkpoint.open_model(
                settings.name, weights=settings.weights, arch_args=settings.args, named=False
            )
    return Subject(Network.of(model), model)


def converted(subject: Subject, recipe: Recipe, say: Callable[[str], None]) -> Subject:
    """Convert the network if the recipe says so, as a new one; `say` is called with notes for the
    user.
    """
    network = subject.network
    model = subject.source
    how = recipe.convert
    if how is not None:
        say(f"converting to {how.to}")
        images = None
        if how.calibrate:
            place = places(recipe.data)[0]
            seed = recipe.train.seed
            images = datasets.make_loader(
                model,
                place,
                split="train",
                samples=how.samples,
                seed=seed,
                workers=0,
                labelled=False,
            )
        result = conversion.convert(network, how.to, calibrate=images, **how.options)
        for note in result.notes:
            say(note)
        network = result.network
    steps = network.provenance.plan.steps
    if steps and steps[-1].scheme == "folded":
        say(_FOLDED)
    return Subject(network, model)


def read_slurm() -> None:
    """Set torchrun's variables from SLURM's, if srun has started this process.

    Only srun sets SLURM_STEP_ID: a batch script is one process, and has SLURM_NTASKS, too.

    Raises OptionError: the address where the processes meet is not set.
    """
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if (
        "RANK" in os.environ
        or not {"SLURM_STEP_ID", "SLURM_PROCID"} <= os.environ.keys()
        or int(tasks) == 1
    ):
        return
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        remedy = (
            "Export the first node's name and a free port before srun, as recipes/finetune.sbatch"
            " does"
        )
        raise OptionError(f"srun has started {tasks} processes", f"no {missing[0]}", remedy)
    for name, slurms in (("RANK", "PROCID"), ("LOCAL_RANK", "LOCALID"), ("WORLD_SIZE", "NTASKS")):
        os.environ[name] = os.environ[f"SLURM_{slurms}"]


def meet(backend: str) -> None:
    """Join the other processes that torchrun has started, under a name that only this start has.

    torchrun's store survives a restart: under torch's own name processes would find the addresses
    of dead ones.
    """
    variables = os.environ
    if dist.is_initialized() or variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    shared = dist.TCPStore(variables["MASTER_ADDR"], int(variables["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"start {variables['TORCHELASTIC_RESTART_COUNT']}", shared)
    rank = int(variables["RANK"])
    world = int(variables["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def from_first(engine: Accelerator, read: Callable[[], T]) -> T:
    """Let the first process read something from its disk, and return it in all of them."""
    from accelerate.utils import broadcast_object_list

    value: T = broadcast_object_list([read() if engine.is_main_process else None])[0]
    return value


@contextmanager
def stop_on_request() -> Iterator[threading.Event]:
    """Note a SIGTERM, as schedulers send it, instead of dying of it; only the main thread may."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)


def accelerator(recipe: Recipe, device: str, out: Path, track: str) -> Accelerator:
    """Set up Accelerate's view of the machine: processes, device, precision.

    Raises RecipeError: it is no recipe; OptionError: no such device or precision, or accelerate is
    not installed.
    """
    if not isinstance(recipe, Recipe):
        remedy = "normswap.load_recipe(NAME or FILE) gives one; `normswap recipes` lists the names"
        raise RecipeError(f"a recipe is wanted, not {recipe!r:.80}", remedy=remedy)
    require_packages("fine-tuning", ("accelerate",), "train")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    cpu = devices.find(device).type == "cpu"
    if recipe.train.precision == "fp16" and cpu:
        raise OptionError("train.precision fp16 needs a GPU", remedy="Use bf16, or no")
    read_slurm()
    meet("gloo" if cpu else "nccl")
    # Accelerate keeps one state per process and refuses another precision later; runs may follow
    # each other here.
    AcceleratorState._reset_state(reset_partial_state=not dist.is_initialized())
    GradientState._reset_state()
    return Accelerator(
        cpu=cpu,
        mixed_precision=recipe.train.precision,
        gradient_accumulation_steps=recipe.train.accumulate,
        log_with=trackers(track) or None,
        project_dir=str(out / "trackers"),
    )


def trackers(asked: str) -> list[str]:
    """Return Accelerate's names of the trackers to use: `auto` (TensorBoard, if it is there),
    `none`, or a comma list.

    Raises OptionError: Accelerate does not know it, or it is not installed.
    """
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    there = [str(name) for name in get_available_trackers()]
    if asked == "auto":
        return [name for name in ("tensorboard",) if name in there]
    names = [] if asked == "none" else asked.split(",")
    if unknown := [name for name in names if name not in there]:
        remedy = (
            f"Accelerate knows {', '.join(LOGGER_TYPE_TO_CLASS)}; pip installs one. Or write auto,"
            " or none"
        )
        raise OptionError(f"tracker {unknown[0]!r} is unknown, or not installed", remedy=remedy)
    return names


class Task:
    """The objects of the training loop.

    `subject` is the network as training begins; without `validates` no validation images are
    opened.
    """

    def __init__(
        self,
        subject: Subject,
        images: TrainingImages,
        recipe: Recipe,
        engine: Accelerator,
        *,
        validates: bool = True,
    ) -> None:
        train = recipe.train
        self.recipe = recipe
        self.engine = engine
        self.share = Share(engine.process_index, engine.num_processes, train.accumulate)
        micro = self.share.micro(recipe.data.batch_size)
        if (recipe.data.augment.mixup or recipe.data.augment.cutmix) and micro % 2:
            raise OptionError(f"mixup needs an even number of images per process, not {micro}")
        record = subject.preprocessing(recipe.data.input_size)
        self.images = images
        # An epoch has whole batches, and leaves out other images each time.
        self.per_epoch = len(images.images) // recipe.data.batch_size
        self.updates = max(round(train.epochs * self.per_epoch), 1)
        classifies = images.labelled or network_input.classifies(
            subject.module, record["input_size"]
        )
        self.validation = None
        if classifies and validates:
            self.validation = validation(
                record, recipe.data, self.share, train.seed, batch=max(micro, 64)
            )
        self.classes: int | None = (
            getattr(subject.module, "num_classes", None) if images.labelled else None
        )

        self.layout = torch.channels_last if train.channels_last else torch.contiguous_format
        self.raw = copy.deepcopy(subject.module).to(engine.device).to(memory_format=self.layout)
        self.dtype = next(self.raw.parameters()).dtype
        if train.sync_bn and engine.num_processes > 1:
            self.raw = synchronized(self.raw, engine.device)
        self.ema = (
            ModelEmaV3(self.raw, train.ema.decay, use_warmup=train.ema.warmup)
            if train.ema
            else None
        )
        self.clip = recipe.optim.clip
        if self.clip is not None and self.clip.mode == "agc":
            find_head(self.raw, subject.network)
        teacher = None
        if recipe.distill is not None:
            teacher = Teacher(subject.teacher(recipe.distill), subject.module).to(engine.device)
            teacher = teacher.to(memory_format=self.layout)
        self.objective = Objective(recipe, self.raw, teacher, classifies=classifies)
        optim = optimizer(self.raw, recipe.optim, subject.network)
        self.scheduler = scheduler(optim, recipe.schedule, self.updates, self.per_epoch)
        if train.compile:
            self.raw.compile()
        self.model: nn.Module = engine.prepare_model(self.raw)
        self.optimizer: AcceleratedOptimizer = engine.prepare_optimizer(optim)
        if self.ema is not None:
            # DDP has given every process the weights of the first.
            self.ema.set(self.raw)

    def parts(self) -> State:
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
    """Replace every BatchNorm by torch's SyncBatchNorm; OptionError where that cannot compute the
    same.
    """
    if device.type == "cpu":
        raise OptionError("train.sync_bn needs GPUs", "torch's SyncBatchNorm does not run on a CPU")
    for path, norm in model.named_modules():
        if isinstance(norm, SiteNorm) and (norm.ghost or norm.act is not None):
            why = "torch's SyncBatchNorm has no ghost batches and no activation"
            raise OptionError(f"train.sync_bn does not fit the norm {path}", why)
    converted: nn.Module = convert_sync_batchnorm(model)
    return converted
