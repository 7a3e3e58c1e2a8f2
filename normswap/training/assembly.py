"""What a training run is made of: its network, the processes, the trackers, the loop's objects."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from timm.layers import convert_sync_batchnorm
from timm.utils import ModelEmaV3
from torch import nn

from normswap import copying, provenance
from normswap.errors import (
    NormswapError,
    OptionError,
    RecipeError,
    SourceError,
    explained,
    first_few,
    require_packages,
)
from normswap.images import datasets
from normswap.models import devices, network_input
from normswap.models.preprocessing import stated
from normswap.models.stated_images import comma_list
from normswap.plan import Body
from normswap.sites.site import sites_of
from normswap.storage import checkpoint
from normswap.surgery import conversion, reverification, unfolding
from normswap.surgery.network import Network
from normswap.training.optimizing import Objective, Teacher, find_head, optimizer, scheduler
from normswap.training.recipe import Distill, Recipe
from normswap.training.run_folder import TRACKERS, State
from normswap.training.training_images import (
    Share,
    TrainingImages,
    drawn_by,
    held_out,
    places,
    validation,
)

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
    """The network that is trained, before the first update.

    Args:
        network: The network with its record: how it is called, and where it is from.
        source: The module before the recipe's conversion. Without a conversion it is the network's
            own module.
    """

    network: Network
    source: nn.Module

    @property
    def module(self) -> nn.Module:
        """The torch module of the network, as training begins: after the recipe's conversion."""
        return self.network.module

    def blank(self, side: int | None) -> nn.Module:
        """Return a copy of the network with a record that names its architecture.

        The run saves copies of this copy. Without the name, each save would have to compare the
        network with the known architectures.

        Args:
            side: Height and width in pixels of the images that it trains on, which the record says.
                With None they are the network's own.
        """
        record = replace(provenance.of(self.module), arch=unfolding.architecture(self.module))
        if side is not None:
            images = {**stated(self.module), "input_size": self.preprocessing(side)["input_size"]}
            # timm's record may have a size of its own for tests.
            images.pop("test_input_size", None)
            record = replace(record, pretrained_cfg=images)
        return provenance.attach(copying.duplicate(self.module, memo={}), record)

    def preprocessing(self, side: int | None) -> Body:
        """Return how the network takes images: input_size, mean, std and more, as timm names them.

        Args:
            side: Height and width in pixels. With None they are the network's own.
        """
        record = datasets.image_record(self.module)
        if side is not None:
            record["input_size"] = (record["input_size"][0], side, side)
        return record

    def teacher(self, distill: Distill) -> nn.Module:
        """Return the network that teaches, for distillation.

        The teacher is the MODEL that the recipe names, or else this network before its conversion.
        If the network was never converted, the teacher is a copy of it.

        Raises:
            SourceError: The source cannot be opened, or has changed.
        """
        if distill.teacher != "source":
            return checkpoint.open_model(distill.teacher, named=False)
        was_converted_here = self.source is not self.module
        was_converted_before = bool(self.network.provenance.plan.steps)
        if was_converted_here or not was_converted_before:
            return copying.duplicate(self.source, memo={})

        # The network was converted before, and its provenance names what it was made from. The path
        # stands for the network in errors.
        module = self.module
        try:
            origin = reverification.recorded(module, Path("the network"))
            source = checkpoint.open_model(origin, **reverification.how(module))
        except NormswapError as error:
            raise SourceError(
                "the teacher, the network's source, cannot be had", error.what, _NO_SOURCE
            ) from None
        # `unchanged` returns None where nothing was stored by which to tell. The source is then
        # trusted.
        if reverification.unchanged(source, module) is False:
            raise SourceError(
                f"the teacher {origin} is not what the network was made from", remedy=_NO_SOURCE
            )
        return source


def drawing_weights(recipe: Recipe) -> AbstractContextManager[None]:
    """Return a context in which a network is opened for a run.

    Random weights, and those of a new head, depend on the recipe's seed alone there, so that a run
    that is continued begins with the same weights.
    """
    return drawn_by(recipe.train.seed, "weights")


def begin(model: nn.Module | None, recipe: Recipe) -> Subject:
    """Return the network of a run before the recipe's conversion.

    Args:
        model: The network. With None the one that the recipe names is opened.
        recipe: The recipe.

    Raises:
        NormswapError: The recipe names no network, or the network cannot be opened.
    """
    settings = recipe.model
    if model is None:
        if settings is None:
            raise OptionError(
                "nothing to train", "neither a MODEL is given nor does the recipe name one"
            )
        # A factory that only a recipe names is not imported (`named`).
        with drawing_weights(recipe):
            model = checkpoint.open_model(
                settings.name, weights=settings.weights, arch_args=settings.args, named=False
            )
    # Before its conversion the network is its own source.
    return Subject(Network.of(model), model)


def converted(
    subject: Subject,
    recipe: Recipe,
    say: Callable[[str], None],
    progress: Callable[[int, int], None] | None = None,
) -> Subject:
    """Return the network after the recipe's conversion, or as it is if there is none.

    Args:
        subject: The network before its conversion, which is not changed.
        recipe: The recipe.
        say: Called with each sentence that the user should read.
        progress: Called while values are fitted, with the layers done and their total.
    """
    network = subject.network
    model = subject.source
    settings = recipe.convert
    if settings is not None:
        say(f"converting to {settings.to}")
        # Values are fitted to training images, whose labels are not read.
        images = None
        if settings.calibrate:
            training_place, _ = places(recipe.data)
            images = datasets.make_loader(
                model,
                training_place,
                split="train",
                samples=settings.samples,
                seed=recipe.train.seed,
                workers=0,
                labelled=False,
            )
        result = conversion.convert(
            network,
            settings.to,
            calibrate=images,
            progress=progress,
            **settings.options,
        )
        for note in result.notes:
            say(note)
        network = result.network

    # The weights of a folded network have absorbed the norms' scales, which makes it hard to train.
    steps = network.provenance.plan.steps
    if steps and steps[-1].scheme == "folded":
        say(_FOLDED)
    return Subject(network, model)


def read_slurm() -> None:
    """Set the environment variables that torchrun sets (RANK ...) from those of SLURM.

    Nothing is done if RANK is set already, or if srun has not started several processes. A process
    was started by srun if SLURM_STEP_ID is set. SLURM_NTASKS is no such sign: it is also set in a
    batch script, which is a single process.

    Raises:
        OptionError: The address where the processes meet is not set.
    """
    # Whoever started the process, such as torchrun, has set the variables already.
    if "RANK" in os.environ:
        return
    tasks = os.environ.get("SLURM_NTASKS", "1")
    is_started_by_srun = {"SLURM_STEP_ID", "SLURM_PROCID"} <= os.environ.keys()
    if not is_started_by_srun or int(tasks) == 1:
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
    """Join the other processes that torchrun has started.

    Nothing is done if torchrun has started none, or if the processes have met already. The
    processes exchange their addresses in torchrun's store, under a name that is new at each
    restart. The store survives a restart, so under one name for all they would find the addresses
    of processes that are dead.

    Args:
        backend: How the processes exchange tensors, gloo or nccl.
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
    """Let the first process read something from its disk, and return it in all processes.

    Args:
        engine: The processes of the run.
        read: The function that reads. It is called in the first process alone.
    """
    from accelerate.utils import broadcast_object_list

    value: T = broadcast_object_list([read() if engine.is_main_process else None])[0]
    return value


def require_the_same_images(digest: str) -> None:
    """Raise OptionError in every process if the processes do not read the same images.

    Each process takes its share of an order that is drawn from the number of images.

    Args:
        digest: The digest of the images that this process reads.
    """
    from accelerate.utils import gather_object

    digests = gather_object([digest])
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if others:
        raise OptionError(
            "the processes do not read the same images",
            f"those of {first_few([f'rank {rank}' for rank in others])} are not those of rank 0",
            "Give every machine the same files",
        )


@contextmanager
def stop_on_request() -> Iterator[threading.Event]:
    """In a `with` block, let a SIGTERM set the event that is yielded, and not end the process.

    Schedulers send a SIGTERM before they end a job. Only the main thread may take signals. In
    another thread nothing sets the event.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    former_handler = signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, former_handler)


def accelerator(recipe: Recipe, device: str, out: Path, track: str) -> Accelerator:
    """Return Accelerate's `Accelerator`, which manages processes, device, precision and trackers.

    Args:
        recipe: The recipe.
        device: One of auto, cpu, cuda and mps.
        out: The run's folder.
        track: The trackers, as `trackers` takes them.

    Raises:
        RecipeError: The argument `recipe` is no recipe.
        OptionError: There is no such device or precision, or accelerate is not installed.
    """
    if not isinstance(recipe, Recipe):
        remedy = "normswap.load_recipe(NAME or FILE) gives one; `normswap recipes` lists the names"
        raise RecipeError(f"a recipe is wanted, not {recipe!r:.80}", remedy=remedy)
    require_packages("fine-tuning", ("accelerate",), "train")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    # The backend through which the processes meet must fit the device that they will use.
    cpu = devices.find(device).type == "cpu"
    if recipe.train.precision == "fp16" and cpu:
        raise OptionError("train.precision fp16 needs a GPU", remedy="Use bf16, or no")
    read_slurm()
    meet("gloo" if cpu else "nccl")

    # Accelerate keeps the settings of a process, and refuses another precision later. One process
    # may do several runs, so they are reset.
    AcceleratorState._reset_state(reset_partial_state=not dist.is_initialized())
    GradientState._reset_state()
    return Accelerator(
        cpu=cpu,
        mixed_precision=recipe.train.precision,
        gradient_accumulation_steps=recipe.train.accumulate,
        log_with=trackers(track) or None,
        project_dir=str(out / TRACKERS),
    )


def trackers(asked: str) -> list[str]:
    """Return the trackers to use, by Accelerate's names.

    Args:
        asked: One of `auto` (TensorBoard, if it is installed) and `none`, or names between commas.

    Raises:
        OptionError: Accelerate does not know a tracker, or it is not installed.
    """
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    installed = [str(name) for name in get_available_trackers()]
    if asked == "auto":
        return [name for name in ("tensorboard",) if name in installed]
    if asked == "none":
        return []

    names = asked.split(",")
    if unknown := [name for name in names if name not in installed]:
        remedy = (
            f"Accelerate knows {', '.join(LOGGER_TYPE_TO_CLASS)}; pip installs one. Or write auto,"
            " or none"
        )
        raise OptionError(f"tracker {unknown[0]!r} is unknown, or not installed", remedy=remedy)
    return names


class Task:
    """The objects of the training loop: network, images, loss, optimizer, schedule and more.

    Args:
        subject: The network as training begins.
        images: The training images.
        recipe: The recipe.
        engine: Accelerate's view of the machine.
        validates: Whether networks are compared during training, on validation images or, without
            accuracies, on images held out of training.

    Raises:
        OptionError: The recipe does not fit the network or the processes.
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

        # Every process has a share of each batch. Mixup mixes images of one micro-batch in pairs.
        self.share = Share(engine.process_index, engine.num_processes, train.accumulate)
        micro_batch_size = self.share.micro(recipe.data.batch_size)
        mixes = recipe.data.augment.mixes
        if mixes and micro_batch_size % 2:
            raise OptionError(
                f"mixup needs an even number of images per process, not {micro_batch_size}"
            )

        # Networks are compared on images that are held out of training.
        record = subject.preprocessing(recipe.data.input_size)
        self.images = images
        # Accuracies are measured if the network gives scores of classes. Training on labels takes
        # that for granted.
        size = record["input_size"]
        remedy = "data.input_size says another size"
        with explained(OptionError, f"the network takes no images of {comma_list(size)}", remedy):
            classifies = network_input.classifies(subject.module, size) or images.labelled
        self.validation = None
        if classifies and validates:
            self.validation = validation(
                record, recipe.data, self.share, train.seed, batch=max(micro_batch_size, 64)
            )
        # Without accuracies, networks are compared by their loss on inputs that are held out.
        self.held_out: datasets.Loader | None = None
        if self.validation is None and validates:
            self.held_out = held_out(record, recipe.data, images)

        # An epoch has whole batches only. The images that fill none differ from epoch to epoch.
        self.per_epoch = len(images.images) // recipe.data.batch_size
        self.updates = max(round(train.epochs * self.per_epoch), 1)

        # With None no label is checked against the number of classes.
        self.classes: int | None = None
        if images.labelled:
            self.classes = getattr(subject.module, "num_classes", None)

        # The network is trained as a copy, so that the caller's stays as it is.
        self.layout = torch.channels_last if train.channels_last else torch.contiguous_format
        self.raw = (
            copying.duplicate(subject.module, memo={})
            .to(engine.device)
            .to(memory_format=self.layout)
        )
        self.dtype = next(nn.Module.parameters(self.raw)).dtype
        if train.sync_bn and engine.num_processes > 1:
            self.raw = synchronized(self.raw, engine.device)
        self.ema = (
            ModelEmaV3(self.raw, train.ema.decay, use_warmup=train.ema.warmup)
            if train.ema
            else None
        )

        # Adaptive clipping leaves out the classifier. If none is found, that is an error here, and
        # not at the first update.
        self.clip = recipe.optim.clip
        if self.clip is not None and self.clip.mode == "agc":
            find_head(self.raw, subject.network)

        # The teacher is given the images of the network, and prepares them anew for itself.
        teacher = None
        if recipe.distill is not None:
            teacher = Teacher(subject.teacher(recipe.distill), subject.module).to(engine.device)
            teacher = teacher.to(memory_format=self.layout)
        self.objective = Objective(recipe, self.raw, teacher, classifies=classifies)

        # `raw` has the parameters. `model` is the same network as Accelerate wraps it, for DDP.
        optim = optimizer(self.raw, recipe.optim, subject.network)
        self.scheduler = scheduler(optim, recipe.schedule, self.updates, self.per_epoch)
        if train.compile:
            self.raw.compile()
        self.model: nn.Module = engine.prepare_model(self.raw)
        self.optimizer: AcceleratedOptimizer = engine.prepare_optimizer(optim)
        if self.ema is not None:
            # DDP has given every process the weights of the first. The average begins with them.
            self.ema.set(self.raw)

    def parts(self) -> State:
        """Return the tensors from which a run can be continued: weights, optimizer and more.

        They are the training's own tensors, not copies, so the next update changes them.
        """
        scaler = self.engine.scaler
        return {
            "model": self.raw.state_dict(),
            "ema": self.ema.module.state_dict() if self.ema else None,
            "optimizer": self.optimizer.state_dict(),
            "scaler": scaler.state_dict() if scaler else None,
        }

    def restore(self, parts: State) -> None:
        """Load weights, averaged weights and optimizer from a saved state, to continue a run.

        Args:
            parts: The tensors of the state, as `parts` returned them when it was saved.
        """
        self.raw.load_state_dict(parts["model"])
        if self.ema is not None:
            self.ema.module.load_state_dict(parts["ema"])
        self.optimizer.load_state_dict(parts["optimizer"])
        if self.engine.scaler is not None and parts["scaler"] is not None:
            self.engine.scaler.load_state_dict(parts["scaler"])


def synchronized(model: nn.Module, device: torch.device) -> nn.Module:
    """Put torch's SyncBatchNorm in place of every BatchNorm, and return the network.

    Args:
        model: The network, which is changed.
        device: The device on which it is trained.

    Raises:
        OptionError: SyncBatchNorm does not run on the device, or computes something else than one
            of the norms.
    """
    if device.type == "cpu":
        raise OptionError("train.sync_bn needs GPUs", "torch's SyncBatchNorm does not run on a CPU")
    for site in sites_of(model):
        if not site.can_be_synchronized:
            why = "torch's SyncBatchNorm has no ghost batches and no activation"
            raise OptionError(f"train.sync_bn does not fit the norm {site.path}", why)
    converted: nn.Module = convert_sync_batchnorm(model)
    return converted
