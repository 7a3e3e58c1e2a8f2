"""`normswap recalibrate`: statistics of a new domain, or of weights that were changed."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from typer import Option

from normswap.cli import tables
from normswap.cli.options import (
    Force,
    ImageOpening,
    Images,
    Json,
    Model,
    last_part,
    open_model,
    output_option,
    trust_words,
)
from normswap.cli.progress import bar, working
from normswap.cli.tables import facts, show
from normswap.cli.terminal import say
from normswap.errors import OptionError
from normswap.plan import Body
from normswap.storage import network_folder

# If the answers to more than this share of the images change, the result is not called good.
_MOST_CHANGED = 0.5
# The answers to this many images are compared, in as many batches as they take.
_COMPARED = 256
KEYS = (
    "source, data, output, notes (how much was read), answers (count, changed: the share of images"
    " with another class, or null, relative_l2), passed (false if most answers change), report (how"
    " much the outputs change, on noise)"
)
EXAMPLES = (
    "recalibrate demo --data demo",
    "recalibrate resnet50 --data NEW_DOMAIN --samples 1000 -o resnet50-night",
    "recalibrate folded-and-pruned --against folded --data IMAGES -o mended",
)


@dataclass(frozen=True)
class Domain(Images):
    """The options on the images on which the statistics are measured. Labels are not read."""

    data: Annotated[
        str, Option(metavar="PATH", help="Images of the new domain, as --data elsewhere.")
    ] = field()
    split: Annotated[str, Option(metavar="NAME", help="Part of a dataset that has parts.")] = (
        "train"
    )


@dataclass(frozen=True)
class Before:
    """The options that name the network as it was before it was pruned, rounded or averaged.

    They are for a network without BatchNorm, which has no statistics to measure. Its layers get the
    means and variances that they have in the network before.
    """

    GROUP: ClassVar[str] = "Where MODEL has no BatchNorm, and was pruned, rounded or averaged"
    against: Annotated[
        list[str] | None,
        Option(
            metavar="SOURCE",
            help="The network before that; again: each network that MODEL averages.",
        ),
    ] = None
    means_only: Annotated[bool, Option("--means-only", help="Change biases alone, no weights.")] = (
        False
    )


def run(
    model: Model,
    *,
    output: Annotated[
        Path | None, output_option("DIR", "Directory to write [default: ./NAME-recalibrated].")
    ] = None,
    before: Before,
    images: Domain,
    seed: Annotated[int, Option(metavar="S", help="Which images.")] = 0,
    force: Force = False,
    opening: ImageOpening,
    json: Json = False,
) -> int:
    """Measure BatchNorm's statistics anew, on other images.

    Ioffe & Szegedy, algorithm 2: batch statistics averaged over batches, with the unbiased
    variance. Labels are not needed; weights, gamma and beta stay.

    If no BatchNorm is left, and the network was then pruned, rounded or averaged, give the network
    before that as --against SOURCE: every layer's output gets the mean and variance per channel
    that it has in SOURCE.
    """
    if before.means_only and not before.against:
        raise OptionError(
            "--means-only without --against", "BatchNorm's statistics are measured together"
        )
    directory = output or Path(f"{last_part(model)}-recalibrated")
    network_folder.check_writable(directory, force=force)

    # The statistics that are replaced may be broken, so the network is opened with them.
    net = opening.open_damaged(model, device=images.device)
    from normswap.analysis import summary
    from normswap.calibration.checked_batches import first_images
    from normswap.storage import checkpoint
    from normswap.surgery.recalibration import changed_answers, recalibrate

    # The options on how images are prepared hold for each source, too.
    sources = []
    for name in before.against or ():
        sources.append(opening.state(open_model(name, device=images.device)))
    loader = images.loader(net, seed=seed, labelled=False)

    # Images are named with their number and batch size, because the plan records them. It may be
    # published, so of a path it has the last part only.
    place = Path(images.data)
    named = place.resolve().name if place.exists() else images.data
    with bar("estimating statistics") as progress:
        recalibrated = recalibrate(
            net,
            loader,
            against=sources,
            means_only=before.means_only,
            progress=progress,
            data=named,
            samples=images.samples,
            batch_size=images.batch_size,
        )
    checkpoint.save(recalibrated, directory, force=force)

    # Compare the answers before and after, on a few of the images.
    with working("comparing answers"):
        calls = first_images(net, loader, _COMPARED)
        answers = changed_answers(net, recalibrated.model, calls)
    changed = None if answers is None else answers.changed
    # The report passes if all outputs are finite. Here most answers must stay the same, too.
    passed = recalibrated.report.passed and (changed is None or changed <= _MOST_CHANGED)
    report = summary.of_report(recalibrated.report)
    body = {
        "source": model,
        "data": images.data,
        "output": directory,
        "notes": list(recalibrated.notes),
        "answers": answers and asdict(answers),
        "passed": passed,
        "report": {**report, "passed": passed},
    }
    show(body, json, _print, "verify", directory, *trust_words(net), "--data", images.data)
    return 0


def _print(body: Body) -> None:
    """Print how much new BatchNorm statistics change the network's answers."""
    facts(("recalibrated", body["source"]), ("on", body["data"]), ("read", body["notes"][0]))
    tables.print_proof(body["report"])
    # The record has the answers' figures as plain values. `ChangedAnswers` puts them into words.
    answers: object = "not compared"
    if body["answers"] is not None:
        from normswap.surgery.recalibration import ChangedAnswers

        answers = ChangedAnswers(**body["answers"])
    facts(("answers", f"{body['report']['verdict']}, {answers}"))
    if not body["passed"]:
        say(
            "warning: most answers change. If the network was trained with the statistics that it"
            " had, this has undone its training: measure both on labelled images"
        )
    say(f"written to {body['output']}")
