"""`normswap advise`: which target to choose, and why."""

import shlex
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from normswap.cli import progress
from normswap.cli.image_options import ImageOpening
from normswap.cli.options import Device, Json, Model, remark
from normswap.cli.tables import facts, listing, show, table
from normswap.errors import OptionError
from normswap.plan import Body

KEYS = (
    "source, batch_size, private, deploy, choose (scheme, why, command, exact, options), others, refused (scheme: "
    "why), measured (null without --data: seconds, images, held_out, top1 of the source, ended and trials, which "
    "have target, lr, updates, at_once, after, loss, level)"
)
_ENDED = {"target": "target", "at_once": "at once", "after": "after", "loss": "loss", "updates": "updates", "lr": "lr"}
EXAMPLES = ("advise demo --batch-size 2", "advise resnet50 --private", "advise demo --data demo --minutes 3")
_DATA = "Try the targets on these images of its classes: PATH/train, PATH/val or test; or half is held out."
_NOT_MEASURED = (
    "not measured on this network, and it differs from network to network: --data IMAGES tries them, and "
    "docs/results.md has what others of its kind kept, at once and after training"
)
_MINUTES = "How long those trials may take [default: 3]."


@dataclass(frozen=True)
class Trying:
    """The images that targets are tried on, and how."""

    data: Annotated[str | None, typer.Option(metavar="PATH", show_default=False, help=_DATA)] = None
    minutes: Annotated[float | None, typer.Option(metavar="N", show_default=False, help=_MINUTES)] = None
    device: Device = "auto"


def run(
    model: Model,
    *,
    batch_size: Annotated[int, typer.Option(metavar="N", help="Images that a device or a client sees at a time.")] = 64,
    private: Annotated[bool, typer.Option("--private", help="For differentially private training.")] = False,
    deploy: Annotated[bool, typer.Option("--deploy", help="For inference.")] = False,
    trying: Trying,
    opening: ImageOpening,
    json: Json = False,
) -> int:
    """Say which target to choose, and why; with --data by short trials of each, with the source as teacher."""
    if trying.data is None and trying.minutes is not None:
        raise OptionError("--minutes", "nothing is tried without images", "Give --data IMAGES")
    if trying.data is not None and deploy:
        raise OptionError("--data cannot go with --deploy", "trials train, and what only runs does not")
    net = opening.open(model)
    from normswap.analysis.advice import advise
    from normswap.surgery.network import Network

    network, words = Network(net), opening.words(model)
    with progress.working("looking"):
        how = {"private": private, "deploy": deploy}
        possible, refused = advise(network, shlex.join(words), batch_size, **how, data=trying.data)
    measured, following = None, []
    if trying.data is not None:
        from normswap.training import trials

        with progress.bar(f"trying {len(possible)} targets (seconds)") as advance:
            tried = trials.Trials(network, trying.data, batch_size, trying.minutes or 3, trying.device, advance)
            ended = tried.run(possible)
        remark(tried.notes)
        possible, measured = tried.ordered(ended), tried.record(ended)
        keys = trials.keys(possible[0], ended[0].lr, batch_size)
        following = ["finetune", *words, "--recipe", trials.RECIPE, "--data", trying.data, *keys]
    first, *others = map(asdict, possible)
    body = {"source": model, "batch_size": batch_size, **how, "choose": first, "others": others, "refused": refused}
    show({**body, "measured": measured}, json, _print, *following)
    return 0


def _print(body: Body) -> None:
    targets, measured = [body["choose"], *body["others"]], body["measured"]
    facts(("choose", targets[0]["scheme"]), ("because", targets[0]["why"]))
    # What is kept as it is needs no command.
    label = "run" if targets[0]["command"] else "or"
    listing(label, (target["command"] for target in targets if target["command"]))
    if measured is not None:
        rows = [(*map(trial.get, _ENDED), "level" * trial["level"]) for trial in measured["ended"]]
        table(
            "Where trials end: top-1 and loss",
            (*_ENDED.values(), "top-1 with the best"),
            rows,
            right=[*_ENDED.values()][1:],
        )
    else:
        rows = [(target["scheme"], "kept" if target["exact"] else "approximate", target["why"]) for target in targets]
        table("Targets that this network admits", ("target", "function", "why"), rows)
        print(_NOT_MEASURED)
    listing("not possible", (f"{scheme}: {why}" for scheme, why in body["refused"].items()))
