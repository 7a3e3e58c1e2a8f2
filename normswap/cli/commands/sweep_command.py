"""`normswap sweep`: learning rates, each with several seeds."""

from __future__ import annotations

import functools
import itertools
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from normswap.cli.options import Device, ImageOpening, Json, output_option
from normswap.cli.progress import training_bar
from normswap.cli.tables import next_step, show, table
from normswap.cli.terminal import say
from normswap.errors import OptionError
from normswap.plan import Body
from normswap.storage import atomic_write

if TYPE_CHECKING:
    from normswap.training.engine import TrainingProgress
    from normswap.training.recipe import Recipe
    from normswap.training.sweep import Objective, RunEnd

KEYS = (
    "recipe, output, seeds, counted (how many runs of each lr), lines (one per lr: runs, mean, std,"
    " counted, lost, full, best), trials (one per run: lr, seed, state, top1, train_loss, note,"
    " folder, seconds), notes, done, files"
)
EXAMPLES = (
    "sweep cifar10_recover_skipinit --lr 2^-4..2^1 --seeds 3 data.root=IMAGES",
    "sweep mine.yaml demo --lr 0.01,0.03,0.1 --seeds 5 --best 3",
)
_LR = "Numbers and powers: 2^-4..2^1 (every power), or 0.05,0.1."
_BEST = "Of each lr's runs the best N count [default: all, or all but two of more than four]."
_STORAGE = (
    "Database that several machines share, by Optuna's URL [default: an SQLite file in the output]."
)


@dataclass(frozen=True)
class Varied:
    """The options on the runs of a sweep: learning rates, seeds, and how many runs count."""

    lr: Annotated[str, Option("--lr", metavar="GRID", show_default=False, help=_LR)] = ""
    seeds: Annotated[
        int, Option(min=1, metavar="N", help="Runs of every lr, with seeds 0 .. N - 1.")
    ] = 1
    best: Annotated[int | None, Option(min=1, metavar="N", show_default=False, help=_BEST)] = None


def run(
    recipe: Annotated[
        str, Argument(metavar="RECIPE", show_default=False, help="As in `finetune`: NAME or FILE.")
    ],
    words: Annotated[
        list[str] | None,
        Argument(metavar="MODEL|KEY=VALUE", show_default=False, help="As in `finetune`."),
    ] = None,
    *,
    varied: Varied,
    output: Annotated[
        Path | None, output_option("DIR", "Its folder [default: ./sweep-RECIPE].")
    ] = None,
    storage: Annotated[str | None, Option(metavar="URL", show_default=False, help=_STORAGE)] = None,
    device: Device = "auto",
    opening: ImageOpening,
    json: Json = False,
) -> int:
    """Say which learning rates are best, by several seeds of each.

    Start the same command as often as you like, here or on machines that share the output (or the
    storage): each takes the next run that no one has begun. A killed one's run is continued a
    minute later. A run that diverges, or ends at chance, is lost: it counts as failed. Writes
    runs.csv beside the runs.
    """
    from normswap.training import recipe_files, sweep as sweeps

    # Check the words before torch is imported.
    if not varied.lr:
        raise OptionError(
            "--lr is not given", "a sweep compares learning rates", "For example: --lr 0.05,0.1"
        )
    model, overrides = recipe_files.split(words or [])
    opening.require_model(model)
    plan = recipe_files.load_recipe(recipe, overrides)
    rates = sweeps.parse_rates(varied.lr)
    seeds = varied.seeds
    counted = sweeps.count_best(seeds, varied.best)
    if any(word.startswith(("optim.lr=", "train.seed=")) for word in overrides):
        raise OptionError(
            "optim.lr and train.seed are what a sweep varies", remedy="Use --lr and --seeds"
        )
    name = model or getattr(plan.model, "name", None)
    if name is None:
        raise OptionError(
            "nothing to train", "neither a MODEL is given nor does the recipe name one"
        )

    from normswap.training import training_images

    # Train until no run waits. All workers must be started for the same MODEL.
    training_images.require_validation(plan.data)
    folder = output or Path(f"sweep-{Path(recipe).stem}")
    points = list(itertools.product(rates, range(seeds)))
    subject = {"model": shlex.join(opening.words(name))}
    sweep = sweeps.Sweep(plan, subject, points, folder, storage)
    with training_bar() as (progress, say):
        finished = sweep.work(trainer(model, opening, device, progress), progress=say)

    # Sum up the runs of all workers.
    trials = sweep.trials()
    lines = sweeps.lines(trials, seeds, counted)
    rows = [asdict(trial) for trial in trials]
    columns = list(sweeps.Trial.__dataclass_fields__)
    body = {
        "recipe": recipe,
        "output": folder,
        "seeds": seeds,
        "counted": counted,
        "lines": [asdict(line) for line in lines],
        "trials": rows,
        "notes": sweeps.notes(trials, lines, finished),
        "done": finished,
        "files": [atomic_write.table(folder / "runs.csv", columns, rows)],
    }
    # The command that is printed last repeats the words that were typed.
    typed = list(overrides)
    if model:
        typed = [*opening.words(model), *overrides]
    show(body, json, functools.partial(_print, typed))
    return 0


def trainer(
    model: str | None,
    opening: ImageOpening,
    device: str,
    progress: Callable[[TrainingProgress], None],
) -> Objective:
    """Return a function that trains one run of a sweep, in a folder, by a recipe.

    That function returns how the run ended: its top-1, loss and number of classes. It returns None
    if the run was stopped early, or has no top-1.

    Args:
        model: The MODEL to train. None trains the network that the recipe names.
        opening: How the MODEL is opened.
        device: The device to train on.
        progress: Called now and then while a run trains.
    """

    def train(recipe: Recipe, folder: Path) -> RunEnd | None:
        """Train one run of a sweep, and return how it ended. None if it has no top-1 at its end."""
        from normswap.training.engine import finetune
        from normswap.training.sweep import RunEnd

        # With `auto`, a run that was killed earlier is continued from its folder.
        source = opening.open(model) if model else None
        result = finetune(
            source,
            recipe,
            folder,
            resume="auto",
            device=device,
            track="none",
            progress=progress,
        )
        # The last row of metrics.csv has the figures after the last epoch.
        last = result.rows[-1]
        top1 = last["top1"]
        if not result.finished or top1 is None:
            return None
        classes = getattr(result.model, "num_classes", None)
        return RunEnd(top1, last["train_loss"], classes, result.validated)

    return train


def _print(words: Sequence[str], body: Body) -> None:
    """Print the table of learning rates, and the command that trains at the best.

    Args:
        words: The words of the command line that name the network and the recipe's keys.
        body: The record of the command.
    """
    from normswap.training.sweep import Line

    lines = [Line(**line) for line in body["lines"]]
    counted = f"{body['counted']} of {body['seeds']}"
    say(f"Top-1 after the last epoch: mean and std of the best {counted} runs")

    rows = []
    for line in lines:
        best = "best" if line.best else ""
        # If no run is lost, the cell is empty and not 0.
        rows.append((f"{line.lr:g}", line.text, line.counted, line.runs, line.lost or None, best))
    columns = ("lr", "top-1", "counted", "runs", "lost", "")
    table("", columns, rows, right=columns[:5])

    for note in body["notes"]:
        say(note)
    for file in body["files"]:
        say(f"written to {file}")
    for line in lines:
        if line.best:
            next_step("finetune", *words, "--recipe", body["recipe"], f"optim.lr={line.lr:g}")
