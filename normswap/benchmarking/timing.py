"""Time networks and exported files in turns, in one process, on the same images and threads.

Each contender answers once before it is timed. A contender whose answers are not the network's, or
that does not run, is reported and not timed. `torch.utils.benchmark` times the passes.
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
from normswap.proof import verdict
from normswap.proof.distance import distance

ROUNDS = 15
# The relative L2 distance that is allowed between answers, by precision. Runtimes sum in other
# orders, and transform convolutions. The ranges of int8 are set by images, but noise is timed, so
# this bound is wide; `normswap export` measures what int8 costs.
BOUNDS = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1, "int8": 0.5}
# A GPU rounds the inputs of a convolution to 10 bits of mantissa (TF32) by default.
_TF32 = 1e-2


def _unchanged(tensor: Tensor) -> Tensor:
    """Return the tensor as it is.

    It is the default of `prepare` and `expected`, for a contender that takes plain images and must
    give the same answers as the first contender.
    """
    return tensor


def _ignore(sentence: str) -> None:
    """Do nothing with a sentence about progress. It is the default of `progress`."""


@dataclass
class Contender:
    """One of several forms of a network that are timed side by side: a module or an exported file.

    Args:
        form: Its name in the table of results: the scheme that the network was converted by, or the
            name of a file.
        runtime: The name of the runtime that runs it.
        run: A function that runs one forward pass and returns the answers.
        prepare: A function that turns images (N, C, H, W) into the input of `run`.
        expected: A function that turns the first contender's answers into the right answers of this
            one.
        precision: The precision of the weights. It tells how large an error is allowed (`BOUNDS`).
    """

    form: str
    runtime: str
    run: Callable[[Tensor], Tensor]
    prepare: Callable[[Tensor], Tensor] = _unchanged
    expected: Callable[[Tensor], Tensor] = _unchanged
    precision: str = "fp32"


@torch.inference_mode()
def run(
    contenders: Sequence[Contender],
    images: Tensor,
    *,
    device: torch.device,
    threads: int,
    seconds: float,
    progress: Callable[[str], None] = _ignore,
) -> list[Body]:
    """Time networks and exported files (contenders) in turns, after checking their answers.

    Args:
        contenders: The contenders. The first one that runs gives the answers that are right.
        images: Images (N, C, H, W).
        device: The device that PyTorch runs networks on.
        threads: Threads of every pass.
        seconds: How long each contender is timed, all turns together.
        progress: Called with a sentence at the beginning of each round.

    Returns:
        A row for each contender. `status` is ok, wrong (its answers are not the network's, so it is
        not timed) or failed, and `reason` says why. `error` is the relative L2 distance of its
        answers from the first contender's. `verdict` is MEASURED or WRONG, and never PROVED,
        because the errors that are allowed here (`BOUNDS`) are too large for a proof. It is None
        for a contender that failed, and for the first one if it is right. `ms`, `ms_low` and
        `ms_high` are the median and the quartiles of a pass.
    """
    rows = check_contenders(contenders, images, device)
    # Each contender that is timed, its prepared images, and the seconds of each of its passes.
    timed: list[tuple[Contender, Tensor, list[float]]] = []
    for contender, row in zip(contenders, rows, strict=True):
        if row["status"] == "ok":
            timed.append((contender, contender.prepare(images), []))

    def now() -> float:
        # A call may return before the accelerator has finished its work, so the clock waits for it.
        if device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    for number in range(ROUNDS):
        progress(f"timing, round {number + 1} of {ROUNDS}")
        # The order is drawn anew in each round, so no contender always runs after the same other.
        for contender, prepared, passes in random.Random(number).sample(timed, len(timed)):
            names = {"run": contender.run, "images": prepared}
            timer = Timer("run(images)", globals=names, timer=now, num_threads=threads)
            passes += timer.blocked_autorange(min_run_time=seconds / ROUNDS).times

    # `timed` has the same contenders as these rows, in the same order. The first of them is the one
    # that `speedup` is relative to.
    timed_rows = [row for row in rows if row["status"] == "ok"]
    for row, (_, _, passes) in zip(timed_rows, timed, strict=True):
        row |= figures(passes, len(images), first=timed[0][2])
    return rows


def figures(passes: Sequence[float], images: int, first: Sequence[float]) -> Body:
    """Return the times and the speed of a network or file, for its row in the table of results.

    Args:
        passes: The seconds of each forward pass.
        images: The number of images in a pass.
        first: The seconds of each pass of the first network or file, which `speedup` is relative
            to.
    """
    low, median, high = np.percentile(passes, [25, 50, 75]).tolist()
    return {
        "ms": 1e3 * median,
        "ms_low": 1e3 * low,
        "ms_high": 1e3 * high,
        "images_per_s": images / median,
        "speedup": float(np.median(first)) / median,
    }


@torch.inference_mode()
def check_contenders(
    contenders: Sequence[Contender], images: Tensor, device: torch.device
) -> list[Body]:
    """Run each network or file (contender) once, and compare its answers with the first one's.

    Args:
        contenders: The contenders. The first one that runs gives the answers that are right.
        images: Images (N, C, H, W).
        device: The device that PyTorch runs networks on.

    Returns:
        A row for each contender, as `run` returns it but without times.
    """
    first_answers: Tensor | None = None
    rows = []
    for contender in contenders:
        row: Body = {
            "form": contender.form,
            "runtime": contender.runtime,
            "batch": len(images),
            "status": "ok",
            "reason": "",
        }
        # Every row has these keys, too. A figure that is not measured stays None.
        measured = ("verdict", "error", "ms", "ms_low", "ms_high", "images_per_s", "speedup")
        row |= dict.fromkeys(measured)
        rows.append(row)

        try:
            answers = contender.run(contender.prepare(images)).float().cpu()
        # A runtime may raise anything; the others are timed all the same.
        except Exception as error:
            row |= {"status": "failed", "reason": first_line(error)}
            continue

        is_first = first_answers is None
        if first_answers is None:
            first_answers = answers
        relative_error = distance(contender.expected(first_answers), answers).relative_l2
        row["error"] = relative_error
        allowed = max(BOUNDS[contender.precision], _TF32 if device.type == "cuda" else 0)
        is_right = relative_error <= allowed
        # The first contender is compared with its own answers. That they agree says nothing.
        if not is_first or not is_right:
            row["verdict"] = verdict.word(exact=False, passed=is_right, unproved=False)
        if not is_right:
            reason = (
                f"its answers differ by {relative_error:.1e} (relative L2), allowed is"
                f" {allowed:.0e}"
            )
            row |= {"status": "wrong", "reason": reason}
    return rows
