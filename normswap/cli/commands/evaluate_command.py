"""`normswap evaluate`: accuracy, loss and speed on labelled images."""

from dataclasses import asdict, dataclass, field
from typing import Annotated

from typer import Option

from normswap.cli import tables
from normswap.cli.options import (
    Compared,
    ImageOpening,
    Images,
    Json,
    ModelOrFile,
    last_part,
    open_model,
)
from normswap.cli.progress import bar
from normswap.cli.tables import facts, show
from normswap.cli.terminal import say
from normswap.models import kinds
from normswap.plan import Body

KEYS = (
    "source, data, top1 (percent), top5 (percent), loss, count, images_per_s, against (null, or"
    " source, top1, agreement, enough, verdict: MEASURED)"
)
EXAMPLES = (
    "evaluate demo --data demo",
    "evaluate demo.onnx --data demo --against demo --min-kept 0.99",
)


@dataclass(frozen=True)
class Labelled(Images):
    """The options that name labelled images. Here the option --data is required."""

    data: Annotated[str, Option(metavar="PATH", help="As --data elsewhere.")] = field()


def run(
    model: ModelOrFile,
    *,
    compared: Compared,
    images: Labelled,
    opening: ImageOpening,
    json: Json = False,
) -> int:
    """Accuracy, loss and speed on labelled images.

    With --against also the accuracy of that network, and how often both give the same answer. The
    exit code is 1 if they agree on less than --min-kept.
    """
    # --min-kept without a network to compare with is refused before anything is opened.
    if compared.against is None:
        compared.enough(None)
    net = opening.open(model, device=images.device, runs=True)
    from normswap.images.accuracy import agreement, classify
    from normswap.proof import verdict

    against: Body | None = None
    with bar(f"evaluating {model}") as progress:
        evaluation, answers = classify(net, images.loader(net), progress=progress)
        if compared.against is not None:
            other = open_model(
                compared.against,
                device=images.device,
                runs=True,
                trust_factory=opening.trust_factory,
            )
            other_evaluation, other_answers = classify(
                other, images.loader(other), progress=progress
            )
            against = {
                "source": compared.against,
                "top1": other_evaluation.top1,
                "agreement": agreement(answers, other_answers),
            }

    is_enough = True
    if against:
        is_enough = compared.enough(against["agreement"])
        against["enough"] = is_enough
        # Agreement is counted, whatever it is: it claims nothing that could be wrong.
        against["verdict"] = verdict.word(exact=False, passed=True, unproved=False)

    next_command: list[str] = []
    if is_enough and model.lower().endswith(tuple(kinds.EXPORTED)):
        next_command = ["bench", model]
    elif is_enough:
        next_command = ["export", *opening.words(model), "-o", f"{last_part(model)}.onnx"]
    body = {"source": model, "data": images.data, **asdict(evaluation), "against": against}
    show(body, json, _print, *next_command)
    return int(not is_enough)


def _print(body: Body) -> None:
    """Print a network's accuracy, loss and speed, and how often a second one answers alike.

    Args:
        body: What `--json` prints. "against" has the figures of the second network, or None.
    """
    rows = [
        ("network", body["source"]),
        ("images", f"{body['count']} of {body['data']}"),
        ("top-1", f"{body['top1']:.2f} %"),
        ("top-5", f"{body['top5']:.2f} %"),
        ("loss", f"{body['loss']:.4f}"),
        ("speed", f"{body['images_per_s']:.0f} images/s"),
    ]
    against = body["against"]
    if against:
        rows.append(("against", f"{against['source']}: top-1 {against['top1']:.2f} %"))
        rows.append(("agreement", f"{against['verdict']}, {100 * against['agreement']:.2f} %"))
    facts(*rows)

    if against and not against["enough"]:
        say(tables.TOO_LITTLE)
