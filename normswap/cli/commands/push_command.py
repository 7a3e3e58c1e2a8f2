"""`normswap push`: a converted network onto the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from normswap.cli.options import Images, Json, Trust
from normswap.cli.progress import bar, working
from normswap.cli.tables import facts, show
from normswap.cli.terminal import say
from normswap.plan import Body
from normswap.storage import network_folder

if TYPE_CHECKING:
    from normswap.storage.model_card import Accuracy

KEYS = "url (of the commit), repo, files, alone (whether timm loads it without normswap)"
EXAMPLES = (
    "push demo-skipinit me/demo-skipinit",
    "push r50-skipinit me/r50-skipinit --data hfds/ILSVRC/imagenet-1k",
    'push demo-skipinit me/demo-skipinit --private -m "SkipInit in place of BatchNorm"',
)


def run(
    directory: Annotated[Path, Argument(metavar="DIR", help="Written by `normswap convert`.")],
    repo: Annotated[
        str, Argument(metavar="OWNER/NAME", help="The repository; made if it is not there.")
    ],
    *,
    images: Images,
    license: Annotated[
        str | None,
        Option(metavar="NAME", help="Of the weights: apache-2.0 ... [default: the source's]."),
    ] = None,
    private: Annotated[bool, Option("--private", help="Make a new repository private.")] = False,
    message: Annotated[str, Option("-m", "--message", metavar="TEXT", help="Of the commit.")] = "",
    trust_factory: Trust = False,
    json: Json = False,
) -> int:
    """Publish a converted network on the Hugging Face hub.

    Weights with plan and proof, config, card and the source's norms go up in one commit.
    `hf-hub:OWNER/NAME` is a MODEL then; where the result is a network that timm builds by itself,
    `timm.create_model` loads it without normswap. With --data the card states top-1 on labelled
    images; of a dataset on the hub (`hfds/OWNER/NAME`) the hub is told, too.
    """
    network_folder.check_no_run(directory)
    accuracy = None
    if images.data is not None:
        with working(f"checking {directory}"):
            from normswap.storage.publishing import check

            # Measuring may take an hour, so whatever `push` would refuse is refused before.
            check(directory, repo, license=license, private=private)
        accuracy = _measured(directory, images, trust_factory=trust_factory)
    with working(f"pushing {directory} to {repo}"):
        from normswap.storage.publishing import push

        pushed = push(
            directory,
            repo,
            license=license,
            private=private,
            message=message,
            trust_factory=trust_factory,
            accuracy=accuracy,
        )
    show(vars(pushed), json, _print, "inspect", f"hf-hub:{pushed.repo}")
    return 0


def _measured(directory: Path, images: Images, *, trust_factory: bool) -> Accuracy:
    """Return top-1 of the network in a directory on images, for the model card.

    Args:
        directory: The directory, which `normswap convert` wrote.
        images: The images.
        trust_factory: Whether the factory that the directory names may be imported.
    """
    with working(f"loading {directory}"):
        from normswap.images.accuracy import evaluate
        from normswap.models import devices
        from normswap.storage import checkpoint
        from normswap.storage.model_card import Accuracy

        model = checkpoint.load(directory, trust_factory=trust_factory)
        model = devices.place(model, images.device)

    loader = images.loader(model)
    with bar(f"evaluating {directory}") as progress:
        measured = evaluate(model, loader, progress=progress)

    # A dataset of the hub is named hfds/OWNER/NAME, perhaps with a folder: hfds/OWNER/NAME:ROOT.
    data = str(images.data)
    prefix, _, dataset = data.partition(":")[0].partition("/")
    if prefix not in ("hfds", "hfids"):
        # Nobody else has the user's folder, so only the last part of its path is published.
        return Accuracy(top1=measured.top1, count=measured.count, images=PurePath(data).name)
    return Accuracy(
        top1=measured.top1,
        count=measured.count,
        images=dataset,
        split=images.split,
        dataset=dataset,
    )


def _print(body: Body) -> None:
    facts(("pushed", ", ".join(body["files"])), ("to", body["url"]))
    if body["alone"]:
        say(f'timm loads it alone: timm.create_model("hf-hub:{body["repo"]}", pretrained=True)')
    else:
        say(
            f"normswap loads it, as the MODEL hf-hub:{body['repo']}; timm alone does not build such"
            " a network"
        )
