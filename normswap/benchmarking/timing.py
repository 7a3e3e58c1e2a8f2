"""Time networks and exported files in turns: in one process, on the same images, with the same number of threads.

Each contender answers once first. One whose answers are not the network's is reported, not timed; so is one that does
not run. `torch.utils.benchmark` times the passes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from normswap.errors import OptionError, first_line
from normswap.plan import Body

# Relative L2 of the answers by precision. Runtimes sum in other orders, and transform convolutions. The ranges of int8
# were read off images, and what is timed is noise: what int8 costs, `normswap export` measures.
BOUNDS = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1, "int8": 0.5}
# A GPU rounds what it convolves to 10 bits of mantissa (TF32) unless told otherwise.
_TF32 = 1e-2


@dataclass
class Contender:
    """What is timed.

    Args:
        form: what of a network it is; runtime: where it runs.
        run: one forward pass on `images`.
        images: (N, C, H, W), as it takes them.
        expected: from the answers of the group's first contender to those that are right for this one.
        precision: of its weights.

    Attributes:
        status: ok; wrong (its answers are not the network's: it is not timed); or failed; `reason` says why.
        error: relative L2 of its answers to the expected ones.
        rounds: seconds of a pass in each block of passes, by round.
    """

    form: str
    runtime: str
    run: Callable[[Tensor], Tensor]
    images: Tensor
    expected: Callable[[Tensor], Tensor] = lambda answers: answers
    precision: str = "fp32"
    status: str = "ok"
    reason: str = ""
    error: float | None = None
    rounds: list[list[float]] = field(default_factory=list)

    def row(self, base: Contender | None) -> Body:
        """The figures; times are in ms, the median and quartiles, and None where it was not timed.

        Args:
            base: what speed is relative to: the median, over the rounds, of the ratio of medians within a round, whose
                passes lie close together in time.
        """
        row: Body = {"form": self.form, "runtime": self.runtime, "batch": len(self.images)}
        row |= {"status": self.status, "reason": self.reason, "error": self.error}
        if base is None or not self.rounds:
            return {**row, **dict.fromkeys(("ms", "ms_low", "ms_high", "images_per_s", "speedup"))}
        low, median, high = np.percentile([1e3 * s for seconds in self.rounds for s in seconds], [25, 50, 75]).tolist()
        pairs = zip(base.rounds, self.rounds, strict=True)
        speedup = float(np.median([np.median(theirs) / np.median(ours) for theirs, ours in pairs]))
        row |= {"ms": median, "ms_low": low, "ms_high": high}
        return {**row, "images_per_s": 1e3 * len(self.images) / median, "speedup": speedup}


def check_device(device: str) -> None:
    """Check that torch has the device.

    Raises:
        OptionError: it has not, or there is no such device.
    """
    usable = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if device not in usable:
        raise OptionError(f"unknown device '{device}'", f"there are {', '.join(usable)}")
    if not usable[device]:
        raise OptionError(f"--device {device}", "torch finds none on this machine")


@torch.inference_mode()
def run(
    contenders: Sequence[Contender],
    *,
    device: str = "cpu",
    threads: int = 1,
    rounds: int = 15,
    seconds: float = 3.0,
    say: Callable[[str], None] = lambda text: None,
) -> list[Body]:
    """Check the contenders of a network against the first of them, and time those that are right in turns.

    Args:
        device: cpu, cuda or mps, where the networks are.
        threads: of every pass.
        rounds: turns of each contender.
        seconds: how long each contender is timed, all turns together.
        say: called with what is going on.
    """
    compare(contenders, device)
    ready = [contender for contender in contenders if contender.status == "ok"]

    def now() -> float:
        if device != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    for number in range(rounds):
        say(f"timing, round {number + 1} of {rounds}")
        # nobody always runs after the same one
        for contender in random.Random(number).sample(ready, len(ready)):
            names = {"run": contender.run, "images": contender.images}
            timer = Timer("run(images)", globals=names, timer=now, num_threads=threads)
            contender.rounds.append(list(timer.blocked_autorange(min_run_time=seconds / rounds).times))
    return [contender.row(next(iter(ready), None)) for contender in contenders]


@torch.inference_mode()
def compare(contenders: Sequence[Contender], device: str = "cpu") -> None:
    """Let each answer once, and note which ones do not run, or answer something else than the first one says."""
    first: Tensor | None = None
    for contender in contenders:
        try:
            answers = contender.run(contender.images).float().cpu()
        except Exception as error:  # a runtime raises what it likes
            contender.status, contender.reason = "failed", first_line(error)
            continue
        first = answers if first is None else first
        contender.error = relative_l2(answers, contender.expected(first))
        allowed = max(BOUNDS[contender.precision], _TF32 if device == "cuda" else 0)
        if not contender.error <= allowed:
            contender.status = "wrong"
            contender.reason = f"its answers differ by {contender.error:.1e} (relative L2), allowed is {allowed:.0e}"


def relative_l2(result: Tensor, expected: Tensor) -> float:
    """|result - expected| / |expected|; infinite where the shapes differ, or a value is not finite."""
    if result.shape != expected.shape or not bool(torch.isfinite(result).all()):
        return float("inf")
    scale = float(expected.double().norm())
    return float((result.double() - expected).norm()) / scale if scale else float("inf")
