"""Learning curves of several runs: what `finetune` wrote to metrics.csv, as one figure and one table. No torch here.

A run that is still going on is read as far as it is: metrics.csv is whole at every moment.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from normswap.errors import SourceError
from normswap.plan import Body
from normswap.storage import atomic_write

if TYPE_CHECKING:  # a second to import, for pictures alone
    from matplotlib.axes import Axes

METRICS = "metrics.csv"
_NEEDED = ("epoch", "train_loss", "top1")
_TEX = str.maketrans({"_": r"\_", "%": r"\%", "&": r"\&", "#": r"\#", "±": r"$\pm$", "*": r"$^{*}$"})


@dataclass(frozen=True)
class Curve:
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
        """Return (epoch, top-1) of the best epoch, by the network itself or by its moving average."""
        scores = [(row["epoch"] or 0.0, value) for row in self.rows for name in ("top1", "ema_top1")
                  if (value := row.get(name)) is not None and math.isfinite(value)]  # fmt: skip
        return max(scores, key=lambda pair: pair[1], default=None)

    def points(self, column: str) -> tuple[list[float], list[float]]:
        """Return epochs and values, where there are some."""
        known = [(row["epoch"] or 0.0, value) for row in self.rows if (value := row.get(column)) is not None]
        return [x for x, _ in known], [y for _, y in known]

    def to_json(self) -> Body:
        """Return name, rows and best ({epoch, top1}, or None)."""
        best = self.best()
        return {"name": self.name, "rows": self.rows, "best": best and {"epoch": best[0], "top1": best[1]}}


def read(places: Sequence[str | Path]) -> list[Curve]:
    """Read the runs in these folders (or metrics.csv files).

    Raises:
        SourceError: a folder has no metrics.csv, or something else is in it.
    """
    files = [path / METRICS if (path := Path(place)).is_dir() else path for place in places]
    return [_read(file, name) for file, name in zip(files, names(files), strict=True)]


def _read(file: Path, name: str) -> Curve:
    if not file.is_file():
        why = f"there is no {METRICS}" if file.parent.is_dir() else "no such folder"
        raise SourceError(f"{file.parent if file.name == METRICS else file} is no run", why)
    try:
        table = csv.DictReader(io.StringIO(file.read_text(encoding="utf-8")))
        columns = tuple(table.fieldnames or ())
        missing = [column for column in _NEEDED if column not in columns]
        if missing:
            raise ValueError(f"it has no column {', '.join(missing)}")
        rows = tuple({key: float(row[key]) if row[key] else None for key in columns} for row in table)
    except (ValueError, TypeError, csv.Error) as error:
        raise SourceError(f"{file} holds no metrics", str(error)) from None
    return Curve(name, columns, rows)


def names(files: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the folders' paths that differ."""
    parts = [(file.stem,) if file.is_file() and file.name != METRICS else _folders(file) for file in files]
    for length in range(1, max(map(len, parts), default=1) + 1):
        ends = ["/".join(part[-length:]) for part in parts]
        if len(set(ends)) == len(ends):
            return ends
    return [f"{part[-1]} ({i})" for i, part in enumerate(parts, 1)]


def _folders(file: Path) -> tuple[str, ...]:
    place = file.resolve()
    return (place.parent if file.name == METRICS else place).parts


def plot(runs: Sequence[Curve], file: str | Path, *, title: str = "") -> Path:
    """Draw training loss, and top-1 on the validation images, by epoch. Moving averages are drawn thinner.

    Args:
        file: its suffix says the format: .png, .svg, .pdf ...

    Raises:
        OutputError: the file cannot be written, or not in that format.
    """
    from matplotlib.figure import Figure

    from normswap.analysis import plots

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    loss, top1 = figure.subplots(1, 2)
    averages = False
    for i, run in enumerate(runs):
        plots.line(loss, *run.points("train_loss"), i, run.name)
        plots.line(top1, *run.points("top1"), i, run.name)
        x, y = run.points("ema_top1")
        top1.plot(x, y, color=plots.COLOURS[i % len(plots.COLOURS)], linewidth=1.0, alpha=0.75, marker=".", label="_")
        averages = averages or bool(x)
    plots.label_axes(loss, "epoch", "Training loss", "nats")
    plots.label_axes(top1, "epoch", "Top-1, validation images", "%", log=False)
    _close(top1)
    plots.legend_below(figure)
    if averages:
        top1.set_title("thin: moving average of the weights", fontsize=10, color="0.3")
    if title:
        figure.suptitle(title, fontsize=13)
    return plots.save(figure, file)


def _close(axes: Axes) -> None:
    """Show percentages from a little below the lowest to a little above the highest."""
    low, high = axes.dataLim.intervaly
    if math.isfinite(low):  # something is drawn
        margin = max(0.5, 0.06 * (high - low))
        axes.set_ylim(max(0.0, low - margin), min(100.0, high + margin))


def write_csv(runs: Sequence[Curve], file: str | Path) -> Path:
    """Write one row per run and epoch; the column `run` comes first, then those of any of the runs.

    Raises:
        OutputError: it cannot be written.
    """
    columns = dict.fromkeys(column for run in runs for column in run.columns)
    rows = ({"run": run.name, **row} for run in runs for row in run.rows)
    return atomic_write.table(Path(file), ["run", *columns], rows)


def write_latex(columns: Sequence[str], rows: Sequence[Sequence[str]], file: Path) -> Path:
    r"""Write a table for LaTeX, with the rules of booktabs: `\input` it.

    Raises:
        OutputError: it cannot be written.
    """
    head, *body = (" & ".join(map(_tex, row)) + r" \\" for row in (columns, *rows))
    begin = rf"\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}"
    return atomic_write.text(file, "\n".join([begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule",
                                              r"\end{tabular}", ""]))  # fmt: skip


def _tex(cell: str) -> str:
    powers = re.sub(r"\b(\d+)\^(-?\d+)", r"$\1^{\2}$", cell.translate(_TEX))
    return re.sub(r"\^(?!\{)", r"\\^{}", powers)
