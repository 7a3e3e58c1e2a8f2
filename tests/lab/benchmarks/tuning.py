"""Ways compared with equal tuning: a learning rate for each, chosen on held-out data, then a run
for every seed.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from kept import Kept, Row

Run = Callable[[str, float, int], Row]  # of a way, a learning rate and a seed


class Tuning(NamedTuple):
    """How each way is tuned.

    Args:
        rates: learning rates; each is tried with the first seed.
        seeds: of the runs that are shown.
        score: which figure of a row chooses the rate, the larger the better.
    """

    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    score: str

    def measure(
        self, kept: Kept, ways: Iterable[str], trial: Run, final: Run, write: Callable[[], None]
    ) -> None:
        """Every trial and every run that is not kept yet."""
        for way_name in ways:
            tried = [
                self._kept(kept, (way_name, "trial", str(lr)), trial, lr, self.seeds[0])
                for lr in self.rates
            ]
            best = float(max(tried, key=lambda row: row[self.score])["lr"])
            for seed in self.seeds:
                self._kept(kept, (way_name, "test", str(seed)), final, best, seed)
                write()

    def _kept(self, kept: Kept, key: tuple[str, str, str], run: Run, lr: float, seed: int) -> Row:
        return kept.get(key, lambda: {"lr": lr, **run(key[0], lr, seed)})

    def runs(self, kept: Kept, way_name: str) -> list[Row]:
        """A row for each seed; none unless there are all."""
        rows = [row for seed in self.seeds if (row := kept.rows.get((way_name, "test", str(seed))))]
        return rows if len(rows) == len(self.seeds) else []

    def each(self, runs: list[Row]) -> str:
        """The score with every seed."""
        return ", ".join(f"{row[self.score]:.1f}" for row in runs)

    def tried(self, kept: Kept, ways: Iterable[str]) -> list[str]:
        """What every rate was worth on held-out data, a line for each way."""
        lines = ["", f"Held-out {self.score} of each learning rate, from which it was chosen:", ""]
        for way_name in ways:
            rows = [
                row for lr in self.rates if (row := kept.rows.get((way_name, "trial", str(lr))))
            ]
            lines.append(
                f"- {way_name}: "
                + ", ".join(f"{row[self.score]:.1f} (lr {row['lr']:g})" for row in rows)
            )
        return lines
