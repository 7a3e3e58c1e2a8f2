"""A process of its own for each contender: it opens the file, answers once, and runs when it is told to.

So the thread pools of one runtime are not in the way of another's, a crash takes one contender with it, and the memory
that is measured is that of one network in one runtime.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from normswap.benchmarking import runtimes
from normswap.benchmarking.runtimes import Session, Settings
from normswap.errors import NormswapError

_PRELOADED = ["torch", "timm", "normswap.storage.checkpoint", "normswap.benchmarking.runtimes"]
_MIB = 2**20
_LONGEST = 300  # of what an error says
_PATIENCE = 5.0  # seconds that a worker has to end by itself


class Broken(Exception):
    """A contender that does not run; says why, in a line."""


@dataclass(frozen=True)
class Job:
    """What a worker is to run.

    Args:
        runtime: its name, with its mode.
        file: what it opens; kind: of which kind that is.
        folder: for what compilers write, shared by the workers of a run; nothing compiled before is found.
    """

    runtime: str
    file: Path
    kind: str
    settings: Settings
    folder: Path


@dataclass(frozen=True)
class Ready:
    """What a worker knows before it is timed.

    Args:
        output: what the network computed.
        seconds: from opening the file to the first answer: this is where compilers compile. What they build once per
            machine (torch's compiled headers) has been built before.
        latency: seconds of one run, the best of the first few.
        memory: peak of the memory it holds while it runs, in MiB, above what the interpreter and the runtime's
            libraries took before there was a network; on a GPU, of what torch holds there; None where the system does
            not say.
    """

    output: np.ndarray
    seconds: float
    latency: float
    memory: float | None


@dataclass(frozen=True)
class Burst:
    """Seconds of each run in a row, and processor seconds per run of all threads together."""

    seconds: list[float]
    cpu: float


class Worker:
    """The parent's side of a contender."""

    def __init__(self, job: Job, images: np.ndarray) -> None:
        context = _context()
        self.job, (self.pipe, theirs) = job, context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, job, images))
        self.process.start()
        theirs.close()

    def ready(self) -> Ready:
        """Wait until it has answered once.

        Raises:
            Broken: it cannot.
        """
        return self._receive()

    def burst(self, runs: int, *, settle: bool) -> Burst:
        """Run it so many times in a row.

        Args:
            settle: run it once more, before, untimed: another contender has had the processor's caches.

        Raises:
            Broken: it failed.
        """
        with suppress(ConnectionError):  # then it tells why, or has died
            self.pipe.send((runs, settle))
        return self._receive()

    def _receive(self) -> Any:
        try:
            told = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            code = self.process.exitcode or 0
            raise Broken(
                f"its process died ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"
            ) from None
        if isinstance(told, str):
            raise Broken(told)
        return told

    def close(self) -> None:
        """It ends when nobody listens any more, or is ended."""
        self.pipe.close()
        self.process.join(_PATIENCE)
        self.process.terminate()
        self.process.join()


def _context() -> Any:
    """Processes start from one that has imported torch, but never run it."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


# --- in the worker ----------------------------------------------------------------------------------------------------


def _work(pipe: Connection, job: Job, images: np.ndarray) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted, and ends its workers
    _silence()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(job.folder)
    try:
        session, ready = _start(job, images)
        pipe.send(ready)
        gc.collect()
        gc.disable()
        while True:
            runs, settle = pipe.recv()
            pipe.send(_burst(session, runs, settle))
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:  # a runtime raises what it likes
        pipe.send(reason(error))


def _silence() -> None:
    """What libraries print is not for the terminal."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)


def _start(job: Job, images: np.ndarray) -> tuple[Session, Ready]:
    runtime, mode = runtimes.find(job.runtime)
    for package in runtime.needs:
        importlib.import_module(package)
    runtime.once(job.settings)
    before = resident(peak=False)
    start = time.perf_counter()
    session = runtime.start(job.file, job.kind, job.settings, mode)
    session.feed(images)
    session.run()
    seconds = time.perf_counter() - start
    output = session.read()
    _burst(session, 1, False)  # TorchScript's executor optimizes on the second run
    gc.collect()
    reset_peak(job.settings.device)
    latency = min(_burst(session, 2, False).seconds)
    return session, Ready(output, seconds, latency, _memory(job.settings.device, before))


def _burst(session: Session, runs: int, settle: bool) -> Burst:
    if settle:
        session.run()
    seconds = []
    cpu = time.process_time()
    for _ in range(runs):
        start = time.perf_counter()
        session.run()
        seconds.append(time.perf_counter() - start)
    return Burst(seconds, (time.process_time() - cpu) / runs)


def reason(error: BaseException) -> str:
    """An error on one line: the innermost cause, its class, and as much of its text as fits."""
    while error.__cause__ is not None and not isinstance(error, NormswapError):
        error = error.__cause__
    text = " ".join(str(error).split())
    text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# --- memory -----------------------------------------------------------------------------------------------------------


def reset_peak(device: str) -> None:
    """From here on the peak is counted anew."""
    if device == "cuda" and (cuda := _cuda()):
        cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: VmHWM becomes VmRSS


def resident(*, peak: bool) -> float | None:
    """Resident memory of this process in MiB, now or at its peak; None where the system does not say."""
    field = "VmHWM:" if peak else "VmRSS:"
    try:
        lines: Sequence[str] = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((float(line.split()[1]) / 1024 for line in lines if line.startswith(field)), None)


def _cuda() -> Any:
    """torch.cuda, where torch runs something there: what other runtimes hold is not torch's to count."""
    torch: Any = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def _memory(device: str, before: float | None) -> float | None:
    if device == "cuda":
        cuda = _cuda()
        return cuda.max_memory_allocated() / _MIB if cuda else None
    if device != "cpu":
        return None
    now = resident(peak=True)
    return None if now is None or before is None else now - before
