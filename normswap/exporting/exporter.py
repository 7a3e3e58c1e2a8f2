"""`normswap.export`: one file that holds the folded network, proven in its own runtime before it
gets its name.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from normswap import schemes
from normswap.errors import OptionError, TraceError
from normswap.exporting import checks, formats, sidecar
from normswap.exporting.checks import Figures
from normswap.exporting.exported_module import FileContents, Shipped, correct_biases
from normswap.exporting.request import Batches, ExportRequest
from normswap.exporting.settings import FileOptions, FileSettings
from normswap.layers import affine, reparametrized
from normswap.models import calling, network_input
from normswap.models.calling import Inputs
from normswap.models.modes import full_precision
from normswap.models.preprocessing import assumption
from normswap.plan import Body, Step
from normswap.storage import atomic_write
from normswap.surgery import carrying_out, conversion
from normswap.surgery.carrying_out import Conversion
from normswap.surgery.network import Network

if TYPE_CHECKING:
    from typing_extensions import Unpack

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_ARITHMETIC = {"fp32": "fp32", "fp16": "fp16", "bf16": "fp32", "int8": "int8"}
_REMARKS = {"bf16": "weights are stored in bf16; the arithmetic is fp32"}


@dataclass(frozen=True)
class Exported:
    """A written file.

    Args:
        file: where it is; parts: further files that belong to it; sidecar: its preprocess.json.
        format: the target's, as asked for; dtype: of the weights, likewise.
        input_size: (C, H, W), of the first input where there are several; dynamic_batch: whether
            the number of images at a time is free.
        figures: how far the file, in its runtime, is from the source; None where this system has no
            such runtime.
        nodes: its operators, counted by kind; bytes: its size, with its parts; seconds: what it all
            took.
        notes: what the user should know.
        quantized: of int8, on how many images it was calibrated, and the bits of its weights.
        noise_only: whether it was checked on noise alone, for want of images.
        inputs: name, shape and type of each input, where it takes something else than images.
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
    bytes: int
    notes: tuple[str, ...]
    seconds: float
    quantized: Body | None = None
    noise_only: bool = False
    inputs: tuple[str, ...] = ()


@full_precision()
def export(
    model: nn.Module | Conversion,
    path: str | Path,
    *,
    inputs: Inputs = None,
    images: Batches | None = None,
    calibrate: Batches | None = None,
    log: Callable[[str], None] = lambda line: None,
    **options: Unpack[FileOptions],
) -> Exported:
    """Fold `model`, which is not changed, and write it as a file for another runtime.

    The file is compared with `model` in that runtime before it gets its name. Where this system has
    no such runtime (Core ML's is macOS's), the folded network is compared in PyTorch.
    FILE.preprocess.json, beside it, says how to prepare an image. Images and answers are in
    float32, whatever the file's precision.

    Args:
        inputs: what the network takes, as in `convert`. Then all tensors that it takes and gives
            are the file's, under the names of dicts, records and forward's arguments, and are
            checked on these inputs. Without `inputs`, images go in and one answer comes out, or all
            outputs where none is the answer, such as boxes and scores.
        images: batches to check on, (N, C, H, W) or (images, labels), preprocessed for `model`, at
            `input_size`; by default smooth noise. int8 needs them, as its cost is measured on them.
            With `inputs`: batches of such inputs, by default `inputs`.
        calibrate: for int8: other batches, which set the ranges.
        log: called with the name of each step.
        options: of `FileSettings`: format, dtype, dynamic_batch, input_size, normalize, softmax,
            weight_bits, force.

    Returns:
        The file, its sidecar, and how far it is from the source.

    Raises:
        OptionError: an unknown format, a missing package, a size that the network rejects, ...
        OutputError: the file exists, or cannot be written.
        TraceError, RefusedError: the network cannot be folded, or the format cannot express it.
        VerificationError: the file computes something else than `model`. Nothing was written.
    """
    if unknown := sorted(options.keys() - FileOptions.__annotations__.keys()):
        raise OptionError(
            f"export has no option {', '.join(unknown)}",
            f"there are {', '.join(FileOptions.__annotations__)}",
        )
    start = time.perf_counter()
    settings = FileSettings(**options)
    file = Path(path)
    form = formats.check(file, settings)
    dtype = settings.dtype
    request = ExportRequest.of(model, file, form, inputs, settings)
    how = request.quantization(calibrate, images)
    request, answers = request.answered()
    log("folding")
    network = folded(request)
    rounded = network.rounded(HALVES[dtype]) if dtype in HALVES else None
    # A file in fp32 that runs here is itself held to the tolerance of the folded network.
    if dtype != "fp32" or not form.runs_here:
        batches, described = request.batches(None if form.runs_here else images)
        checks.check(
            request.reference(), network, batches, described=described, what="the folded network"
        )
    if dtype in HALVES:
        network = network.in_half(HALVES[dtype])
    assumed = "" if request.inputs and not request.imaged else assumption(request.source)
    notes = tuple(
        filter(None, (_cast(model, dtype), _REMARKS.get(dtype), form.notes.get(dtype), assumed))
    )
    quantized: Body = {}
    if how:
        correct_biases(network, how, halves=form.halves)
        quantized = {"calibrated_on": sum(map(len, how.images)), "weight_bits": how.weight_bits}
    body = _body(request, answers)
    metadata = sidecar.metadata(request.source, body, dtype)
    contents = FileContents(network, request.traced_on, settings.dynamic_batch, metadata)
    figures = None
    parts = form.files(file)[1:]
    beside = formats.sidecar_of(file)
    noise_only = request.on_noise(images)
    with atomic_write.writing(file, [each.name for each in (*parts, beside)]) as aside:
        log(f"exporting to {form.name}")
        form.write(contents, aside, how)
        if form.runs_here:
            log("checking")
            batches, described = request.batches(images)
            reference = request.reference(rounded)
            look = inside(request, aside, rounded)
            figures = checks.check(
                reference, form.open(aside), batches, dtype=dtype, described=described, inside=look
            )
        if quantized and figures:
            measured = {**asdict(figures), "lost": figures.points_lost}
            body["quantization"] = {**quantized, "measured": measured, "notes": notes}
        body["checked"] = (
            {**asdict(figures), "noise_only": noise_only} if figures else formats.NOT_RUN
        )
        nodes = form.functions.nodes(aside)
        sidecar.write(aside, body)
    return Exported(
        file,
        parts,
        beside,
        form.name,
        dtype,
        request.size,
        contents.dynamic,
        figures,
        nodes,
        form.size(file),
        notes,
        time.perf_counter() - start,
        quantized or None,
        noise_only,
        tuple(
            f"{entry['name']} {entry['shape']} {entry['dtype']}" for entry in body.get("inputs", ())
        ),
    )


def inside(request: ExportRequest, file: Path, rounded: Shipped | None) -> checks.Inside:
    """The folded network, rounded as the file is, and all that the file computes, or its bytes
    where nobody sees it.
    """
    content = (
        partial(request.form.open, file, inside=True) if request.form.inside else file.read_bytes
    )
    return lambda: ((rounded or folded(request)).network, content())


def _cast(model: object, dtype: str) -> str:
    """A note where the network has another precision than the file computes in."""
    own = calling.anchor(network_input.require_module(model)).dtype
    arithmetic = _ARITHMETIC[dtype]
    if own in (torch.float32, HALVES.get(arithmetic)):
        return ""
    return (
        f"the network is in {str(own).removeprefix('torch.')}, and the file computes in"
        f" {arithmetic}"
    )


def folded(request: ExportRequest) -> Shipped:
    """Fold the network, with normalization and softmax as requested, in float32."""
    settings = request.settings
    network = fold_for_export(request.network)
    normalization = request.normalization if settings.normalize else None
    return Shipped(
        network, request.signature, normalization=normalization, softmax=settings.softmax
    )


def fold_for_export(network: Network) -> nn.Module:
    """A folded copy of its module, verified as every conversion is; a plain copy where there is
    nothing to fold.

    Unlike `convert --to folded`, it need not keep the features that the classifier reads, so the
    last norm's scale and shift move into the classifier.

    Raises TraceError, RefusedError: it cannot be folded; VerificationError: the copy computes
    something else.
    """
    model = network.module
    try:
        anatomy = network.anatomy
        norms = tuple(
            replace(norm, role="other") if norm.role == "head" else norm for norm in anatomy.norms
        )
        anatomy = replace(anatomy, classifier=None, norms=norms)
    except TraceError:
        if any(
            affine.is_affine(module) or reparametrized.is_reparametrized(module)
            for module in model.modules()
        ):
            raise
        return copy.deepcopy(model).eval()
    builder = schemes.get("folded").plan(anatomy)
    if not (builder.replacements or builder.linears or builder.refusals):
        return copy.deepcopy(model).eval()
    result = carrying_out.carry_out(network, conversion.plan_step(anatomy, "folded")[0])
    merging = schemes.get("merged-branches")
    if merging.plan(anatomy).replacements:
        edits = merging.plan(result.network.anatomy).edits()
        result = carrying_out.carry_out(result.network, Step(merging.name, {}, edits))
    return result.model.eval()


def _body(request: ExportRequest, answers: Mapping[str, Tensor]) -> Body:
    settings = request.settings
    signature = request.signature
    dynamic = settings.dynamic_batch
    images = sidecar.body(
        request.source,
        request.size,
        signature.outputs[0],
        normalize=settings.normalize,
        dynamic=dynamic,
    )
    precision = {"weights": settings.dtype, "arithmetic": _ARITHMETIC[settings.dtype]}
    if not request.inputs:
        return {**images, "precision": precision}
    plain = sidecar.plain_body(signature, request.traced_on, answers, dynamic=dynamic)
    prepared = {name: images[name] for name in ("resize", "normalize") if request.imaged}
    return {**plain, **prepared, "precision": precision}
