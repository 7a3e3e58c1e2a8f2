"""Agreement between the processes of a run, on one machine or several that share no disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from normswap.errors import NormswapError, OptionError, TrainingError, first_line
from normswap.training.run_folder import Folder, State, TrainingState, differences

if TYPE_CHECKING:  # an optional package
    from accelerate import Accelerator

T = TypeVar("T")


def gathered(engine: Accelerator, one: T) -> list[T]:
    """Return what every process has, in every process, by rank."""
    if engine.num_processes == 1:
        return [one]
    every: list[T] = [one] * engine.num_processes
    dist.all_gather_object(every, one)
    return every


def in_all(engine: Accelerator, work: Callable[[], T]) -> T:
    """Do the same in every process; where it fails in one, all raise that error."""
    try:
        outcome = work()
    except Exception as error:
        gathered(engine, error if isinstance(error, NormswapError) else TrainingError(first_line(error)))
        raise
    for problem in gathered(engine, None):
        if problem is not None:
            raise problem
    return outcome


def in_first(engine: Accelerator, work: Callable[[], None]) -> None:
    """Let the first process do it, while the others wait; where it fails, all raise that error."""
    in_all(engine, lambda: work() if engine.is_main_process else None)


def from_first(engine: Accelerator, read: Callable[[], T]) -> T:
    """Let the first process read something, and return it in all; where that fails, all raise that error."""
    box: list[T] = []
    in_first(engine, lambda: box.append(read()))
    return _broadcast(engine, box, 0)[0]


def _broadcast(engine: Accelerator, one: T, source: int) -> T:
    if engine.num_processes == 1:
        return one
    sent = [one]
    dist.broadcast_object_list(sent, source)
    return sent[0]


def require_same_run(engine: Accelerator, folder: Folder) -> None:
    """See that all processes train by one recipe and on the same images, which are on the disks of several machines.

    Weights may differ by rounding where they are random; those of the first process are taken.

    Raises:
        OptionError: a process has others than the first.
    """
    identities = gathered(engine, folder.identity)
    for rank, identity in enumerate(identities):
        if differ := differences(identities[0], {**identity, "network": identities[0]["network"]}):
            remedy = "Start every process with the same recipe and images"
            raise OptionError(f"process {rank} does not train as the first", "; ".join(differ[:4]), remedy)


def newest_state(engine: Accelerator, folder: Folder | None) -> tuple[TrainingState, State] | None:
    """Return the newest state that a process finds, in every process; None if none finds one.

    After a machine was replaced, the one that has the state need not be the first any more.

    Args:
        folder: where this process looks; another machine's may have nothing there.

    Raises:
        NormswapError: a state cannot be read, or is that of another run.
    """
    readable = folder if folder is not None and folder.state.is_file() else None
    saved = in_all(engine, lambda: readable.read_state() if readable is not None else None)
    updates = gathered(engine, -1 if saved is None else saved[0].update)
    source = updates.index(max(updates))
    return _broadcast(engine, saved, source)
