"""The result of a sweep: per learning rate the mean and deviation of the best k of n runs, a table and a figure.

A run that diverged or failed has no accuracy and counts among the n: leaving out the worst forgives a few of them, and
a learning rate with fewer than k successes cannot win. No torch here.

Source: De & Smith 2020, arXiv:2002.10444, section 2.3: the best 5 of 7 runs at every learning rate of a grid.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from normswap.errors import OptionError
from normswap.storage import atomic_write

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
        best: whether no other rate has so high a mean.
        good: whether the mean is at most the best rate's deviation below the best rate's mean.
    """

    lr: float
    runs: int
    mean: float | None
    std: float | None
    counted: int
    lost: int
    full: bool
    best: bool = False
    good: bool = False

    @property
    def text(self) -> str:
        """`91.20 ± 0.31`, or nothing where no run has succeeded."""
        spread = "" if self.std is None else f" ± {self.std:.2f}"
        return "" if self.mean is None else f"{self.mean:.2f}{spread}"


def count_best(seeds: int, best: int | None = None) -> int:
    """Return how many of the runs of an lr count: `best`, or all but two when there are more than four.

    Raises:
        OptionError: more than there are.
    """
    if best is None:
        return seeds - 2 if seeds > 4 else seeds
    if not 1 <= best <= seeds:
        raise OptionError(f"--best {best} of {seeds} runs", remedy="It counts the runs of each lr that are kept")
    return best


def lines(trials: Sequence[Trial], seeds: int, best: int) -> list[Line]:
    """Sum up each lr, ascending; the highest mean is marked, unless two are level, and the rates that are as good."""
    rates = sorted({trial.lr for trial in trials})
    summed = [_line([trial for trial in trials if trial.lr == lr], seeds, best) for lr in rates]
    winners = _highest(summed)
    if not winners:
        return summed
    top, spread = winners[0].mean or 0.0, winners[0].std or 0.0
    return [
        replace(line, best=winners == [line], good=line.full and line.mean is not None and line.mean >= top - spread)
        for line in summed
    ]


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
    """List what the reader should know: good rates, what is not done, what failed and why, a grid that ends early."""
    texts = []
    if any(trial.state == "running" for trial in trials):
        texts.append("runs of other workers have not ended; if those were killed, the same command continues them")
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
    good = [line.lr for line in rates if line.good]
    if len(winners) == 1 and len(good) > 1:
        texts.append(f"good rates: {good[0]:g} to {good[-1]:g}, within one standard deviation of the best")
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


def plot(trials: Sequence[Trial], rates: Sequence[Line], file: Path, *, title: str = "") -> Path:
    """Draw top-1 over the learning rate: every run, mean and deviation of those that count, and the best lr.

    Raises:
        OutputError: the file cannot be written, or not in the format of its suffix.
    """
    from matplotlib.figure import Figure  # a second to import

    from normswap.analysis import plots

    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    axes = figure.subplots()
    done = [(trial.lr, trial.top1) for trial in trials if trial.top1 is not None]
    axes.plot([lr for lr, _ in done], [top1 for _, top1 in done], "o", color="0.6", markersize=4.5, label="a run")
    measured = [line for line in rates if line.mean is not None]
    means, spreads = [line.mean or 0.0 for line in measured], [line.std or 0.0 for line in measured]
    axes.errorbar(
        [line.lr for line in measured], means, spreads, color=plots.COLOURS[0], marker="s", capsize=4,
        label="mean and std of the best",
    )  # fmt: skip
    for line in rates:
        if line.best:
            axes.plot(
                [line.lr], [line.mean or 0.0], "*", color=plots.COLOURS[1], markersize=17, label=f"best: lr {line.lr:g}"
            )
    if lost := [trial.lr for trial in trials if trial.state in ("diverged", "failed")]:
        axes.plot(lost, [axes.get_ylim()[0]] * len(lost), "x", color="0.2", markersize=8, label="diverged or failed")
    if rates:
        axes.set_xscale("log", base=2)
        axes.set_xticks([line.lr for line in rates], [f"{line.lr:g}" for line in rates])
        axes.minorticks_off()
    axes.set_xlabel("learning rate")
    axes.set_ylabel("Top-1 after the last epoch (%)")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.legend()
    return plots.save(figure, file)
