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
    from normswap.training.trials import TargetTrial

KEYS = (
    "source, batch_size, private, deploy, choose (scheme, target, why, command, exact, options),"
    " others, refused (scheme: why), elsewhere (task, ended: top-1 of targets on another network),"
    " ready (checkpoints without BatchNorm), measured (null without --data: seconds, images,"
    " held_out, warnings, ended and trials, which have target, lr, updates, at_once, after, loss,"
    " level, compared)"
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
    """The options of short trainings that try each target: images, minutes and device."""

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

    # Ask which targets the network admits, and in which order known results put them.
    net = opening.open(model)
    from normswap.analysis.advice import READY, advise, elsewhere
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

    # Trials on images put the targets in a new order.
    measured: Body | None = None
    next_command: list[str] = []
    if trying.data is not None:
        measured, possible, recipe = _measure(
            network, possible, trying, batch_size, private=private
        )
        if recipe:
            next_command = ["finetune", *words, *recipe]

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
        "ready": READY,
        "measured": measured,
    }
    show(body, json, _print, *next_command)
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
        The record of the trials, the targets in the order of their loss, and words of `normswap
        finetune` that train to the best target. There are no words if the best target ended with a
        higher loss than it began with.
    """
    from normswap.training import trials

    # BatchNorm itself is tried as a reference for the targets. Private training does not admit it.
    minutes = 3.0 if trying.minutes is None else trying.minutes
    names = [advice.target for advice in possible]
    references = [] if private else trials.references(network.module)
    possible = [*possible, *(each for each in references if each.target not in names)]
    with bar(f"trying {len(possible)} ways (seconds)") as progress:
        tried = trials.Trials(
            network, str(trying.data), batch_size, minutes, trying.device, progress
        )
        # The last trial of each target, the best first. Targets that were left behind had fewer
        # updates, and come behind the others.
        last_trials = tried.run(possible)

    remark(tried.held_out.notes)
    if private:
        remark([_NO_NOISE])

    # The references are left out, as they are no targets. The order stays.
    ranked = [trial for trial in last_trials if trial.advice.target in names]
    best = ranked[0]
    measured = {
        "seconds": tried.seconds(),
        "images": len(tried.images.images),
        "held_out": tried.held_out.count,
        "ended": [trial.record(best) for trial in last_trials],
        "trials": [trial.record(best) for trial in tried.trials],
        "warnings": _warnings(last_trials, best),
    }
    # If the best target ended with a higher loss than it began with, no training is proposed.
    recipe: list[str] = []
    if best.loss <= best.loss_at_once:
        overrides = trials.keys(best.advice, best.lr, batch_size)
        recipe = ["--recipe", trials.RECIPE, "--data", str(trying.data), *overrides]
    return measured, [trial.advice for trial in ranked], recipe


def _warnings(ended: list[TargetTrial], best: TargetTrial) -> list[str]:
    """Return sentences that warn of taking the best target's result for more than it shows.

    Args:
        ended: The last trial of each target, and of BatchNorm as a reference, the best first.
        best: The trial of the best target.
    """
    from normswap.training import trials

    # Only trials with equally many updates can be compared.
    compared = [trial for trial in ended if trial.updates == best.updates]
    warnings: list[str] = []
    if all(trial.loss > trial.loss_at_once for trial in compared):
        warnings.append(
            "every way ends with a higher loss than it began with: do not train on these images,"
            " or try more images or more minutes"
        )
    if trials.is_at_edge(best.lr):
        warnings.append(
            f"the rate {best.lr:g} of {best.advice.target} is the edge of the rates that were"
            " tried: the best one may lie beyond"
        )
    better = [
        trial.advice.target
        for trial in compared
        if trial.advice.target in trials.REFERENCES and trial.loss < best.loss
    ]
    if better:
        warnings.append(
            f"{' and '.join(better)} ends with a lower loss than any target: convert for what"
            " else the target gives, not for accuracy"
        )
    if len(compared) < len(ended):
        warnings.append(
            f"only ways with {best.updates} updates are compared; the others were left behind"
            " earlier, at equal updates"
        )
    return warnings


def _print(body: Body) -> None:
    """Print which target to choose and why, then the others, and how the trials ended."""
    targets = [body["choose"], *body["others"]]
    measured = body["measured"]
    why = targets[0]["why"]
    if measured is not None:
        why = f"lowest loss on {measured['held_out']} images held out"
    facts(("choose", targets[0]["target"]), ("because", why))
    if any(target["scheme"] == "groupnorm" for target in targets):
        facts(("ready", body["ready"]))

    # If the best target is the network as it is, no command is run for it. The commands for others
    # are listed behind the word `or`.
    label = "run" if targets[0]["command"] else "or"
    listing(label, (target["command"] for target in targets if target["command"]))

    if measured is not None:
        _print_trials(measured)
    else:
        _print_targets(targets, body["elsewhere"])
    listing("not possible", (f"{scheme}: {why}" for scheme, why in body["refused"].items()))


def _print_trials(measured: Body) -> None:
    """Print what each target's last short training ended at: top-1, loss, updates and rate.

    The top-1 before training stands beside it.

    Args:
        measured: The record of the trials, with a row for each target (`ended`).
    """
    rows = []
    for trial in measured["ended"]:
        beside_best = "level" if trial["level"] else ""
        if not trial["compared"]:
            beside_best = "left behind"
        rows.append((*map(trial.get, _ENDED), beside_best))
    columns = (*_ENDED.values(), "top-1 beside the best")
    table("Top-1 and loss, at once and where trials end", columns, rows, right=columns[1:-1])
    listing("warning", measured["warnings"])


def _print_targets(targets: list[Body], elsewhere: Body) -> None:
    """Print the possible targets, and the top-1 that each reached on another network."""
    rows = []
    for target in targets:
        function = "kept" if target["exact"] else "approximate"
        ended = elsewhere["ended"].get(target["target"], "")
        rows.append((target["target"], function, ended, target["why"]))
    columns = ("target", "function", "ended elsewhere", "why")
    table("Targets that this network admits", columns, rows)

    # The line below explains the column, which is not printed if it is empty.
    has_ended_elsewhere = any(ended for _, _, ended, _ in rows)
    if has_ended_elsewhere:
        say(
            f"ended elsewhere: top-1 after training, of {elsewhere['task']} (docs/results.md);"
            f" {_NOT_MEASURED}"
        )
