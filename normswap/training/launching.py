"""Several processes on one machine: torchrun, without its own words."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from normswap.errors import OptionError, TrainingError, spelled

_OURS = "NORMSWAP_LAUNCHED"  # in the environment of processes that `launch` starts


def is_ours() -> bool:
    """Return whether `launch` has started this process, and will say what became of it."""
    return _OURS in os.environ


def is_worker() -> bool:
    """Return whether torchrun, `accelerate launch`, or this file has started this process."""
    return "LOCAL_RANK" in os.environ


def restarted() -> int:
    """Return how often torchrun has started this process again, in the place of one that failed."""
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
    """Return how many processes `--nproc` asks for; `auto`: one per GPU, or one.

    Raises:
        OptionError: it is no number above zero.
    """
    if wanted == "auto":
        return max(torch.cuda.device_count(), 1)
    if not wanted.isdigit() or int(wanted) < 1:
        raise OptionError(f"--nproc {wanted}", "must be a number above zero, or auto")
    return int(wanted)


def launch(processes: int, arguments: Sequence[str], *, restarts: int = 0) -> int:
    """Run `normswap ARGUMENTS` in so many processes that train together; returns the exit code (128 + n for signal n).

    Args:
        restarts: so often all of them are started again when one has failed; they continue the run.

    Raises:
        TrainingError: a process was killed, and not started again.
    """
    os.environ[_OURS] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // processes, 1)))
    torchrun = ["--standalone", "--local-addr=localhost", f"--nproc-per-node={processes}", f"--max-restarts={restarts}"]
    try:
        run.run(run.parse_args([*torchrun, "-m", "normswap", *arguments]))
    except SignalException as signal:  # the workers have had it too, and saved what there was
        return 128 + int(signal.sigval)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode < 0:
            why = f"by signal {-failure.exitcode}" if failure.exitcode != -9 else "(is there memory enough?)"
            remedy = f"{spelled('resume', 'auto')} continues the run"
            raise TrainingError(f"process {rank} of {processes} was killed {why}", remedy=remedy) from None
        return int(failure.exitcode)
    return 0
