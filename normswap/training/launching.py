"""Several processes on one machine: what torchrun does, without its own words."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from normswap.errors import OptionError, TrainingError

_OURS = "NORMSWAP_LAUNCHED"  # in the environment of processes that `run` starts


def is_ours() -> bool:
    """Whether `run` has started this process, and will say what became of it."""
    return _OURS in os.environ


def is_worker() -> bool:
    """Whether torchrun, `accelerate launch`, or this file has started this process."""
    return "LOCAL_RANK" in os.environ


def restarted() -> int:
    """How often torchrun has started this process again, in the place of one that failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def meet(backend: str) -> None:
    """After a restart, join the other processes under names of their own.

    torchrun's store outlives the processes. There Gloo would find the addresses of those that are gone.
    """
    if not restarted() or dist.is_initialized() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shared = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master=False)
    store = dist.PrefixStore(f"restart{restarted()}", shared)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def count(wanted: str) -> int:
    """How many processes `--nproc` asks for; `auto`: one per GPU, or one.

    Raises:
        OptionError: it is no number above zero.
    """
    if wanted == "auto":
        return max(torch.cuda.device_count(), 1)
    if not wanted.isdigit() or int(wanted) < 1:
        raise OptionError(f"--nproc {wanted}", "must be a number above zero, or auto")
    return int(wanted)


def run(processes: int, arguments: Sequence[str], *, restarts: int = 0) -> int:
    """Run `normswap ARGUMENTS` in so many processes that train together; returns the exit code (128 + n for signal n).

    Args:
        restarts: so often all of them are started again when one has failed; they continue the run.

    Raises:
        TrainingError: a process was killed, and not started again.
    """
    os.environ[_OURS] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // processes, 1)))
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=restarts, local_addr="localhost",
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)("-m", "normswap", *arguments)
    except SignalException as signal:  # the workers have had it too, and saved what there was
        return 128 + int(signal.sigval)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode < 0:
            why = f"by signal {-failure.exitcode}" if failure.exitcode != -9 else "(is there memory enough?)"
            remedy = "--resume auto continues the run"
            raise TrainingError(f"process {rank} of {processes} was killed {why}", remedy=remedy) from None
        return int(failure.exitcode)
    return 0
