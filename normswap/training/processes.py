"""The processes of one run, as torchrun, `accelerate launch` or SLURM's srun have started them; and their SIGTERM."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from normswap.errors import OptionError

if TYPE_CHECKING:  # an optional package
    from accelerate import Accelerator

T = TypeVar("T")


def read_slurm() -> None:
    """Where srun has started this process, say so in the variables that torchrun sets; as timm reads SLURM's.

    SLURM_STEP_ID is srun's: a batch script has SLURM_NTASKS, too, and is one process.

    Raises:
        OptionError: nobody says where the processes meet.
    """
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if "RANK" in os.environ or not {"SLURM_STEP_ID", "SLURM_PROCID"} <= os.environ.keys() or int(tasks) == 1:
        return
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        remedy = "Export the first node's name and a free port before srun, as recipes/finetune.sbatch does"
        raise OptionError(f"srun has started {tasks} processes", f"no {missing[0]}", remedy)
    for name, slurms in (("RANK", "PROCID"), ("LOCAL_RANK", "LOCALID"), ("WORLD_SIZE", "NTASKS")):
        os.environ[name] = os.environ[f"SLURM_{slurms}"]


def meet(backend: str) -> None:
    """Join the other processes that torchrun has started, under a name that this start of them alone has.

    torchrun's store outlives the processes that it starts again: under torch's own name, which stays the same, they
    would find the addresses of processes that are gone.
    """
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if dist.is_initialized() or count is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    shared = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=dist.PrefixStore(f"start {count}", shared), rank=rank, world_size=world)


def from_first(engine: Accelerator, read: Callable[[], T]) -> T:
    """Let the first process read something from its disk, and return it in all of them."""
    from accelerate.utils import broadcast_object_list

    value: T = broadcast_object_list([read() if engine.is_main_process else None])[0]
    return value


class Stop:
    """Whether somebody has asked to stop, by SIGTERM as schedulers send it."""

    asked = False


@contextmanager
def stop_on_request() -> Iterator[Stop]:
    """Note a SIGTERM instead of dying of it. Only the main thread may; elsewhere nothing is ever asked."""
    stop = Stop()

    def note(number: int, frame: FrameType | None) -> None:
        stop.asked = True

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGTERM, note)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)


def ignore_sigterm(worker: int) -> None:
    """For a loader's process: schedulers signal all processes of a job, and this one is needed until the run stops."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
