"""Time networks and exported files in turns: in one process, on the same images, with the same
number of threads.

Each contender answers once first. One whose answers are not the network's is reported, not timed;
so is one that does not run. `torch.utils.benchmark` times the passes.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from normswap.errors import first_line
from normswap.plan import Body

ROUNDS = 15
# Relative L2 of the answers by precision. Runtimes sum in other orders, and transform convolutions.
# The ranges of int8 were read off images, and what is timed is noise: what int8 costs, `normswap
# export` measures.
BOUNDS = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1, "int8": 0.5}
# A GPU rounds what it convolves to 10 bits of mantissa (TF32) unless told otherwise.
_TF32 = 1e-2


@dataclass
class Contender:
    """What is timed.

    Args:
        form: what of a network it is; runtime: where it runs.
        run: one forward pass.
        prepare: from images (N, C, H, W) to what it takes.
        expected: from the answers of the first contender to those that are right for this one.
        precision: of its weights.
    """

    form: str
    runtime: str
    run: Callable[[Tensor], Tensor]
    prepare: Callable[[Tensor], Tensor] = lambda images: images
    expected: Callable[[Tensor], Tensor] = lambda answers: answers
    precision: str = "fp32"


@torch.inference_mode()
def run(
    contenders: Sequence[Contender],
    images: Tensor,
    *,
    device: torch.device,
    threads: int,
    seconds: float,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Body]:
    """Check the contenders of a network against the first that runs, and time those that are right
    in turns.

    Args:
        threads: of every pass; seconds: how long each contender is timed, all turns together.

    Returns a row for each: `status` is ok, wrong (its answers are not the network's: it is not
    timed) or failed, and `reason` says why; `error` is the relative L2 of its answers; times are in
    ms, the median and quartiles.
    """
    rows = compare(contenders, images, device)
    timed: list[tuple[Contender, Tensor, list[float]]] = []
    for contender, row in zip(contenders, rows, strict=True):
        if row["status"] == "ok":
            timed.append((contender, contender.prepare(images), []))

    def now() -> float:
        if device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    for number in range(ROUNDS):
        progress(f"timing, round {number + 1} of {ROUNDS}")
        # Nobody always runs after the same one.
        for contender, prepared, passes in random.Random(number).sample(timed, len(timed)):
            names = {"run": contender.run, "images": prepared}
            timer = Timer("run(images)", globals=names, timer=now, num_threads=threads)
            passes += timer.blocked_autorange(min_run_time=seconds / ROUNDS).times
    for row, (_, _, passes) in zip(
        (row for row in rows if row["status"] == "ok"), timed, strict=True
    ):
        row |= figures(passes, len(images), first=timed[0][2])
    return rows


def figures(passes: Sequence[float], images: int, first: Sequence[float]) -> Body:
    """The figures of a contender whose passes took so many seconds; speed is relative to the first
    one's.
    """
    low, median, high = np.percentile(passes, [25, 50, 75]).tolist()
    speed = {"images_per_s": images / median, "speedup": float(np.median(first)) / median}
    return {"ms": 1e3 * median, "ms_low": 1e3 * low, "ms_high": 1e3 * high, **speed}


@torch.inference_mode()
def compare(contenders: Sequence[Contender], images: Tensor, device: torch.device) -> list[Body]:
    """Let each answer once; return a row for each that says whether it runs, and answers what the
    first one says.
    """
    first: Tensor | None = None
    rows = []
    for contender in contenders:
        row: Body = {"form": contender.form, "runtime": contender.runtime, "batch": len(images)}
        row |= {"status": "ok", "reason": ""}
        row |= dict.fromkeys(("error", "ms", "ms_low", "ms_high", "images_per_s", "speedup"))
        rows.append(row)
        try:
            answers = contender.run(contender.prepare(images)).float().cpu()
        except Exception as error:
            row |= {"status": "failed", "reason": first_line(error)}
            continue
        if first is None:
            first = answers
        row["error"] = distance = relative_l2(answers, contender.expected(first))
        allowed = max(BOUNDS[contender.precision], _TF32 if device.type == "cuda" else 0)
        if not distance <= allowed:
            reason = f"its answers differ by {distance:.1e} (relative L2), allowed is {allowed:.0e}"
            row |= {"status": "wrong", "reason": reason}
    return rows


def relative_l2(result: Tensor, expected: Tensor) -> float:
    """|result - expected| / |expected|; infinite where the shapes differ, or a value is not finite."""
    if result.shape != expected.shape or not bool(torch.isfinite(result).all()):
        return float("inf")
    scale = float(expected.double().norm())
    return float((result.double() - expected).norm()) / scale if scale else float("inf")
