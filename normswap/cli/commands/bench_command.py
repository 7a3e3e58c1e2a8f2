"""`normswap bench`: how fast a network runs, as it is, folded and exported."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normswap.cli import progress
from normswap.cli.naming import label, last_part
from normswap.cli.options import Device, Json, Opening, exported_file
from normswap.cli.tables import facts, listing, next_step, show, size, table
from normswap.errors import NormswapError, OptionError
from normswap.models import source_names
from normswap.plan import Body

if TYPE_CHECKING:  # torch takes a second to import, and --help needs none of it
    import torch
    from torch import Tensor, nn

    from normswap.benchmarking.timing import Contender
    from normswap.models.calling import Example

KEYS = (
    "rows (network, form, runtime, batch, status: ok, wrong or failed, reason, error, ms, ms_low, ms_high: median and "
    "quartiles, images_per_s, speedup: over the network's first row), settings, notes"
)
EXAMPLES = ("bench demo demo.onnx", "bench resnet50 --batch-size 1,8")
_COLUMNS = ("form, runtime", "ms", "quartiles", "images/s", "x first", "error")


def run(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...", show_default=False, help="As in `inspect`, or a file that `normswap export` wrote."
        ),
    ],
    *,
    batch_size: Annotated[str, typer.Option(metavar="N,N...", help="Images at a time.")] = "1,8",
    device: Device = "cpu",
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", show_default=False, help="Of every runtime [default: torch's].")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.0, metavar="S", help="Time each for about so long.")] = 3.0,
    opening: Opening,
    json: Json = False,
) -> int:
    """Time a network as it is, folded, and exported.

    All take turns in one process, on the same images, with the same number of threads: networks in PyTorch, an exported
    file in its own runtime, beside the MODEL before it. Their answers are compared first: a wrong one is reported, not
    timed.
    """
    batches = [part.strip() for part in batch_size.split(",")]
    if not all(batch.isdecimal() and int(batch) for batch in batches):
        raise OptionError(f"--batch-size {batch_size}", "it is a list of whole numbers from 1 up", "For instance 1,8")
    with progress.stages() as say:
        say("starting")
        import torch

        from normswap.benchmarking import timing
        from normswap.models import devices

        threads_before = torch.get_num_threads()
        torch.set_num_threads(threads or threads_before)  # each runtime takes as many
        settings: Body = {"device": devices.find(device), "threads": torch.get_num_threads(), "seconds": seconds}
        rows = []
        try:
            groups = _groups(models, opening, settings["device"], say)
            for group, batch in itertools.product(groups, map(int, batches)):
                images = torch.randn(batch, *group.size, generator=torch.Generator().manual_seed(0))
                measured = timing.run(group.contenders, images, **settings, say=say)
                rows += [{"network": group.name, **row} for row in measured]
        finally:
            torch.set_num_threads(threads_before)
    settings |= {"device": device, "sizes": {group.name: list(group.size) for group in groups}}
    notes = [note for group in groups for note in group.notes]
    show({"rows": rows, "settings": settings, "notes": notes}, json, _print)
    return 0


@dataclass
class _Group:
    """A network and what is timed beside it.

    Args:
        size: (C, H, W).
        model: None where the first MODEL is a file.
    """

    name: str
    size: tuple[int, ...]
    model: nn.Module | None = None
    contenders: list[Contender] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _groups(names: Sequence[str], opening: Opening, device: torch.device, say: Callable[[str], None]) -> list[_Group]:
    """Open each MODEL; a file belongs to the network before it.

    Raises:
        OptionError: a file takes other images than the network before it, or one cannot be opened.
    """
    from normswap.benchmarking.timing import Contender

    groups: list[_Group] = []
    for name in names:
        say(f"opening {name}")
        file = exported_file(name)
        if file is None:
            taken = [group.name for group in groups]
            groups.append(_with_folded(label(last_part(name), taken), name, opening, device))
            continue
        file_size = file.shape[1]
        if not groups:
            groups.append(_Group(name, file_size))
        group = groups[-1]
        if group.size != file_size:
            what = f"{group.name} is timed on {size(group.size)}"
            raise OptionError(f"{name} takes images of {size(file_size)}", what)
        contender = Contender(file.file.name, file.form.name, file.network(), precision=file.precision or "fp32")
        if group.model is not None:
            request = file.request(group.model)
            contender.prepare = request.raw
            if request.settings.softmax:
                contender.expected = lambda logits: logits.log_softmax(-1)
        group.contenders.append(contender)
    return groups


def _with_folded(label: str, name: str, opening: Opening, device: torch.device) -> _Group:
    """A network: its source, if it was converted, itself, and folded."""
    import torch

    from normswap import provenance
    from normswap.analysis import signal_propagation
    from normswap.benchmarking.timing import Contender
    from normswap.models import calling, network_input
    from normswap.surgery import conversion, unfolding
    from normswap.surgery.network import Network

    torch.manual_seed(0)
    model = opening.open(name, device=str(device))
    if opening.weights == "random":
        # The branches of fresh networks begin at zero, and would hide anything that is wrong in them.
        model = signal_propagation.awake(model)
    group = _Group(label, network_input.size(model), model)
    record = provenance.of(model)
    scheme = record.plan.steps[-1].scheme if record and record.plan.steps else "original"
    networks: dict[str, nn.Module] = {}
    try:
        if scheme != "original":
            networks["original"] = unfolding.unfold(Network(model)).module
    except NormswapError as error:
        group.notes.append(f"{label} is measured by itself, not by its source: {error}")
    networks[scheme] = model
    try:
        if scheme != "folded":
            networks["folded"] = conversion.convert(model, "folded", input_size=group.size).model
    except NormswapError as error:
        group.notes.append(f"{label} is not folded: {error}")
    for form, network in networks.items():
        run = partial(_answers, network.eval(), calling.form(network))
        group.contenders.append(Contender(form, "torch", run, prepare=lambda images: images.to(device)))
    return group


def _answers(network: nn.Module, call: Example, images: Tensor) -> Tensor:
    from normswap.models.network_input import answer

    return answer(call.of(images).call(network))


def _print(body: Body) -> None:
    """A table per network and batch size, then what was not timed."""
    settings = body["settings"]
    facts(("threads", settings["threads"]), ("device", settings["device"]))
    for (network, batch), group in itertools.groupby(body["rows"], lambda row: (row["network"], row["batch"])):
        rows = list(group)
        timed = [
            (f"{row['form']}, {row['runtime']}", f"{row['ms']:.2f}", f"{row['ms_low']:.2f} .. {row['ms_high']:.2f}",
             f"{row['images_per_s']:.1f}", f"{row['speedup']:.2f}", f"{row['error']:.0e}")
            for row in rows if row["status"] == "ok"
        ]  # fmt: skip
        title = f"{network}, batch {batch} of {size(settings['sizes'][network])}"
        table(title, _COLUMNS, timed, right=_COLUMNS[1:])
        untimed = [row for row in rows if row["status"] != "ok"]
        listing("not timed", (f"{row['form']}: {row['status']}: {row['reason']}" for row in untimed))
    listing("note", body["notes"])
    first = body["rows"][0]["network"]
    if Path(first).suffix.lower() in source_names.EXPORTED:
        next_step("evaluate", first, "--data", "IMAGES")
    else:
        next_step("export", first, "-o", "FILE.onnx")
