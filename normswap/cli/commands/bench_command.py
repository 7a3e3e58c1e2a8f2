"""`normswap bench`: how fast a network runs, as it is, folded and exported."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from normswap.cli.progress import working
from normswap.cli.options import Device, Json, ModelOrFile, Opening, exported_file
from normswap.cli.tables import facts, listing, show, size, table
from normswap.errors import NormswapError, OptionError
from normswap.models import kinds
from normswap.plan import Body

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from normswap.benchmarking.timing import Contender
    from normswap.models.calling import Example

KEYS = (
    "rows (form, runtime, batch, status: ok, wrong or failed, reason, error, ms: the median, ms_low"
    " and ms_high: quartiles, images_per_s, speedup: over the first row), settings, notes"
)
EXAMPLES = ("bench demo demo.onnx", "bench resnet50 --batch-size 1,8")
_COLUMNS = ("form, runtime", "ms", "quartiles", "images/s", "x first", "error")


def run(
    model: ModelOrFile,
    files: Annotated[
        list[str] | None, Argument(metavar="FILE", show_default=False, help="Exported from MODEL.")
    ] = None,
    *,
    batch_size: Annotated[str, Option(metavar="N,N...", help="Images at a time.")] = "1,8",
    device: Device = "cpu",
    seconds: Annotated[
        float, Option(min=0.0, metavar="S", help="Time each for about so long.")
    ] = 3.0,
    opening: Opening,
    json: Json = False,
) -> int:
    """Time a network as it is, folded, and exported.

    All take turns in one process, on the same images, with torch's number of threads
    (OMP_NUM_THREADS): the network in PyTorch, exported files in their own runtimes. Their answers
    are compared first: a wrong one is reported, not timed.
    """
    batches = [text.strip() for text in batch_size.split(",")]
    if not all(batch.isdecimal() and int(batch) for batch in batches):
        raise OptionError(
            f"--batch-size {batch_size}",
            "it is a list of whole numbers from 1 up",
            "For instance 1,8",
        )
    with working(f"opening {model}") as progress:
        import torch

        from normswap.benchmarking import timing
        from normswap.models import devices

        settings: Body = {
            "device": devices.find(device),
            "threads": torch.get_num_threads(),
            "seconds": seconds,
        }
        contenders, image_size, notes = _contenders(model, files or [], opening, settings["device"])
        rows = []
        for batch in map(int, batches):
            images = torch.randn(batch, *image_size, generator=torch.Generator().manual_seed(0))
            rows += timing.run(contenders, images, **settings, progress=progress)
    settings |= {"device": device, "size": image_size}
    following = ["export", *opening.words(model), "-o", "FILE.onnx"]
    if Path(model).suffix.lower() in kinds.EXPORTED:
        following = ["evaluate", model, "--data", "IMAGES"]
    show(
        {"rows": rows, "settings": settings, "notes": notes},
        json,
        partial(_print, model),
        *following,
    )
    return 0


def _contenders(
    model: str, files: list[str], opening: Opening, device: torch.device
) -> tuple[list[Contender], tuple[int, ...], list[str]]:
    from normswap.benchmarking.timing import Contender

    network: nn.Module | None = None
    contenders: list[Contender] = []
    notes: list[str] = []
    image_size: tuple[int, ...] = ()
    if exported_file(model):
        files = [model, *files]
    else:
        network, contenders, notes = _networks(model, opening, device)
        image_size = _input_size(model, network)
    for name in files:
        file = exported_file(name)
        if file is None:
            raise OptionError(
                f"{name} is no exported file", remedy="One network is timed, and files of it"
            )
        image_size = image_size or file.shape[1]
        if image_size != file.shape[1]:
            what = f"{name} takes images of {size(file.shape[1])}"
            raise OptionError(what, f"{model} is timed on {size(image_size)}")
        contender = Contender(
            file.file.name, file.form.name, file.network(), precision=file.precision
        )
        if network is not None:
            request = file.request(network)
            contender.prepare = request.raw
            if request.settings.softmax:
                contender.expected = lambda logits: logits.log_softmax(-1)
        contenders.append(contender)
    return contenders, image_size, notes


def _input_size(name: str, network: nn.Module) -> tuple[int, ...]:
    from normswap.models import network_input

    drawn = network_input.drawn_calls(network)
    if drawn is None:
        return network_input.size(network)
    if len(drawn[0].tensors()) > 1 or not drawn[0].images.is_floating_point():
        remedy = (
            "`normswap export` writes a file of it, and `normswap verify` compares that with it"
        )
        takes = f"{name} takes {', '.join(drawn[0].kwargs)}"
        raise OptionError("bench times networks that take one tensor of numbers", takes, remedy)
    return drawn[0].size


def _networks(
    name: str, opening: Opening, device: torch.device
) -> tuple[nn.Module, list[Contender], list[str]]:
    import torch

    from normswap import provenance
    from normswap.analysis import block_signals
    from normswap.benchmarking.timing import Contender
    from normswap.models import calling
    from normswap.models.network_input import answer
    from normswap.surgery import conversion

    torch.manual_seed(0)
    model = opening.open(name, device=str(device))
    if opening.weights == "random":
        # The branches of fresh networks begin at zero, and would hide anything that is wrong in
        # them.
        model = block_signals.awake(model)
    scheme = next((step.scheme for step in reversed(provenance.of(model).plan.steps)), "original")
    networks = {scheme: model}
    notes = []
    try:
        if scheme != "folded":
            networks["folded"] = conversion.convert(model, "folded").model
    except NormswapError as error:
        notes.append(f"{name} is not folded: {error}")

    def run(network: nn.Module, call: Example, images: Tensor) -> Tensor:
        return answer(call.of(images).call(network))

    contenders = []
    for form, network in networks.items():
        answers = partial(run, network.eval().to(device), calling.form(network))
        contenders.append(
            Contender(form, "torch", answers, prepare=lambda images: images.to(device))
        )
    return model, contenders, notes


def _print(model: str, body: Body) -> None:
    settings = body["settings"]
    facts(("threads", settings["threads"]), ("device", settings["device"]))
    for batch, group in groupby(body["rows"], lambda row: row["batch"]):
        rows = list(group)
        timed = []
        for row in (row for row in rows if row["status"] == "ok"):
            times = f"{row['ms']:.2f}", f"{row['ms_low']:.2f} .. {row['ms_high']:.2f}"
            speeds = f"{row['images_per_s']:.1f}", f"{row['speedup']:.2f}"
            timed.append(
                (f"{row['form']}, {row['runtime']}", *times, *speeds, f"{row['error']:.0e}")
            )
        table(
            f"{model}, batch {batch} of {size(settings['size'])}",
            _COLUMNS,
            timed,
            right=_COLUMNS[1:],
        )
        untimed = [row for row in rows if row["status"] != "ok"]
        listing(
            "not timed", (f"{row['form']}: {row['status']}: {row['reason']}" for row in untimed)
        )
    listing("note", body["notes"])
