"""A process of its own for each contender: it opens the file, answers once, and runs when it is asked to.

So the thread pools of one runtime are not in the way of another's, a crash takes one contender with it, and the memory
that is measured is that of one network in one runtime.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from normswap.benchmarking import runtimes
from normswap.benchmarking.runtimes import Session, Settings
from normswap.errors import NormswapError

_PRELOADED = ["torch", "timm", "normswap.storage.checkpoint", "normswap.benchmarking.worker"]
_LONGEST = 300  # characters of an error
Answer = TypeVar("Answer")


class BrokenWorkerError(Exception):
    """A contender that does not run; says why, in a line."""


class Ready(NamedTuple):
    """The outputs, seconds from opening the file to the first answer, and MiB at the peak while it runs.

    The seconds hold what compilers compile, but for what they build once per machine (torch's compiled headers). The
    memory is above what the interpreter and the runtime's libraries took before there was a network; on a GPU it is
    what torch holds there; None where the system does not say.
    """

    output: np.ndarray
    seconds: float
    memory: float | None


class Burst(NamedTuple):
    """Seconds of a pass in each block of passes that was timed, passes in all, processor seconds per pass."""

    seconds: list[float]
    passes: int
    cpu: float


class Worker:
    """The parent's side of a contender.

    Args:
        folder: for what compilers write; nothing compiled before is in it.
    """

    def __init__(self, folder: Path) -> None:
        ways = multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("forkserver" if "forkserver" in ways else "spawn")
        context.set_forkserver_preload(_PRELOADED)
        before = set(multiprocessing.active_children())
        self.pool = ProcessPoolExecutor(1, context, _isolate, (str(folder),))
        self.pool.submit(int).result()
        (self.process,) = set(multiprocessing.active_children()) - before

    def ask(self, function: Callable[..., Answer], *args: object) -> Answer:
        """Call a function in the worker's process.

        Raises:
            BrokenWorkerError: it failed, or the process died.
        """
        try:
            return self.pool.submit(_guarded, function, args).result()
        except BrokenProcessPool:
            self.pool.shutdown()
            code = self.process.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise BrokenWorkerError(f"its process died ({how})") from None

    def close(self) -> None:
        """End the process."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.process.terminate()
        self.process.join()


def reason(error: BaseException) -> str:
    """Put an error on one line: the innermost cause, its class unless it is ours, and as much of its text as fits."""
    while error.__cause__ is not None and not isinstance(error, NormswapError):
        error = error.__cause__
    text = " ".join(str(error).split())
    text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."
    if isinstance(error, NormswapError):  # a sentence, which says all
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# --- in the worker ----------------------------------------------------------------------------------------------------

_session: list[Session] = []


def _isolate(folder: str) -> None:
    """Leave interrupts to the parent, and print nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder


def _guarded(function: Callable[..., Answer], args: tuple[object, ...]) -> Answer:
    try:
        return function(*args)
    except Exception as error:  # a runtime raises what it likes, and not all of it can be sent
        raise BrokenWorkerError(reason(error)) from None


def begin(name: str, file: Path, kind: str, settings: Settings, images: np.ndarray) -> Ready:
    """Open the network in its runtime, and let it answer."""
    runtime, mode = runtimes.find(name)
    runtime.prepare(settings.device)
    before = resident("VmRSS")
    start = time.perf_counter()
    session = runtime.start(file, kind, mode, settings, images)
    session.run()
    seconds = time.perf_counter() - start
    _session[:] = [session]
    output = session.read()
    session.run()  # TorchScript's executor optimizes on the second run
    gc.collect()
    reset_peak()
    for _ in range(2):
        session.run()
    if settings.device == "cuda":  # what other runtimes hold there is not torch's to count
        return Ready(output, seconds, torch.cuda.max_memory_allocated() / 2**20 or None)
    peak = resident("VmHWM") if settings.device == "cpu" else None
    return Ready(output, seconds, None if peak is None or before is None else peak - before)


def turn(seconds: float, threads: int) -> Burst:
    """Run it for about so long, after a pass that is not timed: another contender has had the processor's caches."""
    from torch.utils.benchmark import Timer  # it talks of CUDA where it is imported: not on the terminal

    passes = 0

    def run() -> None:
        nonlocal passes
        passes += 1
        _session[0].run()

    timer = Timer("run()", globals={"run": run}, timer=time.perf_counter, num_threads=threads)
    cpu = time.process_time()
    measured = timer.blocked_autorange(min_run_time=seconds)
    cpu = (time.process_time() - cpu) / passes
    return Burst(measured.times, measured.number_per_run * len(measured.raw_times), cpu)


def resident(field: str) -> float | None:
    """Read this process's resident memory in MiB, now (`VmRSS`) or at its peak (`VmHWM`); None if nobody says."""
    with suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next((float(line.split()[1]) / 1024 for line in lines if line.startswith(field)), None)
    return None


def reset_peak() -> None:
    """Count the peak of the memory anew."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: VmHWM becomes VmRSS
