"""Several processes: torchrun on this machine, without its own words; and those that others start, on any number.

torchrun and `accelerate launch` tell a process who it is by RANK and its like. SLURM's srun has variables of its own.
"""

from __future__ import annotations

import os
import time
import uuid
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
    """Return whether torchrun, `accelerate launch`, srun, or this file has started this process as one of several."""
    return "LOCAL_RANK" in os.environ or _is_task_of_srun()


def _is_task_of_srun() -> bool:
    """A batch script has SLURM_NTASKS, too; SLURM_STEP_ID is srun's."""
    return {"SLURM_STEP_ID", "SLURM_PROCID"} <= os.environ.keys() and int(os.environ.get("SLURM_NTASKS", "1")) > 1


def read_slurm() -> None:
    """Where srun has started this process, say so in the variables that torchrun sets; as timm reads SLURM's.

    Raises:
        OptionError: nobody says where the processes meet.
    """
    if "RANK" in os.environ or not _is_task_of_srun():
        return
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        remedy = "Export the first node's name and a free port before srun, as recipes/finetune.sbatch does"
        raise OptionError(f"srun has started {os.environ['SLURM_NTASKS']} processes", f"no {missing[0]}", remedy)
    for name, slurms in (("RANK", "PROCID"), ("LOCAL_RANK", "LOCALID"), ("WORLD_SIZE", "NTASKS")):
        os.environ[name] = os.environ[f"SLURM_{slurms}"]


def restarted() -> int:
    """Return how often torchrun has started this process again, in the place of one that failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def meet(backend: str) -> None:
    """Join the other processes that torchrun has started, under a name that this start of them alone has.

    torchrun's store outlives the processes, and each machine counts its restarts by itself: under a name that was used
    before, Gloo would find the addresses of processes that are gone.
    """
    if dist.is_initialized() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shared = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master=False)
    store = dist.PrefixStore(common_name(shared, rank, world), shared)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def common_name(store: dist.Store, rank: int, world: int, *, patience: float = 300) -> str:
    """Agree on a name that no processes have had before; the first process makes it.

    Each of the others asks under a name of its own, which the first answers until it has read the answer: so neither
    takes one that is gone for one that is there.

    Args:
        patience: seconds that the first process waits for all others.

    Raises:
        TrainingError: another process does not come.
    """
    name = uuid.uuid4().hex
    if rank > 0:
        store.set(f"asking/{rank}", name)
        answer: str = store.get(f"answer/{name}").decode()
        store.set(f"{answer}/{rank}", "")
        return answer
    deadline = time.monotonic() + patience
    for other in range(1, world):
        while not store.check([f"{name}/{other}"]):
            if store.check([f"asking/{other}"]):
                store.set("answer/" + store.get(f"asking/{other}").decode(), name)
            if time.monotonic() > deadline:
                raise TrainingError(f"process {other} of {world} has not started", remedy="See what its machine says")
            time.sleep(0.05)
    return name


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
