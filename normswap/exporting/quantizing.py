"""int8: the gauge, the runtime's own quantizer, and what came of it, measured where nothing was set by it.

How to quantize is chosen by trial, on the calibration images: the file whose answers are nearest to the network's.
"""

from __future__ import annotations

import functools
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from normswap.errors import VerificationError
from normswap.exporting import bias_correction, formats, sensitivity
from normswap.exporting.checks import Figures
from normswap.exporting.equalization import AS_FOLDED, Equalizer, Gauge, gauges
from normswap.exporting.exported_module import Shipped
from normswap.exporting.formats import SAFE_BITS, Format, Runs
from normswap.exporting.weight_rounding import Rounder
from normswap.graph.inspection import LINEAR

_JUDGED = 256  # calibration images that a trial is judged on
_BATCH = _RANKED = 64  # images at a time, and those on which layers are rounded alone


class Trial(NamedTuple):
    """One way to quantize.

    Args:
        gauge: see `equalization`.
        ranges: how the runtime's tool reads ranges off the images, by its own name for it.
    """

    gauge: Gauge
    ranges: str


@dataclass(frozen=True)
class Wish:
    """What the user asks of int8.

    Args:
        images: (N, C, H, W), to calibrate on, as the file takes them.
        per_channel: weights with a step per output channel, else one per tensor.
        weight_bits: one of `formats.LEVELS`.
        sensitive: so many layers stay in fp32, those that cost most.
        max_drop: points of top-1 (without labels: of agreement) that the file may lose; None: any.
    """

    images: Tensor
    per_channel: bool = True
    weight_bits: int = SAFE_BITS
    sensitive: int = 0
    max_drop: float | None = None


@dataclass(frozen=True)
class Quantized:
    """How a file was quantized.

    Args:
        calibrated_on: images.
        gauge, ranges: of the chosen trial; per_channel, weight_bits: of the weights.
        fp32: paths of the layers that stayed in fp32, and what each would have cost alone (relative L2).
        trials: relative L2 error on calibration images by trial.
    """

    calibrated_on: int
    gauge: str
    ranges: str
    per_channel: bool
    weight_bits: int
    fp32: dict[str, float]
    trials: dict[str, float]


def write(
    shipped: Shipped,
    x: Tensor,
    file: Path,
    form: Format,
    wish: Wish,
    *,
    dynamic: bool,
    metadata: Mapping[str, str],
    say: Callable[[str], None],
) -> Quantized:
    """Write the best of several int8 files of `shipped`, traced on x, to `file`."""
    tool = formats.quantizer(form.NAME)
    say("finding the gauge")
    batches = shipped.prepared(wish.images).split(_BATCH)
    fed = wish.images.split(_even(len(wish.images)) if dynamic else 1)
    equalizer = Equalizer(shipped.network, batches, per_channel=wish.per_channel)
    spared = [
        path for path, module in equalizer.network.named_modules()
        if isinstance(module, LINEAR) and not isinstance(module, tool.LAYERS)
    ]  # fmt: skip
    levels = functools.partial(tool.levels, bits=wish.weight_bits)
    kept: dict[str, float] = {}
    if wish.sensitive:
        say("rounding each layer alone")
        ranked = sensitivity.costs(equalizer.network, batches[0][:_RANKED], levels=levels, per_channel=wish.per_channel)
        able = [(path, cost) for path, cost in ranked.items() if path not in spared]
        kept = dict(able[: wish.sensitive])
    say("seeing what the layers read")
    rounder = Rounder(equalizer.network, batches)
    made: dict[Gauge, Shipped] = {}
    best = (float("inf"), Trial(AS_FOLDED, ""))
    tried: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="normswap-") as folder:
        aside, chosen = Path(folder) / f"trial{file.suffix}", Path(folder) / f"chosen{file.suffix}"

        def attempt(trial: Trial) -> None:
            nonlocal best
            say(f"trying gauge: {trial.gauge.name}, ranges: {trial.ranges}")
            if trial.gauge not in made:
                equalized = equalizer.equalized(trial.gauge)
                twin = equalized.network
                found = rounder.weights(
                    twin, equalized.units, levels=levels, per_channel=wish.per_channel, keep=[*kept, *spared]
                )
                bias_correction.correct(twin, batches, {path: one.held for path, one in found.items()})
                for path, one in found.items():
                    twin.get_parameter(f"{path}.weight").data.copy_(one.given)
                made.clear()  # one at a time in memory
                made[trial.gauge] = shipped.around(twin)
            tool.write_int8(
                made[trial.gauge], x, aside, fed, ranges=trial.ranges, per_channel=wish.per_channel,
                bits=wish.weight_bits, keep=[*kept], dynamic=dynamic, metadata=metadata,
            )  # fmt: skip
            error = _error(shipped, form.open(aside), fed)
            tried[f"{trial.gauge.name}, {trial.ranges}"] = error
            if error < best[0]:
                best = error, trial
                _move(aside, chosen, form.PARTS)

        usual, *others = tool.RANGES
        for gauge in gauges(per_channel=wish.per_channel):
            attempt(Trial(gauge, usual))
        for ranges in others:
            attempt(best[1]._replace(ranges=ranges))
        _move(chosen, file, form.PARTS)
    trial = best[1]
    return Quantized(
        len(wish.images), trial.gauge.name, trial.ranges, wish.per_channel, wish.weight_bits, kept,
        tried,
    )  # fmt: skip


def demand(figures: Figures, most: float | None) -> float | None:
    """How many points the file loses: of top-1, or of agreement where there are no labels; None where there is neither.

    Raises:
        VerificationError: more than `most`, or nobody knows.
    """
    if figures.top1 is not None and figures.source_top1 is not None:
        what, lost = "top-1", figures.source_top1 - figures.top1
    elif figures.agreement is not None:
        what, lost = "agreement", 100 * (1 - figures.agreement)
    elif most is None:
        return None
    else:
        raise VerificationError(
            "what int8 loses cannot be counted in points", "the network gives no scores of classes",
            "Nothing was written; without --max-drop the relative L2 stands beside the file",
        )  # fmt: skip
    if most is not None and not lost <= most:
        raise VerificationError(
            f"int8 loses {lost:.2f} points of {what} on {figures.count} images, allowed {most:g}",
            remedy="Nothing was written; try --sensitive 4, more --samples, or images more like those it will see",
        )
    return lost


@torch.no_grad()
def _error(shipped: Shipped, runs: Runs, images: Sequence[Tensor]) -> float:
    """Relative L2 of the file's answers, on the first calibration images."""
    off = whole = 0.0
    seen = 0
    for x in images:
        expected = shipped(x)
        off += float((runs(x) - expected).double().square().sum())
        whole += float(expected.double().square().sum())
        seen += len(x)
        if seen >= _JUDGED:
            break
    return math.sqrt(off / max(whole, 1e-300))


def _even(count: int) -> int:
    """The largest batch by which `count` images come out even, as the runtimes' tools want them."""
    return next(size for size in range(min(_BATCH, count), 0, -1) if not count % size)


def _move(one: Path, other: Path, parts: Sequence[str]) -> None:
    shutil.move(one, other)
    for ending in parts:
        shutil.move(one.with_suffix(ending), other.with_suffix(ending))
