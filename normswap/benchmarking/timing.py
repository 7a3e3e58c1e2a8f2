"""Time networks in their runtimes: every contender is checked first, then all take turns, round by round.

Each is a process of its own (`worker`). What computes something else than the network in eager mode is reported,
not timed; so is what is not installed, or does not run.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

from normswap.benchmarking import runtimes
from normswap.benchmarking.runtimes import Settings
from normswap.benchmarking.statistics import rotated, speedup, spread
from normswap.benchmarking.subjects import Group, Subject
from normswap.benchmarking.worker import Broken, Job, Ready, Worker, reason
from normswap.errors import OptionError
from normswap.plan import Body

# relative L2 at the outputs, against float32 on the CPU. Runtimes sum in other orders, and transform convolutions;
# a GPU rounds what it convolves to 10 bits of mantissa (TF32) unless told otherwise. Ranges of int8 were read off
# images, and this is noise: what int8 costs, `normswap export` measures
BOUNDS = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1, "int8": 0.5}
_TF32 = 1e-2
_MOST_RUNS = 1000  # of one contender in one round
Say = Callable[[str], None]


@dataclass(frozen=True)
class Timing:
    """How long to measure: `rounds` turns of each contender, together about `seconds` of each."""

    rounds: int = 15
    seconds: float = 3.0


@dataclass(frozen=True)
class Row:
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
        runs: forward passes that were timed; rounds: seconds of each, by round.
    """

    network: str
    form: str
    runtime: str
    batch: int
    status: str
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


@dataclass
class _Contender:
    row: Row
    worker: Worker | None = None
    ready: Ready | None = None
    rounds: list[list[float]] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def drop(self, status: str, why: str, error: float | None = None) -> None:
        self.row = replace(self.row, status=status, reason=why, error=error)
        if self.worker is not None:
            self.worker.close()
        self.worker = self.ready = None

    @property
    def runs(self) -> bool:
        return self.ready is not None


def demand_device(device: str) -> None:
    """See that torch has it.

    Raises:
        OptionError: it has not.
    """
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if device not in there:
        raise OptionError(f"unknown device '{device}'", f"there are {', '.join(there)}")
    if not there[device]:
        raise OptionError(f"--device {device}", "torch finds none on this machine")


def run(
    groups: Sequence[Group],
    settings: Settings,
    folder: Path,
    *,
    batches: Sequence[int] = (1,),
    wanted: Sequence[str] = runtimes.DEFAULT,
    timing: Timing = Timing(),
    say: Say = lambda what: None,
) -> list[Row]:
    """Time every form of every group in the runtimes that are `wanted`, and the first form in eager mode anyway.

    Args:
        folder: for what the runtimes write, such as compiled code.
        say: called with what is going on.
    """
    rows: list[Row] = []
    for group in groups:
        for batch in batches:
            with ExitStack() as stack:
                enter = _Door(group, batch, settings, folder, say, stack)
                contenders = [enter(subject, name) for subject, name in _pairs(group, wanted)]
                _check(contenders, group, batch, settings)
                _time(contenders, timing, f"timing {group.network}, batch {batch}", say)
            rows += _rows(contenders)
    return rows


def _pairs(group: Group, wanted: Sequence[str]) -> Iterator[tuple[Subject, str]]:
    """Each form in each runtime that opens some file of it."""
    for i, subject in enumerate(group.subjects):
        names = list(dict.fromkeys(("eager", *wanted))) if i == 0 else list(dict.fromkeys(wanted))
        for name in names:
            runtime, _ = runtimes.find(name)
            if runtime.name == "fuse" and not subject.plain:
                continue  # nothing is left to fuse
            if any(kind in subject.make for kind in runtime.opens):
                yield subject, name


def images(group: Group, batch: int) -> torch.Tensor:
    """N(0, 1) noise, the same for all: (batch, C, H, W)."""
    return torch.randn(batch, *group.size, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class _Door:
    """Lets contenders in: makes the file, starts the worker, waits for its answer."""

    group: Group
    batch: int
    settings: Settings
    folder: Path
    say: Say
    stack: ExitStack

    def __call__(self, subject: Subject, name: str) -> _Contender:
        contender = _Contender(Row(self.group.network, subject.form, name, self.batch, "ok"))
        runtime, _ = runtimes.find(name)
        kind = next(kind for kind in runtime.opens if kind in subject.make)
        needed = (*runtime.needs, *subject.needs.get(kind, ()))
        if missing := [package for package in needed if not runtimes.installed(package)]:
            contender.drop("skipped", f"{', '.join(missing)} {'are' if missing[1:] else 'is'} not installed")
        elif self.settings.device not in runtime.devices:
            contender.drop("skipped", f"it does not run on {self.settings.device} here")
        else:
            try:
                self._start(contender, subject, kind)
            except Broken as error:
                contender.drop("failed", str(error))
            except Exception as error:  # exporters raise what they like
                contender.drop("failed", reason(error))
        return contender

    def _start(self, contender: _Contender, subject: Subject, kind: str) -> None:
        name = contender.row.runtime
        what = f"{self.group.network}, batch {self.batch}: {subject.form} in {name}"
        self.say(f"{what}: making its file")
        file = subject.file(kind)
        self.say(f"{what}: starting")
        raw = np.ascontiguousarray(subject.raw(images(self.group, self.batch)).numpy())
        contender.worker = Worker(Job(name, file, kind, self.settings, self.folder), raw)
        self.stack.callback(contender.worker.close)
        contender.ready = contender.worker.ready()


def _check(contenders: Sequence[_Contender], group: Group, batch: int, settings: Settings) -> None:
    """Compare what each computed with eager mode; where nobody knows what is right, with the first."""
    coarser = {subject.form: BOUNDS[subject.precision or settings.dtype] for subject in group.subjects}
    least = max(BOUNDS[settings.dtype], _TF32 if settings.device == "cuda" else 0)
    right = {subject.form: _answers(subject, group, batch) for subject in group.subjects}
    first = next((c.ready.output for c in contenders if c.ready is not None), None)
    for contender in contenders:
        if contender.ready is None:
            continue
        expected = right[contender.row.form]
        expected = first if expected is None else expected
        assert expected is not None
        error = relative_l2(contender.ready.output, expected)
        bound = max(coarser[contender.row.form], least)
        contender.row = replace(contender.row, error=error)
        if not error <= bound:
            contender.drop("wrong", f"its outputs differ by {error:.1e} (relative L2), allowed is {bound:.0e}", error)


def _answers(subject: Subject, group: Group, batch: int) -> np.ndarray | None:
    if subject.answers is None:
        return None
    with torch.inference_mode():
        return subject.answers(images(group, batch)).numpy()


def relative_l2(result: np.ndarray, expected: np.ndarray) -> float:
    """|result - expected| / |expected|; infinite where the shapes differ, or a value is not finite."""
    if result.shape != expected.shape or not np.isfinite(result).all():
        return float("inf")
    scale = float(np.linalg.norm(expected.astype(np.float64)))
    return float(np.linalg.norm(result.astype(np.float64) - expected)) / scale if scale else float("inf")


def _time(contenders: Sequence[_Contender], timing: Timing, what: str, say: Say) -> None:
    running = [i for i, contender in enumerate(contenders) if contender.runs]
    length = timing.seconds / timing.rounds
    for turn in range(timing.rounds):
        say(f"{what}, round {turn + 1} of {timing.rounds}")
        for i in rotated(running, turn):
            contender = contenders[i]
            if contender.ready is None or contender.worker is None:
                continue
            runs = min(max(1, round(length / contender.ready.latency)), _MOST_RUNS)
            try:
                burst = contender.worker.burst(runs, settle=contender.ready.latency < length / 2)
            except Broken as error:
                contender.drop("failed", str(error))
                continue
            contender.rounds.append(burst.seconds)
            contender.cpu.append(burst.cpu)


def _rows(contenders: Sequence[_Contender]) -> list[Row]:
    """The figures. Speed is relative to the first contender, the first form in eager mode, if that ran at all."""
    base = contenders[0] if contenders and contenders[0].runs else None
    if base is None:
        base = next((c for c in contenders if c.runs), None)
    return [_row(contender, base) for contender in contenders]


def _row(contender: _Contender, base: _Contender | None) -> Row:
    if contender.ready is None or base is None:
        return contender.row
    times = spread([seconds for burst in contender.rounds for seconds in burst])
    faster = speedup(base.rounds, contender.rounds)
    return replace(
        contender.row,
        ms=1e3 * times.median, ms_low=1e3 * times.low, ms_high=1e3 * times.high,
        best_ms=1e3 * min(min(burst) for burst in contender.rounds),
        cpu_ms=1e3 * spread(contender.cpu).median,
        images_per_s=contender.row.batch / times.median,
        speedup=faster.median, speedup_low=faster.low, speedup_high=faster.high,
        memory_mib=contender.ready.memory,
        ready_s=contender.ready.seconds,
        runs=sum(len(burst) for burst in contender.rounds),
        rounds=contender.rounds,
    )  # fmt: skip


def machine(settings: Settings) -> Body:
    """Where it was measured: processor, load, and the versions of what ran."""
    named = ("torch", "timm", "onnxruntime", "openvino")
    return {
        "processor": _processor(settings.device),
        "cores": os.cpu_count(),
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "versions": {name: metadata.version(name) for name in named if _has(name)},
    }


def _has(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _processor(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
