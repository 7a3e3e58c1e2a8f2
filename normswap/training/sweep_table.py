"""The results of sweeps: per learning rate the mean and deviation of the best k of n runs, as tables and a picture.

A run that diverged or failed has no accuracy and counts among the n: leaving out the worst forgives a few of them, and
a learning rate with fewer than k successes cannot win. No torch here.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from normswap.errors import OptionError, SourceError
from normswap.storage import atomic_write

if TYPE_CHECKING:  # a second to import, for pictures alone
    from matplotlib.axes import Axes

RUNS = "runs.csv"  # in the folder of a sweep: a row per run


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

    @property
    def text(self) -> str:
        """`91.20 ± 0.31`, or nothing where no run has succeeded."""
        spread = "" if self.std is None else f" ± {self.std:.2f}"
        return "" if self.mean is None else f"{self.mean:.2f}{spread}"


@dataclass(frozen=True)
class SweepResult:
    """The result of one sweep.

    Args:
        name: how tables and pictures call it.
        trials: its runs, by lr and seed.
        lines: its learning rates, ascending.
    """

    name: str
    trials: Sequence[Trial]
    lines: Sequence[Line]


def keep(seeds: int, best: int | None = None) -> int:
    """Return how many of the runs of an lr count: `best`, or all but two when there are more than four.

    Raises:
        OptionError: more than there are.
    """
    if best is None:
        return seeds - 2 if seeds > 4 else seeds
    if not 1 <= best <= seeds:
        raise OptionError(f"--best {best} of {seeds} runs", remedy="It counts the runs of each lr that are kept")
    return best


def read(folder: Path, name: str, best: int | None = None) -> SweepResult:
    """Read the runs of a sweep from its folder.

    Args:
        best: how many runs of each lr count, as in `keep`.

    Raises:
        SourceError: it holds no table of runs.
    """
    file = folder / RUNS
    try:
        with file.open(encoding="utf-8", newline="") as rows:
            trials = [_trial(row) for row in csv.DictReader(rows)]
    except (OSError, ValueError, KeyError, csv.Error) as error:
        raise SourceError(f"{file} holds no runs of a sweep", str(error)) from None
    seeds = len({trial.seed for trial in trials})
    return SweepResult(name, trials, lines(trials, seeds, keep(seeds, best)))


def _trial(row: dict[str, str]) -> Trial:
    top1 = float(row["top1"]) if row["top1"] else None
    return Trial(float(row["lr"]), int(row["seed"]), row["state"], top1)


def lines(trials: Sequence[Trial], seeds: int, best: int) -> list[Line]:
    """Sum up each lr, ascending; the one with the highest mean is marked, if any is complete and no other is level."""
    rates = [_line([trial for trial in trials if trial.lr == lr], seeds, best) for lr in sorted({t.lr for t in trials})]
    winners = _highest(rates)
    return [replace(line, best=winners == [line]) for line in rates]


def _highest(rates: Sequence[Line]) -> list[Line]:
    """List the complete lines with the highest mean: several where they are level."""
    means = [line.mean for line in rates if line.full and line.mean is not None]
    return [line for line in rates if line.full and line.mean == max(means)] if means else []


def _line(trials: Sequence[Trial], seeds: int, best: int) -> Line:
    ended = [trial for trial in trials if trial.state != "running"]
    scores = sorted((trial.top1 for trial in ended if trial.top1 is not None), reverse=True)[:best]
    return Line(
        lr=trials[0].lr,
        runs=len(ended),
        mean=statistics.fmean(scores) if scores else None,
        std=statistics.stdev(scores) if len(scores) > 1 else None,
        counted=len(scores),
        lost=sum(trial.top1 is None for trial in ended),
        full=len(ended) >= seeds and len(scores) == best,
    )


def notes(trials: Sequence[Trial], rates: Sequence[Line], done: bool) -> list[str]:
    """List what the reader should know: what is not done, what failed and why, a best lr at the edge of the grid."""
    texts = []
    running = sum(trial.state == "running" for trial in trials)
    if running:
        texts.append(f"{running} run(s) have been begun elsewhere and not ended; --retake begins them again")
    elif not done:
        texts.append("stopped; the same command continues")
    lost = [trial for trial in trials if trial.note]
    texts += [f"lr {trial.lr:g}, seed {trial.seed}: {trial.state}: {trial.note}" for trial in lost[:3]]
    if len(lost) > 3:
        texts.append(f"{len(lost) - 3} more did not end well, see {RUNS}")
    if done and rates and all(line.mean is None for line in rates):
        texts.append("no run has succeeded")
    winners = _highest(rates)
    if len(winners) > 1:
        level = ", ".join(f"{line.lr:g}" for line in winners)
        texts.append(f"lr {level} are level: none is the best; more seeds or images tell them apart")
    edges = [edge for edge, line in (("lowest", rates[0]), ("highest", rates[-1])) if line.best] if rates else []
    if len(rates) > 1:
        texts += [f"the best lr is the {edge} of the grid: try further ones" for edge in edges]
    return texts


def write_runs(trials: Sequence[Trial], file: Path) -> Path:
    """Write one row per run.

    Raises:
        OutputError: it cannot be written.
    """
    return atomic_write.table(file, [field.name for field in fields(Trial)], map(asdict, trials))


def write_csv(sweeps: Sequence[SweepResult], file: Path) -> Path:
    """Write one row per sweep and lr: mean, spread, and the top-1 of every seed.

    Raises:
        OutputError: it cannot be written.
    """
    seeds = sorted({trial.seed for sweep in sweeps for trial in sweep.trials})
    columns = ["sweep", *(field.name for field in fields(Line)), *(f"seed {seed}" for seed in seeds)]
    rows = []
    for sweep in sweeps:
        for line in sweep.lines:
            scores = {f"seed {trial.seed}": trial.top1 for trial in sweep.trials if trial.lr == line.lr}
            rows.append({"sweep": sweep.name, **asdict(line), **scores})
    return atomic_write.table(file, columns, rows)


def by_rate(sweeps: Sequence[SweepResult]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of a table as papers print it: a row per sweep, a column per learning rate."""
    rates = sorted({line.lr for sweep in sweeps for line in sweep.lines})
    rows = []
    for sweep in sweeps:
        cells = {line.lr: f"{line.text}{'*' * line.best}" for line in sweep.lines}
        rows.append([sweep.name, *(cells.get(lr, "") for lr in rates)])
    return ["top-1 (%), best*", *(f"lr {power(lr)}" for lr in rates)], rows


def plot(sweeps: Sequence[SweepResult], file: Path, *, title: str = "") -> Path:
    """Draw top-1 over the learning rate: every run, mean and deviation of those that count, and the best lr.

    Raises:
        OutputError: the file cannot be written, or not in the format of its suffix.
    """
    from matplotlib.figure import Figure

    from normswap.analysis import plots

    figure = Figure(figsize=(7.5, 4.8 + 0.2 * max(len(sweeps) - 1, 0)), layout="constrained")
    axes = figure.subplots()
    for i, sweep in enumerate(sweeps):
        _draw(axes, sweep, i, alone=len(sweeps) == 1, shift=_shift(i, len(sweeps)))
    _mark_lost(axes, sweeps)
    rates = sorted({trial.lr for sweep in sweeps for trial in sweep.trials})
    if rates:
        axes.set_xscale("log", base=2)
        axes.set_xticks(rates, [_tick(lr) for lr in rates], fontsize=11)
        axes.minorticks_off()
    axes.set_xlabel("learning rate", fontsize=12)
    axes.set_ylabel("Top-1 after the last epoch (%)", fontsize=12)
    axes.grid(alpha=0.25)
    axes.set_title(title, fontsize=12)
    plots.legend_below(figure)
    return plots.save(figure, file)


def _draw(axes: Axes, sweep: SweepResult, i: int, *, alone: bool, shift: float) -> None:
    """Draw one sweep, beside the others where there are some."""
    from normswap.analysis import plots

    colour, marker = plots.COLOURS[i % len(plots.COLOURS)], plots.MARKERS[i % len(plots.MARKERS)]
    dots, star = (plots.COLOURS[5], plots.COLOURS[1]) if alone else (colour, colour)
    runs = [(trial.lr * shift, trial.top1) for trial in sweep.trials if trial.top1 is not None]
    axes.plot([x for x, _ in runs], [y for _, y in runs], "o", color=dots, markersize=4.5, alpha=0.7 if alone else 0.4,
              label="a run" if alone else "_run")  # fmt: skip
    shown = [(line.lr * shift, line.mean, line.std or 0.0) for line in sweep.lines if line.mean is not None]
    axes.errorbar([x for x, *_ in shown], [y for _, y, _ in shown], [spread for *_, spread in shown], color=colour,
                  marker=marker, capsize=4, linewidth=1.6, markersize=5,
                  label="mean and std of the best" if alone else sweep.name)  # fmt: skip
    for line in sweep.lines:
        if line.best and line.mean is not None:
            axes.plot([line.lr * shift], [line.mean], "*", color=star, markersize=17, markeredgecolor="white",
                      label=f"best: lr {line.lr:g}" if alone else "_best")  # fmt: skip


def _shift(i: int, count: int) -> float:
    """Return by what the i-th of so many sweeps is moved to the side, so that none hides another."""
    return float(2 ** (0.08 * (i - (count - 1) / 2)))


def _mark_lost(axes: Axes, sweeps: Sequence[SweepResult]) -> None:
    """Put crosses at the foot of the plot for runs that diverged or failed."""
    from normswap.analysis import plots

    low, high = axes.get_ylim()
    for i, sweep in enumerate(sweeps):
        lrs = [trial.lr * _shift(i, len(sweeps)) for trial in sweep.trials if trial.state in ("diverged", "failed")]
        colour = "0.2" if len(sweeps) == 1 else plots.COLOURS[i % len(plots.COLOURS)]
        if lrs:
            axes.plot(lrs, [low] * len(lrs), "x", color=colour, markersize=8, label="diverged or failed")
            axes.set_ylim(low - 0.03 * (high - low), high)


def power(value: float) -> str:
    """Write 2 to a whole power as such, others as they are."""
    exponent = round(math.log2(value))
    return f"2^{exponent}" if 2.0**exponent == value else f"{value:g}"


def _tick(value: float) -> str:
    base, sign, exponent = power(value).partition("^")
    return f"${base}^{{{exponent}}}$" if sign else base
