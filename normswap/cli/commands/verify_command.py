"""`normswap verify`: a converted network against its source."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normswap.cli import tables
from normswap.cli.progress import bar, working
from normswap.cli.options import (
    Compared,
    ImageOpening,
    Images,
    Json,
    exported_file,
    last_part,
    open_model,
)
from normswap.cli.tables import facts, proof, show, small, verdict
from normswap.errors import OptionError, SourceError
from normswap.plan import Body

if TYPE_CHECKING:
    from normswap.exporting.exported_file import ExportedFile

KEYS = (
    "directory, against, passed, enough (of it is kept), source_unchanged (null if not known),"
    " apart (the first layer that is off: site, kind, relative_l2, two numbers), place (in words),"
    " report, data (null, or agreement, count, top-1 of source and result, or relative_l2),"
    " compiled (null, or of outputs and gradients what departs most: what, relative_l2, allowed);"
    " of an exported file: directory, against, passed, enough, place, figures (as in `export`)"
)
EXAMPLES = ("verify demo-skipinit", "verify demo.onnx --against demo --data demo")


def run(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|FILE", help="Written by `normswap convert`, or by `normswap export`."
        ),
    ],
    *,
    compared: Compared,
    images: Images,
    opening: ImageOpening,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compile", help="Compare its outputs and gradients under torch.compile with its own."
        ),
    ] = False,
    json: Json = False,
) -> int:
    """Compare a converted network or exported file with its source.

    A directory is compared with the source that it records, or with --against; a file, which runs
    in its own runtime, needs --against. The exit code is 1 if they differ, or agree on less than
    --min-kept.
    """
    against = compared.against
    asked = [name for name, _ in opening.asked()]
    if against is None and asked:
        raise OptionError(
            f"{' and '.join(asked)} without --against", "it says how that MODEL is opened"
        )
    with working(f"loading {directory}"):
        file = exported_file(str(directory))
    if file is None:
        body = _of_directory(directory, against, images, opening, compiled=compiled)
    elif compiled:
        raise OptionError(
            "--compile of an exported file", "torch.compile takes networks", "Leave it out"
        )
    else:
        body = _of_file(file, against, images, opening)
    agreement = (body.get("data") or body.get("figures") or {}).get("agreement")
    body["enough"] = compared.enough(agreement)
    is_good = body["passed"] and body["enough"] and not _departed(body)
    trust = ["--trust-factory"] * opening.trust_factory
    following = ["export", directory, *trust, "-o", f"{last_part(str(directory))}.onnx"]
    if file is not None:
        following = ["bench", *opening.words(str(against)), directory]
        if not file.takes_images:
            following = ["inspect", directory]
    show(body, json, _print, *following * is_good)
    return int(not is_good)


def _of_directory(
    directory: Path, against: str | None, images: Images, opening: ImageOpening, *, compiled: bool
) -> Body:
    with working(f"loading {directory}"):
        from normswap.analysis import summary
        from normswap.models import devices
        from normswap.storage import checkpoint
        from normswap.surgery import compiling, reverification
        from normswap.surgery.network import Network
        from normswap.storage.network_folder import check_no_run

        check_no_run(directory)
        result = devices.place(
            checkpoint.load(directory, trust_factory=opening.trust_factory), images.device
        )
    name = against or reverification.recorded(result, directory)
    data = None
    if against:
        source = opening.open(against, device=images.device)
    else:
        try:
            source = open_model(name, device=images.device, **reverification.how(result))
        except SourceError as error:
            remedy = (
                "Name the source where it is now, or what is to stand for it: '--against MODEL'"
            )
            raise SourceError(
                f"the source cannot be opened: {error.what}", error.why, remedy
            ) from None
    with working("comparing"):
        network = Network(source)
        report = reverification.again(network, result)
        apart = reverification.first_apart(network, result, report)
    if images.data is not None:
        loader = images.loader(
            opening.state(result), labelled=False if network.anatomy.features else None
        )
        with bar("comparing on images") as progress:
            data = reverification.on_images(network, result, loader, progress)
    body: Body = {
        "directory": directory,
        "against": name,
        "passed": report.passed,
        "source_unchanged": None,
    }
    if not against:
        body["source_unchanged"] = reverification.unchanged(source, result)
    body["compiled"] = None
    if compiled:
        network = Network(result)
        example = (
            network.calls[0]
            if images.data is None
            else network.form.read(next(iter(loader)))[0].like(result)
        )
        with working("compiling"):
            deviations = compiling.compare(network, example)
            apart = apart or compiling.first_apart(network, example, deviations)
        body["compiled"] = [asdict(deviation) for deviation in deviations]
    body |= {"apart": apart and asdict(apart), "place": f"first at {apart}" if apart else ""}
    return {**body, "report": summary.of_report(report), "data": data}


def _of_file(
    file: ExportedFile, against: str | None, images: Images, opening: ImageOpening
) -> Body:
    from normswap.exporting import exported_file

    if against is None:
        raise OptionError(
            f"{file.file} does not hold its source", remedy="Name it: '--against MODEL'"
        )
    source = opening.open(against, device=images.device)
    file.request(source)
    loader = None if images.data is None else images.loader(source, labelled=None)
    with working("comparing"):
        figures = exported_file.verify(file, source, loader)
    body = {
        "directory": file.file,
        "against": against,
        "passed": figures.passed,
        "figures": asdict(figures),
    }
    return {**body, "place": figures.place}


def _print(body: Body) -> None:
    directory = body["directory"]
    against = body["against"]
    figures = body.get("figures")
    place = f", {body['place']}" if body["place"] else ""
    compared = ("compared", directory), ("against", against)
    if figures:
        allowed = f"allowed {small(figures['tolerance'])} ({figures['inputs']})"
        answers = ("same answer", tables.same(figures)), ("top-1", tables.top1(figures))
        facts(*compared, ("relative L2", f"{small(figures['relative_l2'])}, {allowed}"), *answers)
    else:
        is_below = body["data"] and not body["report"]["exact"]
        facts(
            *compared,
            ("result", verdict(body["report"]) if not is_below else "measured on images, below"),
        )
        if body["source_unchanged"] is False:
            print(
                "warning: the source is not what it was: its tensors have another hash than when"
                " this was made"
            )
        proof(body["report"])
    if data := body.get("data"):
        facts(
            ("images", data["count"]),
            (
                "top-1",
                f"{data['source']:.2f} % -> {data['result']:.2f} %" if "source" in data else None,
            ),
            ("relative L2", small(data.get("relative_l2"))),
            (
                "agreement",
                f"{100 * data['agreement']:.2f} %" if data["agreement"] is not None else None,
            ),
        )
    for error in body.get("compiled") or ():
        distance = f"{error['what']}: relative L2 {small(error['relative_l2'])}"
        facts(("compiled", f"{distance}, allowed {small(error['allowed'])}"))
    if not body["passed"]:
        print(f"FAILED: they differ{place}")
    elif departed := _departed(body):
        print(f"FAILED: under torch.compile the {departed} differs from eager mode{place}")
    elif not body["enough"]:
        print(tables.TOO_LITTLE + place)
    elif place:
        print(f"warning: rounding does not explain all of it{place}")
    elif (figures and figures["tolerance"] >= 1) or (not figures and not body["report"]["exact"]):
        print("measured: it is not exact, and what it keeps stands above")
    else:
        print("passed")


def _departed(body: Body) -> str:
    """The output or gradient that is off by more than is allowed; empty: none is."""
    return next(
        (
            each["what"]
            for each in body.get("compiled") or ()
            if each["relative_l2"] > each["allowed"]
        ),
        "",
    )
