"""`normswap.export`: one file that holds the folded network, proven in its own runtime before it gets its name."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from normswap.errors import OptionError, OutputError
from normswap.exporting import (
    checks,
    export_folding,
    file_check,
    formats,
    quantizing,
    rounding,
    sidecar,
)
from normswap.exporting.checks import Figures
from normswap.exporting.exported_module import FileContents, Shipped
from normswap.exporting.quantizing import Calibration, Equalized, Quantized
from normswap.exporting.request import Batches, ExportRequest
from normswap.exporting.settings import FileOptions, FileSettings, Int8Settings
from normswap.exporting.signature import together
from normswap.graph import inspection
from normswap.graph.anatomy import Anatomy
from normswap.models.calling import Inputs
from normswap.models.modes import full_precision
from normswap.models.preprocessing import assumption
from normswap.plan import Body
from normswap.storage import atomic_write
from normswap.surgery.carrying_out import Conversion

if TYPE_CHECKING:
    from typing_extensions import Unpack

_STORED = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.float32}
_ARITHMETIC = {"fp32": "fp32", "fp16": "fp16", "bf16": "fp32", "int8": "int8"}
_BF16 = "weights are stored in bf16, but for stem, projections and classifier; the arithmetic is fp32"


@dataclass(frozen=True)
class Exported:
    """A written file.

    Args:
        file: where it is; parts: further files that belong to it; sidecar: its preprocess.json.
        format: the target's, as asked for; dtype: of the weights, likewise.
        input_size: (C, H, W), of the first input where there are several; dynamic_batch: whether the number of images
            at a time is free.
        figures: how far the file, in its runtime, is from the source; None where this system has no such runtime.
        nodes: its operators, counted by kind; plain_nodes: those of an export without folding, if asked for.
        bytes: its size, with its parts.
        notes: what the user should know.
        seconds: what it all took.
        quantized: how, if it is int8.
        noise_only: whether it was checked on noise alone, for want of images.
    """

    file: Path
    parts: tuple[Path, ...]
    sidecar: Path
    format: str
    dtype: str
    input_size: tuple[int, ...]
    dynamic_batch: bool
    figures: Figures | None
    nodes: dict[str, int]
    plain_nodes: dict[str, int] | None
    bytes: int
    notes: tuple[str, ...]
    seconds: float
    quantized: Quantized | None = None
    noise_only: bool = False


@full_precision()
def export(
    model: nn.Module | Conversion,
    path: str | Path,
    *,
    inputs: Inputs = None,
    images: Batches | None = None,
    calibrate: Batches | None = None,
    int8: Int8Settings | None = None,
    log: Callable[[str], None] = lambda line: None,
    **options: Unpack[FileOptions],
) -> Exported:
    """Fold `model`, which is not changed, and write it as a file for another runtime, or as one with another beside it.

    The file is run in that runtime against `model` before it gets its name (one that this system cannot run, Core ML's
    away from macOS, is not: there the folded network is, in PyTorch); FILE.preprocess.json, beside it, says what
    is to be done with an image first. Images come in and answers go out in float32, whatever its precision is.

    Args:
        inputs: what the network takes, as in `convert`. Then every tensor of it goes into the file by itself, and every
            tensor that the network gives comes out, under the names that dicts, records and the arguments of forward
            give them, and all of them are checked, on these inputs. Without, images go in, and one answer comes out, or
            all that a network gives that has none, such as boxes and their scores.
        images: batches to check on, (N, C, H, W) or (images, labels), preprocessed for `model`, at `input_size`; by
            default smooth noise. The cost of int8 is measured on them, so there they have to be given. With `inputs`:
            batches of such inputs, by default those.
        calibrate: for int8: other batches, which set ranges, equalization and biases.
        int8: for int8: how it is quantized.
        log: called with what is going on.
        options: of `FileSettings`: format, dtype, dynamic_batch, input_size, normalize, softmax, force, count_plain.

    Returns:
        The file, its sidecar, and how far it is from the source.

    Raises:
        OptionError: an unknown format, a missing package, a size that the network rejects, ...
        OutputError: the file exists, or cannot be written.
        TraceError, RefusedError: the network cannot be folded, or the format cannot express it.
        VerificationError: the file computes something else than `model`, or loses more than it may. Nothing was
            written.
    """
    if unknown := sorted(options.keys() - FileOptions.__annotations__.keys()):
        raise OptionError(
            f"export has no option {', '.join(unknown)}", f"there are {', '.join(FileOptions.__annotations__)}"
        )
    start, settings = time.perf_counter(), FileSettings(**options)
    request = ExportRequest.of(model, Path(path), inputs, settings)
    check_writable(request.file, settings)
    calibration = Calibration.of(request, calibrate, images, int8)
    request, answers = request.answered()
    log("folding")
    runs = formats.runs_here(request.form.NAME)
    prepared = _prepared(request, calibration, None if runs else images, log)
    body = _body(request, answers)
    metadata = sidecar.metadata(request.source, body, settings.dtype)
    contents = FileContents(prepared.network, request.traced_on, request.settings.dynamic_batch, metadata)
    form, file, parts = request.form, request.file, _parts(request.file, request.form)
    beside, quantized = sidecar.place(file), None
    with atomic_write.writing(file, [each.name for each in (*parts, beside)]) as aside:
        log(f"exporting to {form.NAME}")
        if calibration and prepared.equalized:
            quantized = quantizing.write(contents, aside, prepared.equalized, calibration, log)
        else:
            form.write(contents, aside)
        figures = _run(aside, request, prepared, images, log) if runs else None
        if calibration and quantized and figures:
            lost = quantizing.check_drop(figures, calibration.settings.max_drop)
            measured = {**asdict(figures), "lost": lost}
            body["quantization"] = {**asdict(quantized), "measured": measured, "notes": prepared.notes}
        noise_only = request.on_noise(images)
        for tool, builder in formats.builders(form.NAME).items():
            body[tool] = builder.build(file, contents, settings.dtype)
        body["checked"] = {**asdict(figures), "noise_only": noise_only} if figures else formats.NOT_RUN
        nodes = form.nodes(aside)
        sidecar.write(aside, body)
    plain = _plain_nodes(request, log) if settings.count_plain else None
    return Exported(
        file, parts, beside, form.NAME, settings.dtype, request.size, contents.dynamic, figures, nodes, plain,
        formats.size(file, form), prepared.notes, time.perf_counter() - start, quantized, noise_only,
    )  # fmt: skip


def _run(
    file: Path, request: ExportRequest, prepared: _Prepared, images: Batches | None, log: Callable[[str], None]
) -> Figures:
    """Run the file in its runtime against the source.

    Raises:
        VerificationError: it computes something else.
    """
    batches, described = request.batches(images)
    reference, batches = request.reference(prepared.rounded), _announced(batches, images, log)
    return checks.check(reference, request.form.open(file), batches, dtype=request.settings.dtype, described=described)


def check_writable(file: Path, settings: FileSettings) -> None:
    """See, before any work, that the file can be written.

    Raises:
        OptionError: the format or dtype is not known or do not go together, or a package is not installed.
        OutputError: the file, or its sidecar, exists, or its folder does not; or a part belongs to another file.
    """
    file_check.check(file, settings)
    form = formats.choose(file, settings.format)
    if settings.dtype == "int8":
        formats.quantizer(form.NAME)
    for part in _parts(file, form):
        if other := formats.owner(part, form):
            raise OutputError(f"{part} belongs to {other}", remedy=f"Give {file.name} another name")
    for each in (*_parts(file, form), sidecar.place(file)):
        atomic_write.check_writable(each, force=settings.force)


def _parts(file: Path, form: formats.Format) -> tuple[Path, ...]:
    """Further files that belong to one of this format."""
    return tuple(file.with_suffix(ending) for ending in form.PARTS)


@dataclass(frozen=True)
class _Prepared:
    """The network that goes into the file.

    Args:
        network: of its precision, but for int8: as it is before it is quantized.
        rounded: for half precision: what rounding alone makes of it.
        equalized: for int8: how it became what it is.
        notes: what the user should know.
    """

    network: Shipped
    rounded: Shipped | None
    equalized: Equalized | None
    notes: tuple[str, ...]


def _prepared(
    request: ExportRequest, calibration: Calibration | None, images: Batches | None, log: Callable[[str], None]
) -> _Prepared:
    """The network that goes into the file.

    All that is to leave its function as it is comes before the proof; after it numbers are rounded, and nothing else is
    done.

    Args:
        images: that the proof is on, if there are any, where the file itself cannot be run.
    """
    dtype = request.settings.dtype
    network, anatomy = folded(request)
    equalized = None
    if calibration is not None:
        log("choosing the equalization")
        equalized = Equalized.of(network, calibration)
        network, images = equalized.network, calibration.images
    if dtype != "fp32" or not formats.runs_here(request.form.NAME):  # others are held to the same themselves
        batches, described = request.batches(images)
        checks.check(request.reference(), network, batches, described=described, what="the folded network")
    nearest = rounded(network, dtype) if dtype in ("fp16", "bf16") else None
    if dtype == "fp16":
        network = network.half()
    if dtype == "bf16":
        rounding.to_bfloat16_(network.network, anatomy)
        network.stored = torch.bfloat16
    assumed = assumption(request.source) if request.form.GRAPH else ""
    notes = (_BF16 if dtype == "bf16" else "", request.form.NOTES.get(dtype, ""), assumed)
    return _Prepared(network, nearest, equalized, tuple(filter(None, notes)))


def rounded(network: Shipped, dtype: str) -> Shipped:
    """A folded network whose numbers are rounded to half precision: what that costs by itself."""
    return network.around(rounding.to_nearest(network.network, _STORED[dtype]))


def folded(request: ExportRequest) -> tuple[Shipped, Callable[[], Anatomy]]:
    """Fold the network, and put what the user wants before and after it, in float32.

    Returns:
        The network of the file, and how to look at the one inside.
    """
    settings = request.settings
    inner = export_folding.fold_for_export(
        request.source, request.size, features=not request.form.GRAPH, inputs=list(request.inputs) or None
    )
    anatomy = functools.cache(functools.partial(inspection.inspect, inner, [request.example]))
    network = inner
    if request.form.GRAPH:
        arithmetic = _STORED[_ARITHMETIC[settings.dtype]]
        network = export_folding.streamlined(inner, anatomy, request.source, request.example, arithmetic)
    normalization = request.normalization if settings.normalize else None
    return Shipped(network, request.signature, normalization=normalization, softmax=settings.softmax), anatomy


def _body(request: ExportRequest, answers: Mapping[str, Tensor]) -> Body:
    """The record that is written beside the file."""
    settings, signature = request.settings, request.signature
    dynamic = settings.dynamic_batch
    images = sidecar.body(
        request.source, request.size, signature.outputs[0], normalize=settings.normalize, dynamic=dynamic
    )  # fmt: skip
    precision = {"weights": settings.dtype, "arithmetic": _ARITHMETIC[settings.dtype]}
    if not request.inputs:
        return {**images, "precision": precision}
    plain = sidecar.plain_body(signature, request.traced_on, answers, dynamic=dynamic)
    known = {name: images[name] for name in ("resize", "normalize")} if request.imaged else {}
    return {**plain, **known, "precision": precision}


def _announced(
    batches: Iterable[checks.Batch], images: Batches | None, log: Callable[[str], None]
) -> Iterator[checks.Batch]:
    """The same; after the first of them the log says how long all will take, where their number is known."""
    count, start = getattr(images, "count", None), time.perf_counter()
    many = f" on {count} images" if isinstance(count, int) else ""
    log(f"checking{many}")
    seen = 0
    for batch in batches:
        if many and seen and isinstance(count, int):
            seconds = (time.perf_counter() - start) / seen * count
            log(f"checking{many}, about {seconds:.0f} s")
            many = ""
        seen += len(together(batch[0])[0])
        yield batch


def _plain_nodes(request: ExportRequest, log: Callable[[str], None]) -> dict[str, int] | None:
    if not request.form.GRAPH:
        return None
    log("exporting without folding")
    with tempfile.TemporaryDirectory(prefix="normswap-") as folder:
        file = Path(folder) / f"plain{request.file.suffix}"
        plain = Shipped(request.source, request.signature)
        request.form.write(FileContents(plain, request.traced_on, request.settings.dynamic_batch), file)
        return dict(request.form.nodes(file))
