"""`normswap advise`: which target to choose, and why."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from normswap.cli.options import Device, ImageOpening, Json, Model
from normswap.cli.progress import bar, working
from normswap.cli.tables import facts, listing, show, table
from normswap.cli.terminal import remark, say
from normswap.errors import OptionError
from normswap.plan import Body

if TYPE_CHECKING:
    from normswap.analysis.advice import Advice
    from normswap.surgery.network import Network

KEYS = (
    "source, batch_size, private, deploy, choose (scheme, target, why, command, exact, options),"
    " others, refused (scheme: why), elsewhere (task, ended: top-1 of targets on another network),"
    " measured (null without --data: seconds, images, held_out, ended and trials, which have"
    " target, lr, updates, at_once, after, loss, level)"
)
_ENDED = {
    "target": "target",
    "at_once": "at once",
    "after": "after",
    "loss": "loss",
    "updates": "updates",
    "lr": "lr",
}
EXAMPLES = (
    "advise demo --batch-size 2",
    "advise resnet50 --private",
    "advise demo --data demo --minutes 3",
)
_DATA = (
    "Try the targets on these images of its classes: PATH/train, PATH/val or test; or half is held"
    " out."
)
_NOT_MEASURED = (
    "networks differ, and on this one nothing was measured: --data IMAGES measures where training"
    " ends, --calibrate what a conversion keeps"
)
_NO_NOISE = (
    "these trials add no noise, and clip no gradient of a single image: private training ends lower"
)
_MINUTES = "How long those trials may take [default: 3]."


@dataclass(frozen=True)
class Trying:
    """The images that targets are tried on, and for how long and where."""

    data: Annotated[str | None, typer.Option(metavar="PATH", show_default=False, help=_DATA)] = None
    minutes: Annotated[
        float | None, typer.Option(metavar="N", show_default=False, help=_MINUTES)
    ] = None
    device: Device = "auto"


def run(
    model: Model,
    *,
    batch_size: Annotated[
        int, typer.Option(metavar="N", help="Images that a device or a client sees at a time.")
    ] = 64,
    private: Annotated[
        bool, typer.Option("--private", help="For differentially private training.")
    ] = False,
    deploy: Annotated[bool, typer.Option("--deploy", help="For inference.")] = False,
    trying: Trying,
    opening: ImageOpening,
    json: Json = False,
) -> int:
    """Say which target to choose, and why.

    With --data by short trials of each, with the source as teacher.
    """
    if trying.data is None and trying.minutes is not None:
        raise OptionError("--minutes", "nothing is tried without images", "Give --data IMAGES")
    if trying.data is not None and deploy:
        raise OptionError(
            "--data cannot go with --deploy", "trials train, and what only runs does not"
        )

    net = opening.open(model)
    from normswap.analysis.advice import advise, elsewhere
    from normswap.surgery.network import Network

    network = Network(net)
    words = opening.words(model)
    with working("looking"):
        possible, refused = advise(
            network,
            shlex.join(words),
            batch_size,
            private=private,
            deploy=deploy,
            data=trying.data or "DATA",
        )

    measured: Body | None = None
    following: list[str] = []
    if trying.data is not None:
        measured, possible, recipe = _measure(
            network, possible, trying, batch_size, private=private
        )
        following = ["finetune", *words, *recipe]

    first, *others = map(asdict, possible)
    task, ended_elsewhere = elsewhere(network, batch_size, private=private)
    body = {
        "source": model,
        "batch_size": batch_size,
        "private": private,
        "deploy": deploy,
        "choose": first,
        "others": others,
        "refused": refused,
        "elsewhere": {"task": task, "ended": ended_elsewhere},
        "measured": measured,
    }
    show(body, json, _print, *following)
    return 0


def _measure(
    network: Network, possible: list[Advice], trying: Trying, batch_size: int, *, private: bool
) -> tuple[Body, list[Advice], list[str]]:
    """Try the possible targets on images.

    Args:
        network: The network that is to be converted.
        possible: The targets to try.
        trying: The images, the time and the device.
        batch_size: Images that share statistics.
        private: Whether the network is meant for private training, which the trials are not.

    Returns:
        The record of the trials, the targets in the order of their loss, and the words that train
        to the best target by `finetune`.
    """
    from normswap.training import trials

    minutes = 3.0 if trying.minutes is None else trying.minutes
    with bar(f"trying {len(possible)} targets (seconds)") as progress:
        tried = trials.Trials(
            network, str(trying.data), batch_size, minutes, trying.device, progress
        )
        ended = tried.run(possible)

    remark(tried.held_out.notes)
    if private:
        remark([_NO_NOISE])

    best = ended[0]
    measured = {
        "seconds": tried.seconds(),
        "images": len(tried.images.images),
        "held_out": tried.held_out.count,
        "ended": [trial.record(best) for trial in ended],
        "trials": [trial.record(best) for trial in tried.trials],
    }
    overrides = trials.keys(best.advice, best.lr, batch_size)
    recipe = ["--recipe", trials.RECIPE, "--data", str(trying.data), *overrides]
    return measured, [trial.advice for trial in ended], recipe


def _print(body: Body) -> None:
    targets = [body["choose"], *body["others"]]
    measured = body["measured"]
    why = targets[0]["why"]
    if measured is not None:
        why = f"lowest loss on {measured['held_out']} images held out"
    facts(("choose", targets[0]["target"]), ("because", why))

    # A network that is kept as it is needs no command.
    label = "run" if targets[0]["command"] else "or"
    listing(label, (target["command"] for target in targets if target["command"]))

    if measured is not None:
        _print_trials(measured)
    else:
        _print_targets(targets, body["elsewhere"])
    listing("not possible", (f"{scheme}: {why}" for scheme, why in body["refused"].items()))


def _print_trials(measured: Body) -> None:
    """Print where the trial of each target ended."""
    rows = []
    for trial in measured["ended"]:
        level = "level" if trial["level"] else ""
        rows.append((*map(trial.get, _ENDED), level))
    columns = (*_ENDED.values(), "top-1 with the first")
    table("Top-1 and loss, at once and where trials end", columns, rows, right=columns[1:-1])


def _print_targets(targets: list[Body], elsewhere: Body) -> None:
    """Print the possible targets, and where each ended on another network."""
    rows = []
    for target in targets:
        function = "kept" if target["exact"] else "approximate"
        ended = elsewhere["ended"].get(target["target"], "")
        rows.append((target["target"], function, ended, target["why"]))
    columns = ("target", "function", "ended elsewhere", "why")
    table("Targets that this network admits", columns, rows)

    is_known = any(ended for _, _, ended, _ in rows)
    if is_known:
        say(
            f"ended elsewhere: top-1 after training, of {elsewhere['task']} (docs/results.md);"
            f" {_NOT_MEASURED}"
        )
