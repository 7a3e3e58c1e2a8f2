"""Learning curves of several runs: what `finetune` wrote to metrics.csv, as one figure and one table. No torch here.

A run that is still going on is read as far as it is: metrics.csv is whole at every moment.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from normswap.errors import SourceError
from normswap.plan import Body
from normswap.storage import atomic_write

if TYPE_CHECKING:  # a second to import, for pictures alone
    from matplotlib.axes import Axes

_NEEDED = ("epoch", "train_loss", "top1")


@dataclass(frozen=True)
class Run:
    """One run's metrics.

    Args:
        name: of its folder; made longer, by the folders above, where two are called the same.
        columns: of metrics.csv.
        rows: one per epoch, by column; None where nothing was measured (no training before the first row).
    """

    name: str
    columns: tuple[str, ...]
    rows: tuple[dict[str, float | None], ...]

    def best(self) -> tuple[float, float] | None:
        """(epoch, top-1) of the best epoch, by the network itself or by its moving average."""
        found = [(row["epoch"] or 0.0, score) for row in self.rows if (score := self.score(row)) is not None]
        return max(found, key=lambda pair: pair[1], default=None)

    @staticmethod
    def score(row: dict[str, float | None]) -> float | None:
        """The better top-1 of a row."""
        known = [v for v in (row.get("top1"), row.get("ema_top1")) if v is not None and math.isfinite(v)]
        return max(known, default=None)


def read(places: Sequence[str | Path]) -> list[Run]:
    """The runs in these folders (or metrics.csv files).

    Raises:
        SourceError: a folder has no metrics.csv, or something else is in it.
    """
    files = [path / "metrics.csv" if (path := Path(place)).is_dir() else path for place in places]
    return [_read(file, name) for file, name in zip(files, _names(files), strict=True)]


def _read(file: Path, name: str) -> Run:
    if not file.is_file():
        why = "there is no metrics.csv" if file.parent.is_dir() else "no such folder"
        raise SourceError(f"{file.parent if file.name == 'metrics.csv' else file} is no run", why)
    try:
        table = csv.DictReader(io.StringIO(file.read_text(encoding="utf-8")))
        columns = tuple(table.fieldnames or ())
        missing = [column for column in _NEEDED if column not in columns]
        if missing:
            raise SourceError(f"{file} holds no metrics", f"it has no column {', '.join(missing)}")
        rows = tuple({key: float(row[key]) if row[key] else None for key in columns} for row in table)
    except (UnicodeDecodeError, ValueError, TypeError, csv.Error) as error:
        raise SourceError(f"{file} holds no metrics", str(error)) from None
    return Run(name, columns, rows)


def _names(files: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that differ."""
    parts = [file.resolve().parent.parts if file.name == "metrics.csv" else (file.stem,) for file in files]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(one[-length:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(one[-1:])} ({i})" for i, one in enumerate(parts, 1)]


def plot(runs: Sequence[Run], file: str | Path, *, title: str = "") -> Path:
    """One figure: training loss, and top-1 on the validation images, by epoch. Moving averages are drawn thinner.

    Args:
        file: its suffix says the format: .png, .svg, .pdf ...

    Raises:
        OutputError: the file cannot be written, or not in that format.
    """
    from matplotlib.figure import Figure

    from normswap.analysis import plots

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    loss, top1 = figure.subplots(1, 2)
    for i, run in enumerate(runs):
        for axes, column in ((loss, "train_loss"), (top1, "top1")):
            plots.line(axes, *_points(run, column), i, run.name)
        x, y = _points(run, "ema_top1")
        if x:
            colour = plots.COLOURS[i % len(plots.COLOURS)]
            top1.plot(x, y, color=colour, linewidth=1.0, alpha=0.75, marker=".", label="_average")
    plots.dress(loss, "epoch", "Training loss", "nats")
    plots.dress(top1, "epoch", "Top-1, validation images", "%", log=False)
    _close(top1)
    plots.legend_below(figure)
    if any(_points(run, "ema_top1")[0] for run in runs):
        top1.set_title("thin: moving average of the weights", fontsize=10, color="0.3")
    if title:
        figure.suptitle(title, fontsize=13)
    return plots.save(figure, file)


def _points(run: Run, column: str) -> tuple[list[float], list[float]]:
    """Epochs and values, where there are some."""
    found = [(row["epoch"] or 0.0, value) for row in run.rows if (value := row.get(column)) is not None]
    return [x for x, _ in found], [y for _, y in found]


def _close(axes: Axes) -> None:
    """Percentages: from a little below the lowest to a little above the highest."""
    low, high = axes.dataLim.intervaly
    if math.isfinite(low):  # something is drawn
        margin = max(0.5, 0.06 * (high - low))
        axes.set_ylim(max(0.0, low - margin), min(100.0, high + margin))


def to_json(runs: Sequence[Run]) -> list[Body]:
    """One object per run: name, rows and best ({epoch, top1}, or None)."""
    bodies = []
    for run in runs:
        best = run.best()
        bodies.append({"name": run.name, "rows": run.rows, "best": best and {"epoch": best[0], "top1": best[1]}})
    return bodies


def write_csv(runs: Sequence[Run], file: str | Path) -> Path:
    """One row per run and epoch; the column `run` comes first, then those of any of the runs.

    Raises:
        OutputError: it cannot be written.
    """
    columns = dict.fromkeys(column for run in runs for column in run.columns)
    rows = ({"run": run.name, **row} for run in runs for row in run.rows)
    return atomic_write.table(Path(file), ["run", *columns], rows)
