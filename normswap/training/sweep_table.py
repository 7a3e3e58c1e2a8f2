"""What a sweep came to: per learning rate the mean and deviation of the best k of n runs, as a table and a plot.

A run that diverged or failed has no accuracy and counts among the n: leaving out the worst forgives a few of them, and
a learning rate with fewer than k successes cannot win. No torch here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from normswap.errors import OptionError
from normswap.storage import atomic_write

if TYPE_CHECKING:  # a second to import, for pictures alone
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Trial:
    """One run.

    Args:
        state: done, diverged, failed or running.
        top1: in percent, after the last epoch; None unless done.
        note: why it failed.
    """

    lr: float
    seed: int
    state: str
    top1: float | None = None
    note: str | None = None
    folder: str | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Line:
    """One learning rate.

    Args:
        runs: how many have ended, well or not.
        mean, std: of the best k in percent (std of the sample, None for one run); of fewer, if fewer succeeded.
        counted: how many that are.
        lost: how many diverged or failed.
        full: whether all n have ended and k succeeded: only then can this be the best.
        best: whether this is the best lr so far.
    """

    lr: float
    runs: int
    mean: float | None
    std: float | None
    counted: int
    lost: int
    full: bool
    best: bool = False


def keep(seeds: int, best: int | None = None) -> int:
    """How many of the runs of an lr count: `best`, or all but two when there are more than four.

    Raises:
        OptionError: more than there are.
    """
    if best is None:
        return seeds - 2 if seeds > 4 else seeds
    if not 1 <= best <= seeds:
        raise OptionError(f"--best {best} of {seeds} runs", remedy="It counts the runs of each lr that are kept")
    return best


def lines(trials: Sequence[Trial], seeds: int, best: int) -> list[Line]:
    """A line per lr, ascending; the one with the highest mean is marked, if any is complete and no other is level."""
    found = [_line([one for one in trials if one.lr == lr], seeds, best) for lr in sorted({one.lr for one in trials})]
    winners = _highest(found)
    return [replace(line, best=winners == [line]) for line in found]


def _highest(found: Sequence[Line]) -> list[Line]:
    """The complete lines with the highest mean: several where they are level."""
    means = [line.mean for line in found if line.full and line.mean is not None]
    return [line for line in found if line.full and line.mean == max(means)] if means else []


def _line(trials: Sequence[Trial], seeds: int, best: int) -> Line:
    ended = [one for one in trials if one.state != "running"]
    scores = sorted((one.top1 for one in ended if one.top1 is not None), reverse=True)[:best]
    return Line(
        lr=trials[0].lr,
        runs=len(ended),
        mean=statistics.fmean(scores) if scores else None,
        std=statistics.stdev(scores) if len(scores) > 1 else None,
        counted=len(scores),
        lost=sum(one.top1 is None for one in ended),
        full=len(ended) >= seeds and len(scores) == best,
    )


def notes(trials: Sequence[Trial], found: Sequence[Line], done: bool) -> list[str]:
    """What the reader should know: what is not done, what failed and why, a best lr at the edge of the grid."""
    said = []
    running = sum(one.state == "running" for one in trials)
    if running:
        said.append(f"{running} run(s) have been begun elsewhere and not ended; --retake begins them again")
    elif not done:
        said.append("stopped; the same command continues")
    lost = [one for one in trials if one.note]
    said += [f"lr {one.lr:g}, seed {one.seed}: {one.state}: {one.note}" for one in lost[:3]]
    if len(lost) > 3:
        said.append(f"{len(lost) - 3} more did not end well, see runs.csv")
    if done and found and all(line.mean is None for line in found):
        said.append("no run has succeeded")
    winners = _highest(found)
    if len(winners) > 1:
        level = ", ".join(f"{line.lr:g}" for line in winners)
        said.append(f"lr {level} are level: none is the best; more seeds or images tell them apart")
    edges = [edge for edge, line in (("lowest", found[0]), ("highest", found[-1])) if line.best] if found else []
    if len(found) > 1:
        said += [f"the best lr is the {edge} of the grid: try further ones" for edge in edges]
    return said


def write_csv(trials: Sequence[Trial], file: Path) -> Path:
    """One row per run.

    Raises:
        OutputError: it cannot be written.
    """
    return atomic_write.table(file, [field.name for field in fields(Trial)], map(asdict, trials))


def plot(trials: Sequence[Trial], found: Sequence[Line], file: Path, *, title: str = "") -> Path:
    """Top-1 over the learning rate: every run, mean and deviation of the best k, and the best lr.

    Raises:
        OutputError: the file cannot be written, or not in the format of its suffix.
    """
    from matplotlib.figure import Figure

    from normswap.analysis import plots

    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    axes = figure.subplots()
    runs = [(one.lr, one.top1) for one in trials if one.top1 is not None]
    axes.plot(*_columns(runs), "o", color=plots.COLOURS[5], markersize=5, alpha=0.7, label="a run")
    means = [(line.lr, line.mean) for line in found if line.mean is not None]
    spread = [line.std or 0.0 for line in found if line.mean is not None]
    axes.errorbar(*_columns(means), spread, color=plots.COLOURS[0], marker="s", capsize=4, linewidth=1.6,
                  label="mean and std of the best")  # fmt: skip
    for line in found:
        if line.best and line.mean is not None:
            axes.plot([line.lr], [line.mean], "*", color=plots.COLOURS[1], markersize=17, label=f"best: lr {line.lr:g}")
    _mark_lost(axes, [one.lr for one in trials if one.top1 is None and one.state != "running"])
    _dress(axes, sorted({one.lr for one in trials}), title)
    return plots.save(figure, file)


def _mark_lost(axes: Axes, lrs: Sequence[float]) -> None:
    """Crosses at the foot of the plot for runs that diverged or failed."""
    if lrs:
        low, high = axes.get_ylim()
        axes.plot(lrs, [low] * len(lrs), "x", color="0.2", markersize=8, label="diverged or failed")
        axes.set_ylim(low - 0.03 * (high - low), high)


def _dress(axes: Axes, lrs: Sequence[float], title: str) -> None:
    if lrs:
        axes.set_xscale("log", base=2)
        axes.set_xticks(lrs, [_power(lr) for lr in lrs], fontsize=11)
        axes.minorticks_off()
    axes.set_xlabel("learning rate", fontsize=12)
    axes.set_ylabel("Top-1 after the last epoch (%)", fontsize=12)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=10)
    if title:
        axes.set_title(title, fontsize=12)


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def _power(value: float) -> str:
    """2 to a whole power as such, others as they are."""
    power = round(math.log2(value))
    return f"$2^{{{power}}}$" if 2.0**power == value else f"{value:g}"
