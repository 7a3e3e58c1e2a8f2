"""`normswap report`: a page about a directory that `normswap convert` wrote."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from normswap.cli.options import Force, Images, Json, Trust, output_option, trust_flag
from normswap.cli.progress import working
from normswap.cli.tables import show
from normswap.cli.terminal import say
from normswap.errors import OutputError, require_packages
from normswap.plan import Body
from normswap.storage import atomic_write, network_folder

KEYS = (
    "output, source, sha256, arch, steps, digest, versions, report, blocks, others (norms outside"
    " of blocks), alphas, sizes, notes, signal (a point per block), signal_inputs, accuracy"
)
EXAMPLES = ("report demo-skipinit", "report demo-skipinit --data demo -o skipinit.html")


def run(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Written by `normswap convert`.")
    ],
    *,
    output: Annotated[
        Path | None, output_option("FILE", "Page to write [default: ./DIR.html].")
    ] = None,
    images: Images,
    force: Force = False,
    trust_factory: Trust = False,
    json: Json = False,
) -> int:
    """Write what was done and measured as one HTML page.

    The page is complete in itself: a browser loads nothing else for it. With --data both networks
    are evaluated, and the signal is measured on those images.
    """
    require_packages("the report", ("matplotlib", "jinja2"), "plots")
    # Check the place of the page before anything is measured.
    file = output or Path(f"{directory.resolve().name}.html")
    network_folder.check_beside(file)
    atomic_write.check_writable(file, force=force)
    # If a page has another ending, a browser shows its HTML as text.
    if file.suffix.lower() not in (".html", ".htm"):
        raise OutputError(
            f"{file} has another ending than a page of HTML", remedy=f"Name it {file.stem}.html"
        )

    with working("opening and measuring"):
        from normswap.reporting import page, report

        network_folder.check_no_run(directory)
        loader = None if images.data is None else partial(images.loader, labelled=None)
        facts = report.collect(directory, loader, device=images.device, trust_factory=trust_factory)
        atomic_write.text(file, page.render(facts))

    body = {"output": file, **asdict(facts)}
    show(body, json, _print, "push", directory, "OWNER/NAME", *trust_flag(trust_factory))
    return 0


def _print(body: Body) -> None:
    say(f"written to {body['output']}: any browser shows it")
