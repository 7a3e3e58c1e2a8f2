"""`normswap finetune`: train a network by a recipe. `cli` imports this file to register it."""

from __future__ import annotations

import json as as_json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from normswap.cli import progress
from normswap.cli.app import app
from normswap.cli.options import ArchArgs, ArchName, InChans, Json, NumClasses, Weights
from normswap.errors import NormswapError, OptionError

_WORDS = "A MODEL as in `inspect` [default: the recipe's], and keys of the recipe with values, e.g. optim.lr=0.05."


@app.command("finetune")
def finetune(
    words: Annotated[list[str] | None, typer.Argument(metavar="[MODEL] [KEY=VALUE]...", help=_WORDS)] = None,
    recipe: Annotated[
        str, typer.Option("--recipe", metavar="NAME|FILE", help="One of `normswap recipes`, or a file.")
    ] = "",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="The run's folder [default: ./MODEL-RECIPE].")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="Images, for data.root: PATH/train and PATH/val or test.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="auto|DIR", help="Continue the run in the output, or in DIR.")
    ] = None,
    nproc: Annotated[str, typer.Option(metavar="N|auto", help="Processes on this machine; auto: one per GPU.")] = "1",
    max_restarts: Annotated[
        int, typer.Option(min=0, metavar="N", help="With --nproc: start again so often when a process dies.")
    ] = 0,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda|mps", help="Where to train.")] = "auto",
    track: Annotated[
        str, typer.Option(metavar="auto|none|NAMES", help="tensorboard,wandb,mlflow; auto: those that are set up.")
    ] = "auto",
    weights: Weights = "pretrained",
    arch: ArchName = None,
    arch_arg: ArchArgs = None,
    num_classes: NumClasses = None,
    in_chans: InChans = None,
    json: Json = False,
) -> int:
    """Train a network, converted or not, by a recipe; the recipe may convert it first.

    SIGTERM saves and ends with exit code 0; --resume auto continues. Under torchrun it takes part in the common run.

    The keys of --json: output, best, last (directories), best_epoch, updates, finished (false after SIGTERM), notes
    and rows (metrics.csv).
    """
    from normswap.cli import commands
    from normswap.training import launching, progress_records, recipe_files
    from normswap.training.training_images import Share

    if not recipe:
        raise OptionError("no recipe is given", remedy="--recipe NAME (`normswap recipes` lists them) or FILE")
    model, overrides = recipe_files.split(words or [])
    plan = recipe_files.read(recipe, overrides)
    if data is not None:
        plan = plan.model_copy(update={"data": plan.data.model_copy(update={"root": data})})
    name = model or (plan.model.name if plan.model else "")
    place = output or Path(f"{commands.last_part(name)}-{Path(recipe).stem}")
    processes = 1 if launching.is_worker() else launching.count(nproc)
    if processes > 1:
        Share(world=processes, accumulate=plan.train.accumulate).micro(plan.data.batch_size)
        options = {"--recipe": recipe, "--output": place, "--data": data, "--resume": resume, "--device": device,
                   "--track": track, "--weights": weights, "--arch": arch, "--num-classes": num_classes,
                   "--in-chans": in_chans}  # fmt: skip
        again = [f"{option}={value}" for option, value in options.items() if value is not None]
        again += [f"--arch-arg={pair}" for pair in arch_arg or []] + ["--json"] * json
        code = launching.run(processes, ["finetune", *(words or []), *again], restarts=max_restarts)
        return 0 if code == 143 and (place / "state/run.pt").is_file() else code  # SIGTERM, and it can be continued
    source = commands.Source(model, weights, arch, arch_arg or [], num_classes, in_chans) if model else None
    try:
        return _train(source, plan, place, {"resume": resume, "device": device, "track": track}, json)
    except NormswapError as error:
        if error.what == progress_records.FIRST_FAILED or (error.what == progress_records.GONE and launching.is_ours()):
            return 2
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(5)  # if the first process says the same, torchrun ends this one before it does
        raise


def _train(source: Any, recipe: Any, place: Path, options: dict[str, Any], json: bool) -> int:
    first = os.environ.get("RANK", "0") == "0"
    model = source.open() if source else None
    from normswap.training.engine import finetune

    with progress.training(quiet=not first) as (show, say):
        result = finetune(model, recipe, place, **options, progress=show, say=say)
    if not first:
        return 0
    body = {"output": str(place), "best": str(result.best), "last": str(result.last), "best_epoch": result.best_epoch,
            "updates": result.updates, "finished": result.finished, "notes": list(result.notes),
            "rows": list(result.rows)}  # fmt: skip
    print(as_json.dumps(body, indent=2) if json else "\n".join(_words(body)))
    return 0


def _words(body: dict[str, Any]) -> list[str]:
    rows = body["rows"]
    lines = []
    if not body["finished"]:
        lines.append(f"stopped at update {body['updates']}, nothing is lost: --resume auto continues")
    if rows and rows[-1]["top1"] is not None:
        best = max(value for row in rows for value in (row["top1"], row["ema_top1"]) if value is not None)
        now = rows[-1]
        lines.append(f"top-1: {rows[0]['top1']:.2f} before training, {now['top1']:.2f} after epoch {now['epoch']:g}, "
                     f"best {best:.2f} (epoch {body['best_epoch']:g})")  # fmt: skip
    return [*lines, f"written to {body['output']}: best, last, metrics.csv"]
