"""Time networks in their runtimes: every contender is checked first, then all take turns, round by round.

Each is a process of its own (`worker`), timed by `torch.utils.benchmark`. A contender that computes something else than
the network in eager mode is reported, not timed; so is one that is not installed, or does not run.
"""

from __future__ import annotations

import os
import platform
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from normswap.benchmarking import runtimes, worker
from normswap.benchmarking.forms import Form, Group
from normswap.benchmarking.runtimes import Settings
from normswap.benchmarking.worker import BrokenWorkerError, Burst, Ready, Worker, reason
from normswap.errors import OptionError
from normswap.plan import Body

# relative L2 at the outputs, against float32 on the CPU. Runtimes sum in other orders, and transform convolutions;
# a GPU rounds what it convolves to 10 bits of mantissa (TF32) unless told otherwise. Ranges of int8 were read off
# images, and this is noise: what int8 costs, `normswap export` measures
BOUNDS = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1, "int8": 0.5}
_TF32 = 1e-2
Say = Callable[[str], None]


@dataclass(frozen=True)
class TimedRow:
    """A contender: a form of a network, in a runtime, at a batch size.

    Args:
        status: ok; wrong (its outputs are not the network's: it was not timed); failed; or skipped; `reason` says why.
        error: relative L2 of its outputs against eager mode, in float32 on the CPU.
        ms, ms_low, ms_high: median and quartiles of one forward pass; best_ms: the fastest.
        cpu_ms: processor time of one pass, all threads together.
        images_per_s: batch / median.
        speedup, speedup_low, speedup_high: how many times as fast as the group's first form in eager mode: the median
            and quartiles over the rounds.
        memory_mib: see `worker.Ready`; ready_s: opening, compiling and the first answer.
        runs: forward passes that were timed; rounds: seconds of a pass in each block of passes, by round.
    """

    network: str
    form: str
    runtime: str
    batch: int
    status: str = "ok"
    reason: str = ""
    error: float | None = None
    ms: float | None = None
    ms_low: float | None = None
    ms_high: float | None = None
    best_ms: float | None = None
    cpu_ms: float | None = None
    images_per_s: float | None = None
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    memory_mib: float | None = None
    ready_s: float | None = None
    runs: int = 0
    rounds: list[list[float]] = field(default_factory=list)


class Quartiles(NamedTuple):
    """The first quartile, the median and the third quartile."""

    low: float
    median: float
    high: float


def quartiles(values: Sequence[float]) -> Quartiles:
    """Compute the quartiles of at least one value."""
    return Quartiles(*np.percentile(values, [25, 50, 75]).tolist())


def speedup(base: Sequence[Sequence[float]], times: Sequence[Sequence[float]]) -> Quartiles:
    """Compute how many times as fast as `base` something is, over the rounds, from the seconds of passes by round.

    A round's passes lie close together in time, so a machine that slows down slows both sides of each ratio.
    """
    pairs = zip(base, times, strict=True)
    return quartiles([float(np.median(slow) / np.median(fast)) for slow, fast in pairs])


@dataclass
class Contender:
    """A form in a runtime, from the start of its process to its row."""

    row: TimedRow
    worker: Worker | None = None
    ready: Ready | None = None
    bursts: list[Burst] = field(default_factory=list)

    def drop(self, status: str, why: str) -> None:
        """End its process, and note why it is not timed."""
        self.row = replace(self.row, status=status, reason=why)
        if self.worker is not None:
            self.worker.close()
        self.worker = self.ready = None

    @property
    def rounds(self) -> list[list[float]]:
        return [burst.seconds for burst in self.bursts]


def check_device(device: str) -> None:
    """Check that torch has the device.

    Raises:
        OptionError: it has not.
    """
    usable = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not usable[device]:
        raise OptionError(f"--device {device}", "torch finds none on this machine")


@dataclass(frozen=True)
class Benchmark:
    """Times forms in runtimes.

    Args:
        folder: for what the runtimes write, such as compiled code.
        wanted: names of runtimes; the first form runs in eager mode anyway.
        say: called with what is going on.
    """

    settings: Settings
    folder: Path
    wanted: Sequence[str]
    batches: Sequence[int] = (1,)
    say: Say = lambda text: None

    def run(self, groups: Sequence[Group]) -> list[TimedRow]:
        """Time every form of every group in the wanted runtimes, at every batch size."""
        rows: list[TimedRow] = []
        for group in groups:
            for batch in self.batches:
                with ExitStack() as stack:
                    contenders = [self.start(group, batch, *pair, stack) for pair in self._pairs(group)]
                    self._check(contenders, group, batch)
                    self.time(contenders, f"timing {group.network}, batch {batch}")
                rows += finished_rows(contenders)
        return rows

    def _pairs(self, group: Group) -> Iterator[tuple[Form, str]]:
        """Give each form in each runtime that opens some file of it; a file that none opens, in its own."""
        for i, form in enumerate(group.forms):
            named = dict.fromkeys((*(["eager"] if i == 0 else []), *self.wanted))
            able = [
                name for name in named
                if (form.foldable or name != "fuse") and runtimes.find(name)[0].takes(form.make)
            ]  # fmt: skip
            for name in able or runtimes.own(form.make):
                yield form, name

    def start(self, group: Group, batch: int, form: Form, name: str, stack: ExitStack) -> Contender:
        """Make the file, start the process, wait for its answer; `stack` ends the process."""
        contender = Contender(TimedRow(group.network, form.name, name, batch))
        runtime, _ = runtimes.find(name)
        kind = next(kind for kind in runtime.opens if kind in form.make)
        missing = runtimes.missing([*runtime.needs, *form.needs.get(kind, ())])
        if missing:
            contender.drop("skipped", f"{', '.join(missing)} {'are' if missing[1:] else 'is'} not installed")
        elif self.settings.device not in runtime.devices:
            contender.drop("skipped", f"it does not run on {self.settings.device} here")
        else:
            try:
                self.say(f"{group.network}, batch {batch}: {form.name} in {name}")
                file = form.make[kind]()
                contender.worker = Worker(self.folder)
                stack.callback(contender.worker.close)
                images = np.ascontiguousarray(form.raw(group.images(batch)).numpy())
                contender.ready = contender.worker.ask(worker.begin, name, file, kind, self.settings, images)
            except Exception as error:  # exporters raise what they like
                contender.drop("failed", str(error) if isinstance(error, BrokenWorkerError) else reason(error))
        return contender

    def _check(self, contenders: Sequence[Contender], group: Group, batch: int) -> None:
        """Compare what each computed with eager mode; where nobody knows what is right, with the first."""
        least = max(BOUNDS[self.settings.dtype], _TF32 if self.settings.device == "cuda" else 0)
        bounds = {form.name: max(BOUNDS[form.precision or self.settings.dtype], least) for form in group.forms}
        with torch.inference_mode():
            right = {form.name: form.answers(group.images(batch)).numpy() for form in group.forms if form.answers}
        first: np.ndarray | None = None
        for contender in contenders:
            if contender.ready is None:
                continue
            first = contender.ready.output if first is None else first
            error = relative_l2(contender.ready.output, right.get(contender.row.form, first))
            contender.row, bound = replace(contender.row, error=error), bounds[contender.row.form]
            if not error <= bound:
                contender.drop("wrong", f"its outputs differ by {error:.1e} (relative L2), allowed is {bound:.0e}")

    def time(self, contenders: Sequence[Contender], what: str) -> None:
        """Let all that are ready take turns."""
        running = [i for i, contender in enumerate(contenders) if contender.ready is not None]
        for number in range(self.settings.rounds):
            self.say(f"{what}, round {number + 1} of {self.settings.rounds}")
            for i in random.Random(number).sample(running, len(running)):  # nobody always runs after the same one
                process = contenders[i].worker
                if process is None:
                    continue
                try:
                    seconds = self.settings.seconds / self.settings.rounds
                    contenders[i].bursts.append(process.ask(worker.turn, seconds, self.settings.threads))
                except BrokenWorkerError as error:
                    contenders[i].drop("failed", str(error))


def relative_l2(result: np.ndarray, expected: np.ndarray) -> float:
    """Compute |result - expected| / |expected|; infinite where the shapes differ, or a value is not finite."""
    if result.shape != expected.shape or not np.isfinite(result).all():
        return float("inf")
    scale = float(np.linalg.norm(expected.astype(np.float64)))
    return float(np.linalg.norm(result.astype(np.float64) - expected)) / scale if scale else float("inf")


def finished_rows(contenders: Sequence[Contender]) -> list[TimedRow]:
    """Fill in the figures. Speed is relative to the first contender, the first form in eager mode, if that ran."""
    base = next((contender for contender in contenders if contender.ready is not None), None)
    return [contender.row if base is None else _figures(contender, base) for contender in contenders]


def _figures(contender: Contender, base: Contender) -> TimedRow:
    if contender.ready is None:
        return contender.row
    seconds = [1e3 * value for burst in contender.bursts for value in burst.seconds]
    times, faster = quartiles(seconds), speedup(base.rounds, contender.rounds)
    return replace(
        contender.row,
        ms=times.median, ms_low=times.low, ms_high=times.high, best_ms=min(seconds),
        cpu_ms=1e3 * float(np.median([burst.cpu for burst in contender.bursts])),
        images_per_s=1e3 * contender.row.batch / times.median,
        speedup=faster.median, speedup_low=faster.low, speedup_high=faster.high,
        memory_mib=contender.ready.memory, ready_s=contender.ready.seconds,
        runs=sum(burst.passes for burst in contender.bursts), rounds=contender.rounds,
    )  # fmt: skip


def machine(settings: Settings) -> Body:
    """Describe where it was measured: processor, load, and the versions of what ran."""
    versions = {}
    for name in ("torch", "timm", "onnxruntime", "openvino"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    load = list(os.getloadavg()) if hasattr(os, "getloadavg") else None
    return {"processor": _processor(settings.device), "cores": os.cpu_count(), "load": load, "versions": versions}


def _processor(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()
