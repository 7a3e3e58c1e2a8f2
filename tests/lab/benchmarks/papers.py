"""De & Smith's Tables 1 and 3 and Kim et al.'s Table 2 at small scale, beside the papers' figures.

    nice python tests/lab/benchmarks/papers.py -o tests/lab/benchmarks/de_smith.md
    nice python tests/lab/benchmarks/papers.py -o tests/lab/benchmarks/kim.md

Runs the shipped recipes, whose own commands are of full size, on fewer and smaller images. Runs are
kept in runs/papers; the same command makes those that are missing. What stands below the table,
from a `##` on, stays.
"""

from __future__ import annotations

import csv
import math
import re
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

from kept import Kept, Row, arguments, markdown_head, markdown_row
from schemes_table import ROOT, archive

from normswap.errors import TrainingError
from normswap.images.accuracy import evaluate
from normswap.images.datasets import make_loader
from normswap.storage.checkpoint import open_model
from normswap.surgery.recalibration import recalibrate
from normswap.training import recipe_files, sweep
from normswap.training.engine import finetune
from normswap.training.sweep import Trial


class Line(NamedTuple):
    """A row of a table: recipe, the paper's cells, overrides, rates as powers of two, and how many
    runs each has.
    """

    name: str
    recipe: str
    paper: str
    own: tuple[str, ...]
    powers: tuple[int, ...]
    seeds: int


class Table(NamedTuple):
    """Rows, what all recipes override, the heads of the paper's columns, and whether statistics are
    measured anew.
    """

    title: str
    setting: str
    heads: str
    lines: tuple[Line, ...]
    recalibrated: bool = False


def of_depth(depth: int, name: str, recipe: str, paper: str, *own: str) -> Line:
    """A row of De & Smith's."""
    own = (f"model.args.depth={depth}", *own)
    powers = (-9, -7, -5, -3, -1)[: 5 if depth == 16 else 4]
    seeds = 2 if depth == 16 else 1
    return Line(f"{name}, depth {depth}", f"de_smith_table1_{recipe}", paper, own, powers, seeds)


def of_gammas(role: str, paper: str) -> Line:
    """A row of Kim et al.'s: the role that decays beside the weights."""
    decay = ",".join(filter(None, ("weight", role)))
    return Line(
        f"`optim.decay=[{decay}]`", "demo_train", paper, (f"optim.decay=[{decay}]",), (-5,), 3
    )


NO_L2 = "optim.weight_decay=0"
V1 = "model.args.order=post"
# One bias moves every pixel of every channel: at the lr of the weights they diverge; a tenth is
# what Fixup gives them.
BIASED = ("convert.to=regularized-skipinit", "convert.options.dropout=0", "optim.scalar_lr=0.1")
DE_SMITH = Table(
    "De & Smith's Tables 1 and 3, at small scale",
    "model.args.width=1 data.input_size=16 data.batch_size=32 data.samples=2048"
    " data.augment.padding=2 train.epochs=2 schedule.name=constant schedule.milestones=[]"
    " train.channels_last=true",
    "paper's top-1 | rates | paper's loss | rates",
    (
        of_depth(16, "BatchNorm", "bn", "93.5 | 2^-1 | 0.007 | 2^-2"),
        of_depth(16, "alpha = 1", "skipinit_alpha1", "93.0 | 2^-2 to 2^-1 | 0.004 | 2^-4 to 2^-3"),
        of_depth(
            16, "alpha = 1/sqrt(d)", "skipinit_inv_sqrt_depth", "93.0 | 2^-2 to 2^-1 | 0.004 | 2^-3"
        ),
        of_depth(16, "sums divided by sqrt(2)", "sqrt2", "92.4 | 2^-2 to 2^-1 | 0.013 | 2^-3"),
        of_depth(16, "alpha = 0", "skipinit_alpha0", "93.3 | 2^-2 | 0.004 | 2^-3"),
        of_depth(16, "alpha = 0, no L2", "skipinit_alpha0", "89.8 | 2^-3 | 0.008 | 2^-3", NO_L2),
        of_depth(16, "v1, alpha = 0", "skipinit_alpha0", "| | |", V1),
        of_depth(16, "v1, alpha = 0, scalar biases", "skipinit_alpha0", "| | |", V1, *BIASED),
        of_depth(100, "BatchNorm", "bn", "94.7 | 2^-2 to 2^0 | 0.001 | 2^-3 to 2^-2"),
        of_depth(100, "alpha = 1", "skipinit_alpha1", "chance | | |"),
        of_depth(
            100,
            "alpha = 1/sqrt(d)",
            "skipinit_inv_sqrt_depth",
            "94.2 | 2^-2 to 2^-1 | 0.001 | 2^-4",
        ),
        of_depth(100, "sums divided by sqrt(2)", "sqrt2", "88.9 | 2^-5 | 0.066 | 2^-6"),
        of_depth(100, "alpha = 0", "skipinit_alpha0", "94.2 | 2^-2 | 0.001 | 2^-4 to 2^-3"),
        of_depth(
            100, "alpha = 0, no L2", "skipinit_alpha0", "91.7 | 2^-2 | 0.001 | 2^-4 to 2^-2", NO_L2
        ),
    ),
)
KIM = Table(
    "Kim et al.'s Table 2, at small scale: the demo's network on CIFAR-10",
    "model.weights=pretrained data.samples=2560 optim.weight_decay=0.1 schedule.warmup=0.5"
    " train.epochs=2 train.precision=no",
    "paper: ResNet-18 on Pets | ResNet-50",
    (
        of_gammas("", "83.57 | 82.94"),
        of_gammas("gamma_last", "85.41 | 85.65"),
        of_gammas("gamma_down", "82.58 | 80.08"),
        of_gammas("gamma_0", "82.88 | 82.40"),
        of_gammas("gamma_other", "84.60 | 83.51"),
    ),
    recalibrated=True,
)
TESTED = 1000
# Three standard deviations above guessing one of ten classes.
CHANCE = 10 + 300 * math.sqrt(0.09 / TESTED)


def run(table: Table, line: Line, power: int, seed: int) -> Row:
    """How a run ends: its state, top-1 and mean training loss in the last epoch."""
    data = (f"data.root={archive('train')}", f"data.validation={archive('test')}", "data.workers=0")
    words = [*data, f"data.validation_samples={TESTED}", *table.setting.split(), *line.own]
    recipe = recipe_files.load_recipe(
        line.recipe, [*words, f"optim.lr={2.0**power}", f"train.seed={seed}"]
    )
    name = re.sub(r"\W+", "-", f"{line.name} lr 2^{power} seed {seed}").strip("-")
    place = ROOT / "runs" / "papers" / name
    if (place / "diverged.txt").exists():
        return {"state": "diverged"}

    try:
        finetune(None, recipe, place, resume="auto", device="cpu", track="none")
    except TrainingError as error:
        (place / "diverged.txt").write_text(f"{error}\n", encoding="utf-8")
        return {"state": "diverged"}

    *_, cells = csv.DictReader((place / "metrics.csv").read_text(encoding="utf-8").splitlines())
    last: dict[str, float | None] = dict.fromkeys(cells)
    last |= {figure: float(value) for figure, value in cells.items() if value}
    if last["epoch"] != recipe.train.epochs:
        raise SystemExit(f"{place} was stopped: the same command goes on with it")

    state = "at chance" if (last["top1"] or 0.0) < CHANCE else "done"
    return {
        "state": state,
        "recalibrated": recalibrated(place, seed) if table.recalibrated else None,
        **last,
    }


def recalibrated(place: Path, seed: int) -> float:
    """Top-1 on the run's test images with BatchNorm's statistics of 1000 training images."""
    model = open_model(str(place / "last"))
    train = make_loader(model, archive("train"), batch_size=100, workers=0, samples=1000)
    test = make_loader(model, archive("test"), batch_size=100, workers=0, samples=TESTED, seed=seed)
    return evaluate(recalibrate(model, [images for images, _ in train]).model, test).top1


def best(runs: dict[tuple[int, int], Row], line: Line, figure: str, shown: str) -> str:
    """Mean and deviation at the best rate, and the rates within a deviation of it.

    The lowest loss is the best; of other figures the highest is.
    """
    sign = -1 if figure == "train_loss" else 1
    trials = []
    for (power, seed), end in runs.items():
        score = sign * end[figure] if end["state"] == "done" else None
        trials.append(Trial(2.0**power, seed, end["state"], score))
    rates = [rate for rate in sweep.lines(trials, line.seeds, line.seeds) if rate.full]
    if not rates:
        return "none trains |"

    top = max(rates, key=lambda rate: rate.mean or 0.0)
    least = (top.mean or 0.0) - (top.std or 0.0)
    good = [f"2^{math.log2(rate.lr):.0f}" for rate in rates if (rate.mean or 0.0) >= least]
    spread = "" if top.std is None else f" ± {top.std:{shown}}"

    return (
        f"{abs(top.mean or 0.0):{shown}}{spread} |"
        f" {' to '.join(dict.fromkeys((good[0], good[-1])))}"
    )


def row(kept: Kept, table: Table, line: Line) -> str:
    """What was measured, what the paper has, and the rates at which runs were lost."""
    runs = {
        (power, seed): kept.rows[line.name, f"2^{power}", str(seed)]
        for power, seed in product(line.powers, range(line.seeds))
    }
    lost = dict.fromkeys(
        f"{end['state']} at 2^{power}" for (power, _), end in runs.items() if end["state"] != "done"
    )
    measured = [best(runs, line, "top1", ".1f"), best(runs, line, "train_loss", ".2f")]
    if table.recalibrated:
        measured.append(best(runs, line, "recalibrated", ".1f").partition(" |")[0])

    return markdown_row(line.name, line.seeds, *measured, line.paper, ", ".join(lost))


def main() -> None:
    given = arguments(__doc__).parse_args()
    table = {"de_smith": DE_SMITH, "kim": KIM}[given.output.stem]

    kept = Kept(ROOT / "runs" / "papers.jsonl", fresh=given.fresh)
    for seed, line in product(range(3), table.lines):
        for power in line.powers if seed < line.seeds else ():
            print(
                kept.get(
                    (line.name, f"2^{power}", str(seed)), partial(run, table, line, power, seed)
                ),
                flush=True,
            )

    below = (
        given.output.read_text(encoding="utf-8").partition("\n## ")[2]
        if given.output.exists()
        else ""
    )
    again = ["top-1 by statistics of 1000 training images"] * table.recalibrated
    columns = (
        "network",
        "runs",
        "top-1",
        "rates",
        "loss",
        "rates",
        *again,
        *table.heads.split(" | "),
        "lost",
    )

    sentence = (
        f"As the recipes have it but for `{table.setting}`. Top-1 in percent of {TESTED} test"
        " images and mean training loss, in the last epoch, and rates within a deviation of the"
        f" best. At chance: below {CHANCE:.1f} %."
    )
    rows = [row(kept, table, line) for line in table.lines]
    kept.rows = {
        run: end for run, end in kept.rows.items() if run[0] in [line.name for line in table.lines]
    }
    lines = ["", sentence, "", markdown_head(*columns), *rows]
    kept.write(given.output, table.title, [*lines, f"\n## {below}".rstrip()] if below else lines)


if __name__ == "__main__":
    main()
