"""`normswap finetune`: train a network by a recipe."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from normswap.cli.options import (
    Device,
    ImageOpening,
    Json,
    last_part,
    output_option,
    trust_words,
)
from normswap.cli.progress import training_bar
from normswap.cli.tables import show
from normswap.cli.terminal import say, say_aside
from normswap.errors import OptionError
from normswap.plan import Body

if TYPE_CHECKING:
    from normswap.training.engine import Result
    from normswap.training.recipe import Recipe

KEYS = (
    "output, best (directory), last (directory), best_epoch, updates, finished (false after"
    " SIGTERM), notes, rows (metrics.csv), validated (number of validation images)"
)
EXAMPLES = (
    "finetune resnet50 --recipe finetune_imagenet_skipinit --data IMAGES",
    "finetune demo-skipinit --recipe mine.yaml --data IMAGES optim.lr=0.01",
)
# A recipe names no file of weights.
_WEIGHTS_OF_RECIPES = ("pretrained", "random")
_WORDS = (
    "A MODEL as in `inspect` [default: the recipe's], and keys of the recipe with values, e.g."
    " optim.lr=0.05."
)


@dataclass(frozen=True)
class TrainingOptions:
    """The options of a run that are no keys of its recipe."""

    resume: Annotated[
        str | None, Option(metavar="auto", help="Continue the run in the output if there is one.")
    ] = None
    device: Device = "auto"
    track: Annotated[
        str,
        Option(
            metavar="auto|none|NAMES",
            help="Accelerate's trackers: wandb,mlflow ...; auto: tensorboard.",
        ),
    ] = "auto"


def run(
    words: Annotated[list[str] | None, Argument(metavar="MODEL|KEY=VALUE", help=_WORDS)] = None,
    *,
    recipe: Annotated[
        str, Option("--recipe", metavar="NAME|FILE", help="One of `normswap recipes`, or a file.")
    ] = "",
    output: Annotated[
        Path | None, output_option("DIR", "The run's folder [default: ./MODEL-RECIPE].")
    ] = None,
    data: Annotated[
        str | None,
        Option(metavar="PATH", help="Images, for data.root: PATH/train and PATH/val or test."),
    ] = None,
    training: TrainingOptions,
    opening: ImageOpening,
    json: Json = False,
) -> int:
    """Train a network by a recipe, which may convert it first.

    SIGTERM saves and ends with exit code 0; `normswap finetune --resume auto -o DIR` continues. On
    several GPUs: torchrun --nproc-per-node gpu -m normswap finetune ..., `accelerate launch` or
    srun.
    """
    from normswap.training import recipe_files

    # A run that is continued has its recipe in its folder.
    if not recipe and training.resume and output is not None and (output / "recipe.yaml").is_file():
        recipe = str(output / "recipe.yaml")
    if not recipe:
        what = "no recipe is given"
        if training.resume:
            what += f", and {output} holds no run"
        raise OptionError(what, remedy="Give --recipe NAME (`normswap recipes` lists them) or FILE")
    model, overrides = recipe_files.split(words or [])
    opening.require_model(model)
    plan = _named(recipe_files.load_recipe(recipe, overrides), model, data, opening)

    from normswap.training import assembly
    from normswap.training.engine import finetune

    # Only the first of several processes prints.
    assembly.read_slurm()
    is_first = os.environ.get("RANK", "0") == "0"
    name = model or (plan.model.name if plan.model else "")
    folder = output or Path(f"{last_part(name)}-{Path(recipe).stem}")
    to_continue = _words_to_continue(model, opening, folder)
    try:
        source = None
        if model:
            with assembly.drawing_weights(plan):
                source = opening.open(model)
        with training_bar(quiet=not is_first) as (progress, say):
            result = finetune(source, plan, folder, **vars(training), progress=progress, say=say)
    except KeyboardInterrupt:
        if is_first and (folder / "state" / "run.pt").is_file():
            command = shlex.join(["normswap", *map(str, to_continue)])
            say_aside(f"stopped; to go on from the last state: {command}")
        raise

    # The network itself is no value of --json.
    if is_first:
        body = {"output": folder, **vars(result)}
        network = body.pop("model")
        next_command = _next_command(
            result, to_continue, trust_words(network), plan.data.root or "IMAGES"
        )
        show(body, json, _print, *next_command)
    return 0


def _words_to_continue(model: str | None, opening: ImageOpening, folder: Path) -> list[object]:
    """Return the words of the command that continues a run.

    Args:
        model: The MODEL of the command line, if there is one. It is named again if the recipe in
            the run's folder does not say all of how it is opened (`_named`).
        opening: How the MODEL is opened.
        folder: The run's folder.
    """
    words = [] if model is None or _recipe_says(model, opening) else opening.words(model)
    return ["finetune", *words, "--resume", "auto", "-o", folder]


def _recipe_says(model: str, opening: ImageOpening) -> bool:
    """Whether a recipe can say all of how a MODEL is opened.

    It can if the MODEL is no function of the user's, which a recipe does not call, and if nothing
    is asked for but random weights and arguments of the architecture.

    Args:
        model: The MODEL of the command line.
        opening: How the MODEL is opened.
    """
    from normswap.models import kinds

    has_only_keys_of_recipes = (
        replace(opening, weights="pretrained", arch_arg=None) == ImageOpening()
    )
    is_in_keys = opening.weights in _WEIGHTS_OF_RECIPES and has_only_keys_of_recipes
    return is_in_keys and not kinds.of(model).foreign


def _next_command(
    result: Result, to_continue: list[object], trust: list[str], data: str
) -> list[object]:
    """Return the words of the next command: one that measures the best network, or continues.

    Args:
        result: The result of the run.
        to_continue: The words of the command that continues the run.
        trust: The words that are needed to open the run's networks.
        data: The images to measure on.
    """
    if not result.finished:
        return to_continue
    # Images without labels give no accuracy, and the network may have no classes.
    is_labelled = any(row["top1"] is not None for row in result.rows)
    command = "evaluate" if is_labelled else "verify"
    return [command, result.best, *trust, "--data", data]


def _named(recipe: Recipe, model: str | None, data: str | None, opening: ImageOpening) -> Recipe:
    """Return the recipe with the network and the images of the command line written into it.

    A run can then be continued from its folder alone. If a recipe cannot say all of how the network
    is opened (`_recipe_says`), it names none, and the run needs the MODEL again.

    Args:
        recipe: The recipe.
        model: The MODEL of the command line, if there is one.
        data: The images of --data, if they are given.
        opening: How the MODEL is opened.
    """
    from normswap.training.recipe import RecipeNetwork

    if data is not None:
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"root": data})})
    if model is None:
        return recipe
    if not _recipe_says(model, opening):
        return recipe.model_copy(update={"model": None})
    network = RecipeNetwork(name=model, weights=opening.weights, args=opening.arch_args())
    return recipe.model_copy(update={"model": network})


def _print(body: Body) -> None:
    """Print how a training ended: top-1 before and after, and where its networks are."""
    rows = body["rows"]
    if not body["finished"]:
        say(f"stopped at update {body['updates']}, nothing is lost")

    # The first row of metrics.csv is the network before training. `ema_top1` is the accuracy of the
    # averaged weights.
    if rows and rows[-1]["top1"] is not None:
        accuracies = [row["top1"] for row in rows] + [row["ema_top1"] for row in rows]
        best = max(value for value in accuracies if value is not None)
        last = rows[-1]
        say(
            f"top-1: {rows[0]['top1']:.2f} before training, {last['top1']:.2f} after epoch"
            f" {last['epoch']:g}, best {best:.2f} (epoch {body['best_epoch']:g})"
        )
    say(f"written to {body['output']}: best, last, metrics.csv")
