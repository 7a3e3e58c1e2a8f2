"""`normswap verify`: a converted network against its source."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normswap.cli import tables
from normswap.cli.options import (
    Compared,
    ImageOpening,
    Images,
    Json,
    exported_file,
    last_part,
    open_model,
    trust_flag,
)
from normswap.cli.progress import bar, working
from normswap.cli.tables import facts, print_proof, show, small, verdict
from normswap.cli.terminal import say
from normswap.errors import OptionError, SourceError
from normswap.plan import Body

if TYPE_CHECKING:
    from torch import nn

    from normswap.exporting.exported_file import ExportedFile
    from normswap.images.datasets import Loader
    from normswap.proof.where import Departure

KEYS = (
    "directory, against, passed, enough (of it is kept), trained (it is of a training run, so no"
    " verdict is given), source_unchanged (null if not known), apart (the first layer that is off:"
    " site, kind, relative_l2, two numbers), place (in words), report, data (null, or agreement,"
    " count, top-1 of source and result, or relative_l2), compiled (null, or of outputs and"
    " gradients what departs most: what, relative_l2, allowed, rounding: what rounding may"
    " explain); of an exported file: directory, against, passed, enough, place, figures (as in"
    " `export`)"
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
    in its own runtime, needs --against. Without --against, --weights FILE fills the network in DIR
    first: what another program trained is measured, not proved. The exit code is 1 if they differ,
    or agree on less than --min-kept, and 2 if nothing that was compared could have shown an error.
    A network that `finetune` trained is measured, too: only --min-kept can then make it fail.
    """
    against = compared.against
    asked = [name for name, _ in opening.asked()]
    with working(f"loading {directory}"):
        file = exported_file(str(directory))
    # --weights FILE alone fills the network in DIR. All other options say how --against is opened.
    fills = file is None and against is None and asked == ["--weights"]
    fills = fills and opening.weights != "random"
    if against is None and asked and not fills:
        raise OptionError(
            f"{' and '.join(asked)} without --against", "it says how that MODEL is opened"
        )

    if file is None:
        body = _of_directory(directory, against, images, opening, compiled=compiled)
    elif compiled:
        raise OptionError(
            "--compile of an exported file", "torch.compile takes networks", "Leave it out"
        )
    else:
        body = _of_file(file, against, images, opening)

    # The agreement was measured on images, or on a file. Otherwise there is none.
    measured = body.get("data") or body.get("figures") or {}
    body["enough"] = compared.enough(measured.get("agreement"))
    is_good = body["passed"] and body["enough"] and not _departed(body) and not _unproved(body)

    # The next step for a good network is its export. A good file is timed beside its source if it
    # takes images, and else inspected.
    trust = trust_flag(opening.trust_factory)
    filled = ["--weights", opening.weights] if fills else []
    next_command = ["export", directory, *filled, *trust, "-o", f"{last_part(str(directory))}.onnx"]
    if file is not None:
        next_command = ["bench", *opening.words(str(against)), directory]
        if not file.takes_images:
            next_command = ["inspect", directory]
    if not is_good:
        next_command = []
    show(body, json, _print, *next_command)
    if _unproved(body):
        return 2
    return int(not is_good)


def _of_directory(
    directory: Path, against: str | None, images: Images, opening: ImageOpening, *, compiled: bool
) -> Body:
    """Compare the network in a directory with its source; return the record that --json prints.

    Args:
        directory: The directory, which `normswap convert` wrote.
        against: The MODEL to compare with. None takes the source that the directory records.
        images: Images to measure the agreement on, if there are any.
        opening: How `against` is opened. Without `against`, its weights file fills the network.
        compiled: Whether the network is also compared with itself under torch.compile.
    """
    # Without --against, the options can only be --weights FILE, which fills the network.
    with working(f"loading {directory}"):
        from normswap.analysis import summary
        from normswap.models import devices
        from normswap.storage import checkpoint, network_folder
        from normswap.surgery import reverification
        from normswap.surgery.network import Network

        network_folder.check_no_run(directory)
        weights = None
        if against is None and opening.asked():
            weights = opening.weights
        result = devices.place(
            checkpoint.load(directory, weights=weights, trust_factory=opening.trust_factory),
            images.device,
        )

    # Open the source.
    name = against or reverification.recorded(result, directory)
    if against:
        source = opening.open(against, device=images.device)
    else:
        source = _recorded_source(name, result, images.device)

    # Compare on noise, and find the first layer that is off.
    with working("comparing"):
        network = Network(source)
        report = reverification.again(network, result)
        trained = weights is not None or _is_trained(directory)
        if trained:
            # Training is to change the function, so the distance is no verdict.
            report = replace(report, exact=False, passed=True, unproved="")
        apart = reverification.first_converted_layer_apart(network, result, report)

    # Compare on images. A network that gives features has no classes, so labels are not read. For
    # others they are read if there are any.
    loader = None
    data = None
    if images.data is not None:
        labelled = False if network.anatomy.features else None
        loader = images.loader(opening.state(result), labelled=labelled)
        with bar("comparing on images") as progress:
            data = reverification.on_images(network, result, loader, progress)

    body: Body = {
        "directory": directory,
        "against": name,
        "passed": report.passed,
        "trained": trained,
        "source_unchanged": None if against else reverification.unchanged(source, result),
        "compiled": None,
    }
    # What is printed as the place is the first layer that is off in either comparison.
    if compiled:
        body["compiled"], departure = _compare_compiled(result, loader)
        apart = apart or departure
    body["apart"] = apart and asdict(apart)
    body["place"] = f"first at {apart}" if apart else ""
    return {**body, "report": summary.of_report(report), "data": data}


def _is_trained(directory: Path) -> bool:
    """Whether a network is best/ or last/ of a training run, which has its metrics beside it."""
    run = directory.resolve().parent
    return (run / "metrics.csv").is_file() and (run / "recipe.yaml").is_file()


def _recorded_source(name: str, result: nn.Module, device: str) -> nn.Module:
    """Open the source that a network's record names.

    Args:
        name: The source's name.
        result: The converted network, whose record says how the source is opened.
        device: The device to place the source on.

    Raises:
        SourceError: The source cannot be opened.
    """
    from normswap.surgery import reverification

    try:
        return open_model(name, device=device, **reverification.how(result))
    except SourceError as error:
        remedy = "Name the source where it is now, or what is to stand for it: '--against MODEL'"
        raise SourceError(f"the source cannot be opened: {error.what}", error.why, remedy) from None


def _compare_compiled(
    result: nn.Module, loader: Loader | None
) -> tuple[list[Body], Departure | None]:
    """Compare a network under torch.compile with the same network in eager mode.

    Args:
        result: The network.
        loader: Batches of images. The first one is the input of the comparison. With None it is
            the network's own example.

    Returns:
        A record for each output and gradient, and the first layer whose output differs, or None.
    """
    from normswap.proof import compiling
    from normswap.surgery.network import Network

    network = Network(result)
    if loader is None:
        example = network.calls[0]
    else:
        # `read` puts the first batch into the arguments of the network's forward, and `like` moves
        # them to its device and dtype.
        example = network.form.read(next(iter(loader)))[0].like(result)
    with working("compiling"):
        deviations = compiling.compare_compiled(network, example)
        departure = compiling.first_compiled_layer_apart(network, example, deviations)
    return [asdict(deviation) for deviation in deviations], departure


def _of_file(
    file: ExportedFile, against: str | None, images: Images, opening: ImageOpening
) -> Body:
    """Compare an exported file with its source; return the record that --json prints.

    Args:
        file: The file.
        against: The MODEL to compare with.
        images: Images to compare on, if there are any.
        opening: How `against` is opened.

    Raises:
        OptionError: No MODEL is named.
    """
    from normswap.exporting import exported_file

    if against is None:
        raise OptionError(
            f"{file.file} does not hold its source", remedy="Name it: '--against MODEL'"
        )

    source = opening.open(against, device=images.device)
    # `request` raises an error if the file cannot have been made from such a network. The record of
    # its source states the file's inputs, and so says how images are read.
    request = file.request(source)
    loader = None if images.data is None else images.loader(request.source, labelled=None)
    with working("comparing"):
        figures = exported_file.verify_request(file, request, loader)
    return {
        "directory": file.file,
        "against": against,
        "passed": figures.passed,
        "figures": asdict(figures),
        "place": figures.place,
    }


def _print(body: Body) -> None:
    """Print which networks were compared, how far apart they are, and the conclusion."""
    compared = (("compared", body["directory"]), ("against", body["against"]))
    figures = body.get("figures")
    if figures:
        distance = small(figures["relative_l2"])
        allowed = f"allowed {small(figures['tolerance'])} ({figures['inputs']})"
        facts(
            *compared,
            ("relative L2", f"{distance}, {allowed}"),
            ("same answer", tables.same_answers(figures)),
            ("top-1", tables.top1_change(figures)),
            # If the comparison is not exact, `_conclusion` puts the remark into the last line.
            ("note", figures["remark"] if figures["exact"] else ""),
        )
    else:
        _print_report(body, compared)

    if data := body.get("data"):
        _print_data(data)
    for error in body.get("compiled") or ():
        distance = f"{error['what']}: relative L2 {small(error['relative_l2'])}"
        facts(("compiled", f"{distance}, allowed {small(error['allowed'])}"))
    say(_conclusion(body))


def _print_report(body: Body, compared: tuple[tuple[str, object], ...]) -> None:
    """Print the comparison of two networks.

    Args:
        body: The record of the command.
        compared: The first lines, which name the two networks.
    """
    report = body["report"]
    # A conversion that is approximate has no verdict on noise where images are there: the figures
    # on these images are printed instead, below.
    is_judged_by_images = body["data"] and not report["exact"]
    result = "measured on images, below" if is_judged_by_images else verdict(report)
    facts(*compared, ("result", result))
    if body["source_unchanged"] is False:
        say(
            "warning: the source is not what it was: its tensors have another hash than when"
            " this was made"
        )
    print_proof(report)


def _print_data(data: Body) -> None:
    """Print what was measured on images: top-1 of both networks, distance and agreement."""
    top1 = None
    if "source" in data:
        top1 = f"{data['source']:.2f} % -> {data['result']:.2f} %"
    agreement = None
    if data["agreement"] is not None:
        agreement = f"{100 * data['agreement']:.2f} %"

    facts(
        ("images", data["count"]),
        ("top-1", top1),
        ("relative L2", small(data.get("relative_l2"))),
        ("agreement", agreement),
    )


def _conclusion(body: Body) -> str:
    """Return the last line that is printed: the verdict, with the place of an error, if any."""
    place = f", {body['place']}" if body["place"] else ""
    if unproved := _unproved(body):
        return f"NOT PROVED: {unproved}"
    if not body["passed"]:
        return f"WRONG: they differ{place}"
    if departed := _departed(body):
        return f"WRONG: under torch.compile the {departed} differs from eager mode{place}"
    if not body["enough"]:
        return tables.TOO_LITTLE + place
    # The result passes, and yet a layer in it is off.
    if place:
        return f"warning: rounding does not explain all of it{place}"

    if body.get("trained"):
        return "TRAINED: how far training has taken it from its source stands above"
    figures = body.get("figures")
    is_exact = (figures or body["report"])["exact"]
    if not is_exact:
        remark = figures["remark"] if figures else ""
        return f"MEASURED: {remark or 'it is not exact, and what it keeps stands above'}"
    return "PROVED"


def _unproved(body: Body) -> str:
    """Return why nothing proves the result. The text is empty if it is proved, or is wrong.

    Args:
        body: The record of the command.
    """
    measured = body.get("figures") or body.get("report") or {}
    if measured.get("unproved"):
        return str(measured["unproved"])
    if not body["passed"] or _departed(body):
        return ""
    # A deviation above what is allowed, which `_departed` has not found to be wrong, is unproved.
    for deviation in body.get("compiled") or ():
        if deviation["relative_l2"] > deviation["allowed"]:
            return (
                f"under torch.compile the {deviation['what']} is off by"
                f" {small(deviation['relative_l2'])}, which rounding alone may explain"
            )
    return ""


def _departed(body: Body) -> str:
    """Return the name of an output or gradient that is wrong under torch.compile.

    It is wrong if it differs from eager mode by more than is allowed, and by more than rounding may
    explain. The text is empty if none is wrong, or if nothing was compiled.

    Args:
        body: The record of the command.
    """
    for deviation in body.get("compiled") or ():
        # `not a <= b` counts NaN as too large.
        if not deviation["relative_l2"] <= max(deviation["allowed"], deviation["rounding"]):
            return str(deviation["what"])
    return ""
