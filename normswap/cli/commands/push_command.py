"""`normswap push`: a converted network onto the Hugging Face hub."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from normswap.cli.options import Json, Trust
from normswap.cli.progress import working
from normswap.cli.tables import facts, show
from normswap.cli.terminal import say
from normswap.plan import Body
from normswap.storage import network_folder

KEYS = "url (of the commit), repo, files, alone (whether timm loads it without normswap)"
EXAMPLES = (
    "push demo-skipinit me/demo-skipinit",
    'push demo-skipinit me/demo-skipinit --private -m "SkipInit in place of BatchNorm"',
)


def run(
    directory: Annotated[Path, Argument(metavar="DIR", help="Written by `normswap convert`.")],
    repo: Annotated[
        str, Argument(metavar="OWNER/NAME", help="The repository; made if it is not there.")
    ],
    *,
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
    `timm.create_model` loads it without normswap.
    """
    with working(f"pushing {directory} to {repo}"):
        from normswap.storage.publishing import push

        network_folder.check_no_run(directory)
        pushed = push(
            directory,
            repo,
            license=license,
            private=private,
            message=message,
            trust_factory=trust_factory,
        )
    show(vars(pushed), json, _print, "inspect", f"hf-hub:{pushed.repo}")
    return 0


def _print(body: Body) -> None:
    facts(("pushed", ", ".join(body["files"])), ("to", body["url"]))
    if body["alone"]:
        say(f'timm loads it alone: timm.create_model("hf-hub:{body["repo"]}", pretrained=True)')
    else:
        say(
            f"normswap loads it, as the MODEL hf-hub:{body['repo']}; timm alone does not build such"
            " a network"
        )
