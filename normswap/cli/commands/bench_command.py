"""`normswap bench`: how fast a network runs, as it is, folded and exported."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from normswap.cli.options import Device, Json, ModelOrFile, Opening, exported_file
from normswap.cli.progress import working
from normswap.cli.tables import facts, listing, show, size, table
from normswap.errors import NormswapError, OptionError
from normswap.models import kinds
from normswap.plan import Body

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from normswap.benchmarking.timing import Contender
    from normswap.exporting.exported_file import ExportedFile

KEYS = (
    "rows (form, runtime, batch, status: ok, wrong or failed, reason, verdict: MEASURED, WRONG or"
    " null, error, ms: the median, ms_low and ms_high: quartiles, images_per_s, speedup: over the"
    " first row), settings, notes"
)
EXAMPLES = ("bench demo demo.onnx", "bench resnet50 --batch-size 1,8")
_COLUMNS = ("form, runtime", "ms", "quartiles", "images/s", "x first", "error", "verdict")


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
    are compared first: one that is WRONG is reported, not timed. That proves nothing, since the
    images are noise, and the bounds wide enough for int8: `normswap verify FILE` proves.
    """
    batch_sizes = _batch_sizes(batch_size)

    # Open all that is timed, and time it at each batch size, on the same noise.
    with working(f"opening {model}") as progress:
        import torch

        from normswap.benchmarking import timing
        from normswap.models import devices

        torch_device = devices.find(device)
        threads = torch.get_num_threads()
        contenders, image_size, notes = _contenders(model, files or [], opening, torch_device)
        rows = []
        for batch in batch_sizes:
            images = torch.randn(batch, *image_size, generator=torch.Generator().manual_seed(0))
            rows += timing.run(
                contenders,
                images,
                device=torch_device,
                threads=threads,
                seconds=seconds,
                progress=progress,
            )

    settings = {"device": device, "threads": threads, "seconds": seconds, "size": image_size}
    body = {"rows": rows, "settings": settings, "notes": notes}
    next_command = ["export", *opening.words(model), "-o", "FILE.onnx"]
    if Path(model).suffix.lower() in kinds.EXPORTED:
        next_command = ["evaluate", model, "--data", "IMAGES"]
    show(body, json, partial(_print, model), *next_command)
    return 0


def _batch_sizes(text: str) -> list[int]:
    """Return the numbers of images that `--batch-size` asks for.

    Args:
        text: Whole numbers, separated by commas.

    Raises:
        OptionError: It is no list of whole numbers from 1 up.
    """
    numbers = [number.strip() for number in text.split(",")]
    if not all(number.isdecimal() and int(number) for number in numbers):
        why = "it is a list of whole numbers from 1 up"
        raise OptionError(f"--batch-size {text}", why, "For instance 1,8")
    return [int(number) for number in numbers]


def _contenders(
    model: str, files: list[str], opening: Opening, device: torch.device
) -> tuple[list[Contender], tuple[int, ...], list[str]]:
    """Open everything that is timed: the network, its folded copy, and exported files.

    Args:
        model: The argument MODEL of the command (a name, a hub id or a path), or an exported file.
        files: Exported files of the MODEL.
        opening: How the MODEL is opened.
        device: The device that the MODEL runs on. Files run where their runtimes do.

    Returns:
        The contenders, the size of an image without the batch, and notes for the user.
    """
    # If MODEL is itself an exported file, there is no network in PyTorch beside the files.
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
                f"{name} is no exported file",
                remedy="Name one network, and files that `export` made of it",
            )
        # All are timed on images of one size, that of the first. A file's `shape` is the number of
        # images at a time, and their size.
        image_size = image_size or file.shape[1]
        if image_size != file.shape[1]:
            what = f"{name} takes images of {size(file.shape[1])}"
            raise OptionError(what, f"{model} is timed on {size(image_size)}")
        contenders.append(_file_contender(file, network))
    return contenders, image_size, notes


def _file_contender(file: ExportedFile, network: nn.Module | None) -> Contender:
    """Return an exported file as a `Contender`, the form in which it is checked and timed.

    Args:
        file: The file.
        network: The source of the file. The file is to give the same answers. None if no source is
            timed beside it.
    """
    from normswap.benchmarking.timing import Contender

    # All contenders are given images as the source takes them. A file that normalizes by itself
    # takes pixels, and a file that ends with a softmax gives other answers than the source.
    contender = Contender(file.file.name, file.form.name, file.network(), precision=file.precision)
    if network is not None:
        request = file.request(network)
        contender.prepare = request.raw
        if request.settings.softmax:
            contender.expected = _log_probabilities
    return contender


def _log_probabilities(logits: Tensor) -> Tensor:
    """Return the answers that are expected of an exported file that ends with a softmax.

    They are logarithms of probabilities, because `exported_file` turns the probabilities that the
    file gives into their logarithms.

    Args:
        logits: The source's answers (N, classes), without a softmax.
    """
    return logits.log_softmax(-1)


def _input_size(name: str, network: nn.Module) -> tuple[int, ...]:
    """Return the size of one input, such as (3, 224, 224).

    Args:
        name: The MODEL, for the error.
        network: The network.

    Raises:
        OptionError: The network takes more than one tensor, or whole numbers.
    """
    from normswap.models import network_input

    # Random inputs are drawn only if the network's record states inputs that are no images. They
    # are the arguments of one call of the network.
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
    """Open a MODEL, and fold it.

    Args:
        name: The argument MODEL of a command: a name, a hub id, a path or a factory.
        opening: How it is opened.
        device: The device that it runs on.

    Returns:
        The network, then a list of contenders, then a list of notes. The contenders are the network
        and its folded copy. If it cannot be folded, there is no copy, and a note says why.
    """
    import torch

    from normswap import provenance
    from normswap.analysis import block_signals
    from normswap.surgery import conversion

    torch.manual_seed(0)
    model = opening.open(name, device=str(device))
    if opening.weights == "random":
        # In an untrained network, a last gamma of 0 may switch a residual branch off. A comparison
        # of outputs would not show a fault in such a branch, so all branches are switched on.
        model = block_signals.awake(model)

    # The last conversion names the network's form.
    scheme = "original"
    for step in provenance.of(model).plan.steps:
        scheme = step.scheme
    networks = {scheme: model}
    notes = []
    try:
        if scheme != "folded":
            networks["folded"] = conversion.convert(model, "folded").model
    except NormswapError as error:
        notes.append(f"{name} is not folded: {error}")

    contenders = [_network_contender(form, each, device) for form, each in networks.items()]
    return model, contenders, notes


def _network_contender(form: str, network: nn.Module, device: torch.device) -> Contender:
    """Return a network in PyTorch as a `Contender`, the form in which it is checked and timed.

    Args:
        form: The name of the network's scheme.
        network: The network.
        device: The device that it runs on.
    """
    from normswap.benchmarking.timing import Contender
    from normswap.models import calling
    from normswap.models.network_input import answer

    model = network.eval().to(device)
    call = calling.form(network)

    # The images are put into the arguments of the network's forward. Of its outputs, the answer is
    # compared.
    def run(images: Tensor) -> Tensor:
        return answer(call.of(images).call(model))

    def prepare(images: Tensor) -> Tensor:
        return images.to(device)

    return Contender(form, "torch", run, prepare=prepare)


def _print(model: str, body: Body) -> None:
    """Print the times of all contenders, in one table for each batch size."""
    settings = body["settings"]
    facts(("threads", settings["threads"]), ("device", settings["device"]))
    for batch, group in groupby(body["rows"], lambda row: row["batch"]):
        _print_batch(f"{model}, batch {batch} of {size(settings['size'])}", list(group))
    listing("note", body["notes"])


def _print_batch(title: str, rows: list[Body]) -> None:
    """Print the times that were measured at one batch size, and what was not timed, and why.

    Args:
        title: The title of the table.
        rows: The records of all contenders at this batch size.
    """
    timed = []
    untimed = []
    for row in rows:
        if row["status"] != "ok":
            untimed.append(f"{row['form']}: {row['verdict'] or row['status']}: {row['reason']}")
            continue

        cells = (
            f"{row['form']}, {row['runtime']}",
            f"{row['ms']:.2f}",
            f"{row['ms_low']:.2f} .. {row['ms_high']:.2f}",
            f"{row['images_per_s']:.1f}",
            f"{row['speedup']:.2f}",
            f"{row['error']:.0e}",
            row["verdict"] or "",
        )
        timed.append(cells)

    table(title, _COLUMNS, timed, right=_COLUMNS[1:-1])
    listing("not timed", untimed)
