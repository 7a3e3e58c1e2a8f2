"""`normswap bench`: how fast a network runs, as it is, folded and exported."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normswap.cli import progress
from normswap.cli.naming import label, last_part
from normswap.cli.options import Json, Opening, exported_file
from normswap.cli.tables import facts, listing, next_step, show, size, table
from normswap.errors import NormswapError, OptionError
from normswap.models import kinds
from normswap.plan import Body

if TYPE_CHECKING:  # torch takes a second to import, and --help needs none of it
    from torch import Tensor, nn

    from normswap.benchmarking.timing import Contender
    from normswap.exporting.exported_file import ExportedFile

KEYS = (
    "rows (network, form, runtime, batch, status: ok, wrong or failed, reason, error, ms, ms_low, ms_high: median and "
    "quartiles, images_per_s, speedup: over the network's first row), settings, versions, notes"
)
EXAMPLES = ("bench demo demo.onnx", "bench resnet50 --batch-size 1,8")
_COLUMNS = ("form, runtime", "ms", "quartiles", "images/s", "x first", "error")
_VERSIONS = ("torch", "timm", "onnxruntime", "openvino")


@dataclass(frozen=True)
class Timing:
    """The options of how it is timed."""

    batch_size: Annotated[str, typer.Option(metavar="N,N...", help="Images at a time.")] = "1,8"
    device: Annotated[str, typer.Option(metavar="cpu|cuda|mps", help="Where networks run; not files.")] = "cpu"
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", show_default=False, help="Of every runtime [default: torch's].")
    ] = None
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Turns of each contender.")] = 15
    seconds: Annotated[float, typer.Option(metavar="S", help="Time each for about so long, all turns together.")] = 3.0

    @property
    def batches(self) -> list[int]:
        """The numbers of images at a time.

        Raises:
            OptionError: one is no number above 0.
        """
        parts = [part.strip() for part in self.batch_size.split(",")]
        if not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise OptionError(
                f"--batch-size {self.batch_size}", "it is a list of whole numbers from 1 up", "For instance 1,8"
            )
        return list(dict.fromkeys(map(int, parts)))


def run(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...", show_default=False, help="As in `inspect`, or a file that `normswap export` wrote."
        ),
    ],
    *,
    timing: Timing,
    opening: Opening,
    json: Json = False,
) -> int:
    """Time a network as it is, folded, and exported.

    All take turns in one process, on the same images, with the same number of threads: networks in PyTorch, an exported
    file in its own runtime, beside the MODEL before it. Their answers are compared first: a wrong one is reported, not
    timed.
    """
    batches = timing.batches
    if not (timing.seconds > 0 and math.isfinite(timing.seconds)):
        raise OptionError(f"--seconds {timing.seconds:g}", "it is a positive number")
    with progress.stages() as say:
        say("starting")
        body = _bench(models, opening, timing, batches, say)
    show(body, json, _print)
    return 0


def _bench(
    names: Sequence[str], opening: Opening, timing: Timing, batches: Sequence[int], say: Callable[[str], None]
) -> Body:
    from importlib import metadata

    import torch

    from normswap.benchmarking import timing as clock

    clock.check_device(timing.device)
    before = torch.get_num_threads()
    torch.set_num_threads(timing.threads or before)  # each runtime takes as many
    settings: Body = {
        "device": timing.device, "threads": torch.get_num_threads(), "rounds": timing.rounds, "seconds": timing.seconds,
    }  # fmt: skip
    try:
        groups = _groups(names, opening, timing.device, say)
        rows = [
            {"network": group.name, **row}
            for group in groups
            for batch in batches
            for row in clock.run(list(group.contenders(batch)), **settings, say=say)
        ]
    finally:
        torch.set_num_threads(before)
    versions = {package.name: package.version for package in metadata.distributions() if package.name in _VERSIONS}
    sizes = {group.name: list(group.size) for group in groups}
    notes = [note for group in groups for note in group.notes]
    return {"rows": rows, "settings": {**settings, "sizes": sizes}, "versions": versions, "notes": notes}


@dataclass
class _Group:
    """A network and what is timed beside it.

    Args:
        size: (C, H, W).
        model: None where the first MODEL is a file.
        networks: by form; files: exported ones.
    """

    name: str
    size: tuple[int, ...]
    device: str
    model: nn.Module | None = None
    networks: dict[str, nn.Module] = field(default_factory=dict)
    files: list[ExportedFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def contenders(self, batch: int) -> Iterator[Contender]:
        """All of them, on so many images: the same noise."""
        import torch

        from normswap.benchmarking.timing import Contender
        from normswap.models import calling
        from normswap.models.network_input import answer

        def answers(network: nn.Module, call: calling.Example, images: Tensor) -> Tensor:
            return answer(call.of(images).call(network))

        images = torch.randn(batch, *self.size, generator=torch.Generator().manual_seed(0))
        for form, network in self.networks.items():
            run = partial(answers, network.eval().to(self.device), calling.form(network))
            yield Contender(form, "torch", run, images.to(self.device))
        for file in self.files:
            contender = Contender(file.file.name, file.form.name, file.network(), images)
            contender.precision = file.precision or "fp32"
            if self.model is not None:
                request = file.request(self.model)
                contender.images = request.raw(images)
                if request.settings.softmax:
                    contender.expected = lambda logits: logits.log_softmax(-1)
            yield contender


def _groups(names: Sequence[str], opening: Opening, device: str, say: Callable[[str], None]) -> list[_Group]:
    """Open each MODEL; a file belongs to the network before it.

    Raises:
        OptionError: a file takes other images than the network before it, or one cannot be opened.
    """
    groups: list[_Group] = []
    for name in names:
        say(f"opening {name}")
        file = exported_file(name)
        if file is None:
            taken = [group.name for group in groups]
            groups.append(_with_folded(label(last_part(name), taken), name, opening, device))
            continue
        takes = file.shape[1]
        if not groups:
            groups.append(_Group(name, takes, device))
        if groups[-1].size != takes:
            what = f"{groups[-1].name} is timed on {size(groups[-1].size)}"
            raise OptionError(f"{name} takes images of {size(takes)}", what)
        groups[-1].files.append(file)
    return groups


def _with_folded(called: str, name: str, opening: Opening, device: str) -> _Group:
    """A network: its source, if it was converted, itself, and folded."""
    import torch

    from normswap import provenance
    from normswap.analysis import signal_propagation
    from normswap.models import network_input
    from normswap.surgery import conversion, unfolding
    from normswap.surgery.network import Network

    torch.manual_seed(0)
    model = opening.open(name)
    # the branches of fresh networks begin at zero, and would hide anything that is wrong in them
    model = signal_propagation.awake(model) if opening.weights == "random" else model
    group = _Group(called, network_input.size(model), device, model)
    record = provenance.of(model)
    scheme = record.plan.steps[-1].scheme if record and record.plan.steps else "original"
    try:
        if scheme != "original":
            group.networks["original"] = unfolding.unfold(Network(model)).module
    except NormswapError as error:
        group.notes.append(f"{called} is measured by itself, not by its source: {error}")
    group.networks[scheme] = model
    try:
        if scheme != "folded":
            group.networks["folded"] = conversion.convert(model, "folded", input_size=group.size).model
    except NormswapError as error:
        group.notes.append(f"{called} is not folded: {error}")
    return group


def _print(body: Body) -> None:
    """A table per network and batch size, then what was not timed."""
    settings = body["settings"]
    facts(
        ("threads", settings["threads"]),
        ("versions", ", ".join(f"{name} {version}" for name, version in body["versions"].items())),
        ("turns", f"{settings['rounds']} rounds of about {settings['seconds'] / settings['rounds']:.2g} s each"),
    )
    for (network, batch), group in groupby(body["rows"], lambda row: (row["network"], row["batch"])):
        rows = list(group)
        timed = [_row(row) for row in rows if row["status"] == "ok"]
        title = f"{network}, batch {batch} of {size(settings['sizes'][network])}"
        table(title, _COLUMNS, timed, right=_COLUMNS[1:])
        untimed = [row for row in rows if row["status"] != "ok"]
        listing("not timed", (f"{row['form']}: {row['status']}: {row['reason']}" for row in untimed))
    listing("note", body["notes"])
    first = body["rows"][0]["network"]
    if Path(first).suffix.lower() in kinds.EXPORTED:
        next_step("evaluate", first, "--data", "IMAGES")
    else:
        next_step("export", first, "-o", "FILE.onnx")


def _row(row: Body) -> Sequence[object]:
    quartiles = f"{_figure(row['ms_low'])} .. {_figure(row['ms_high'])}"
    speeds = (f"{row['images_per_s']:.1f}", f"{row['speedup']:.2f}")
    return f"{row['form']}, {row['runtime']}", _figure(row["ms"]), quartiles, *speeds, f"{row['error']:.0e}"


def _figure(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"
