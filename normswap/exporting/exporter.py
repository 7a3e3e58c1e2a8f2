"""`normswap.export` writes the folded network as one file.

The file is run in its own runtime, against the network, before it gets its name.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from normswap import copying, schemes
from normswap.errors import OptionError, TraceError
from normswap.exporting import checks, formats, sidecar
from normswap.exporting.checks import Figures
from normswap.exporting.exported_module import FileContents, Shipped, correct_biases
from normswap.exporting.request import Batches, ExportRequest
from normswap.exporting.settings import FileOptions, FileSettings
from normswap.graph.anatomy import Anatomy
from normswap.layers import reparametrized
from normswap.models import calling, network_input
from normswap.models.calling import Inputs
from normswap.models.modes import full_precision
from normswap.models.preprocessing import assumption
from normswap.plan import Body, Step
from normswap.sites.site import site_of
from normswap.storage import atomic_write
from normswap.surgery import carrying_out, conversion
from normswap.surgery.carrying_out import Conversion
from normswap.surgery.network import Network

if TYPE_CHECKING:
    from typing_extensions import Unpack

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# The precision of the arithmetic, by the precision of the weights.
_ARITHMETIC = {"fp32": "fp32", "fp16": "fp16", "bf16": "fp32", "int8": "int8"}
_REMARKS = {"bf16": "weights are stored in bf16; the arithmetic is fp32"}


@dataclass(frozen=True)
class Exported:
    """A file that `export` wrote.

    Args:
        file: The file's path.
        parts: The paths of further files that belong to it, such as the .bin of an .xml.
        sidecar: The path of its preprocess.json.
        format: The name of the format, as it was asked for.
        dtype: The precision of the weights, as it was asked for.
        input_size: The size (C, H, W) of the input, or of the first of several inputs.
        dynamic_batch: Whether the file takes any number of images at a time.
        figures: How far the file, in its runtime, is from the source. None if this system has no
            such runtime.
        nodes: The number of its operators, by kind.
        bytes: Its size in bytes, with its parts.
        notes: Sentences that the user should read.
        seconds: The duration of the whole export.
        quantized: For int8, the number of images that it was calibrated on, and the bits of its
            weights. None for other precisions.
        noise_only: Whether it was checked on noise alone, as no images were given.
        inputs: The name, shape and type of each input, if it takes something else than images.
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

    The file is compared with `model` in that runtime before it gets its name. If this system has
    no such runtime (Core ML's is macOS's), the folded network is compared in PyTorch.
    FILE.preprocess.json, beside it, says how to prepare an image. Images and answers are in
    float32, whatever the file's precision.

    Args:
        model: The network, or the result of a conversion.
        path: The file to write. Its ending names the format, unless the option `format` does.
        inputs: The network's inputs, as in `convert`. Then the file takes and gives all tensors
            that the network takes and gives, under the names of dicts, records and forward's
            arguments, and is checked on these inputs. Without `inputs`, images go in and one answer
            comes out, or all outputs if none of them is the answer, such as boxes and scores.
        images: Batches that the file is checked on, (N, C, H, W) or (images, labels), preprocessed
            for `model`, at `input_size`. By default they are smooth noise. int8 needs images, as
            its cost is measured on them. With `inputs`, they are batches of such inputs, by
            default `inputs`.
        calibrate: For int8, other batches, which set the ranges.
        log: Called with the name of each step.
        options: The fields of `FileSettings`: format, dtype, dynamic_batch, input_size, normalize,
            softmax, weight_bits and force.

    Returns:
        The file, its sidecar, and how far it is from the source.

    Raises:
        OptionError: A format or an option is unknown, a package is missing, or the network rejects
            the size.
        OutputError: The file exists, or cannot be written.
        TraceError: The network's forward cannot be seen.
        RefusedError: The network cannot be folded, or the format cannot express it.
        VerificationError: The file computes something else than `model`. Nothing was written.
    """
    if unknown := sorted(options.keys() - FileOptions.__annotations__.keys()):
        raise OptionError(
            f"export has no option {', '.join(unknown)}",
            f"there are {', '.join(FileOptions.__annotations__)}",
        )

    # Check the request before any work, and find out what the network returns.
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
    # The folded network is checked by itself in float32. This is left out for a file in fp32 that
    # runs here, as the file will be held to the same tolerance.
    if dtype != "fp32" or not form.runs_here:
        batches, described = request.batches(None if form.runs_here else images)
        checks.check(
            request.reference(), network, batches, described=described, what="the folded network"
        )
    if dtype in HALVES:
        network = network.in_half(HALVES[dtype])

    notes = _notes(model, request)
    # `how` is None unless the file is in int8.
    quantized: Body = {}
    if how:
        correct_biases(network, how, halves=form.halves)
        quantized = {"calibrated_on": sum(map(len, how.images)), "weight_bits": how.weight_bits}

    body = _body(request, answers)
    metadata = sidecar.metadata(request.source, body, dtype)
    contents = FileContents(network, request.traced_on, settings.dynamic_batch, metadata)

    # Write the file under another name, check it, and write what was measured into its sidecar. The
    # files get their names only if no error was raised.
    figures = None
    parts = form.files(file)[1:]
    beside = formats.sidecar_of(file)
    noise_only = request.on_noise(images)
    with atomic_write.writing(file, [each.name for each in (*parts, beside)]) as aside:
        log(f"exporting to {form.name}")
        form.write(contents, aside, how)
        if form.runs_here:
            log("checking")
            figures = _checked(request, aside, images, rounded)
        if figures and figures.remark:
            notes = (*notes, figures.remark)
        # For int8, the sidecar also says how the file was quantized and what it costs.
        if quantized and figures:
            measured = {**asdict(figures), "lost": figures.points_lost}
            body["quantization"] = {**quantized, "measured": measured, "notes": notes}
        body["checked"] = (
            {**asdict(figures), "noise_only": noise_only} if figures else formats.NOT_RUN
        )
        nodes = form.functions.nodes(aside)
        sidecar.write(aside, body)

    # The sidecar of a file of images has no "inputs".
    named = body.get("inputs", ())
    return Exported(
        file=file,
        parts=parts,
        sidecar=beside,
        format=form.name,
        dtype=dtype,
        input_size=request.size,
        dynamic_batch=contents.dynamic,
        figures=figures,
        nodes=nodes,
        bytes=form.size(file),
        notes=notes,
        seconds=time.perf_counter() - start,
        quantized=quantized or None,
        noise_only=noise_only,
        inputs=tuple(f"{entry['name']} {entry['shape']} {entry['dtype']}" for entry in named),
    )


def _notes(model: nn.Module | Conversion, request: ExportRequest) -> tuple[str, ...]:
    """Return sentences on the file that the user should read, before it is written.

    What the check of the file finds is not among them.

    Args:
        model: The network, as the user gave it.
        request: The request for the file.
    """
    dtype = request.settings.dtype
    # Only images have a preprocessing. A note says which parts of it are assumed. A request without
    # `inputs` is for images.
    takes_images = request.imaged or not request.inputs
    assumed = assumption(request.source) if takes_images else ""
    of_format = request.form.notes.get(dtype)
    return tuple(filter(None, (_dtype_note(model, dtype), _REMARKS.get(dtype), of_format, assumed)))


def _checked(
    request: ExportRequest, file: Path, images: Batches | None, rounded: Shipped | None
) -> Figures:
    """Run a file that was just written, and return how far its outputs are from the network's.

    Args:
        request: The request that the file was written for.
        file: The path of the file.
        images: The user's images. With None, the file is checked on other inputs.
        rounded: The folded network with its numbers rounded to the file's precision. None unless
            the file is in half precision.

    Raises:
        VerificationError: The file computes something else than the source.
    """
    batches, described = request.batches(images)
    reference = replace(request.reference(rounded), unfolded=partial(unfolded, request))
    look = inside(request, file, rounded)
    return checks.check(
        reference,
        request.form.open(file),
        batches,
        dtype=request.settings.dtype,
        described=described,
        inside=look,
    )


@contextmanager
def unfolded(request: ExportRequest) -> Iterator[formats.Runs]:
    """Export the network without folding to a temporary file, for a `with` block.

    The file has the same format and is in fp32. A function that runs it in its runtime is yielded.

    Args:
        request: The request for the folded file.
    """
    source = _shipped(request, copying.duplicate(request.source, {}).eval())
    contents = FileContents(source, request.traced_on, request.settings.dynamic_batch)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / request.file.name
        request.form.write(contents, file, None)
        yield request.form.open(file)


def inside(request: ExportRequest, file: Path, rounded: Shipped | None) -> checks.Inside:
    """Return a function that prepares a network and its file to be compared layer by layer.

    It is called only if the layers are to be compared, as preparing takes time.

    Args:
        request: The request that the file was written for.
        file: The path of the file.
        rounded: The folded network with its numbers rounded to the file's precision. With None the
            network is folded anew.

    Returns:
        A function without arguments. It returns the folded network, and a function that runs the
        file and returns the values of all its layers. If the runtime does not show these values, it
        returns the bytes of the file in place of the second function.
    """

    def network_and_file() -> tuple[nn.Module, formats.Runs | bytes]:
        network = rounded or folded(request)
        # `form.inside` says whether the runtime shows the values of layers.
        if request.form.inside:
            return network.network, request.form.open(file, inside=True)
        return network.network, file.read_bytes()

    return network_and_file


def _dtype_note(model: object, dtype: str) -> str:
    """Return a note for the user if the file computes in another precision than the network.

    The note is "" if both are the same, and for any network in float32, since its user has chosen
    the precision of the file.

    Args:
        model: The network, as the user gave it.
        dtype: The precision of the file's weights.
    """
    own = calling.anchor(network_input.require_module(model)).dtype
    arithmetic = _ARITHMETIC[dtype]
    # `HALVES.get` gives the torch type of half precision, and None for any other.
    if own in (torch.float32, HALVES.get(arithmetic)):
        return ""
    return (
        f"the network is in {str(own).removeprefix('torch.')}, and the file computes in"
        f" {arithmetic}"
    )


def folded(request: ExportRequest) -> Shipped:
    """Fold the norms of a network, and return it in float32, as the file will hold it.

    The normalization of images and the softmax that the user asked for are added to it.

    Args:
        request: The request for the file, with the network.
    """
    return _shipped(request, fold_for_export(request.network))


def _shipped(request: ExportRequest, network: nn.Module) -> Shipped:
    """Return a module around a network that also normalizes the images and takes a softmax.

    The normalization, or the softmax, is left out if the user did not ask for it.

    Args:
        request: The request for the file, with the user's options.
        network: The network, folded or not.
    """
    settings = request.settings
    normalization = request.normalization if settings.normalize else None
    return Shipped(
        network, request.signature, normalization=normalization, softmax=settings.softmax
    )


def fold_for_export(network: Network) -> nn.Module:
    """Return a folded copy of the network's module, or a plain copy if nothing can be folded.

    The copy is verified as every conversion is. Unlike `convert --to folded`, it need not keep the
    features that the classifier reads, so the last norm's scale and shift move into the classifier.

    Raises:
        TraceError: The network's forward cannot be seen.
        RefusedError: The network cannot be folded.
        VerificationError: The copy computes something else.
    """
    model = network.module
    try:
        anatomy = _without_head(network.anatomy)
    except TraceError:
        # A network that cannot be seen goes into the file as it is, if there is nothing to fold.
        if any(
            site_of(module).is_affine or reparametrized.is_reparametrized(module)
            for module in nn.Module.modules(model)
        ):
            raise
        return copying.duplicate(model, {}).eval()

    if _has_nothing_to_fold(anatomy):
        return copying.duplicate(model, {}).eval()

    step, _ = conversion.plan_step(anatomy, "folded")
    result = carrying_out.carry_out(network, step)

    # The parallel branches of the folded network, as in RepVGG, are merged to one layer. The folded
    # network has to be recorded for this. So the source's record is asked first whether there are
    # branches to merge.
    merging = schemes.get("merged-branches")
    if merging.plan(anatomy).replacements:
        edits = merging.plan(result.network.anatomy).edits()
        result = carrying_out.carry_out(result.network, Step(merging.name, {}, edits))
    return result.model.eval()


def _without_head(anatomy: Anatomy) -> Anatomy:
    """Return a copy of a recorded network's anatomy that names no classifier and no `head` norm.

    The scheme `folded` keeps the features that the classifier reads, so it does not fold the norm
    before the classifier. With this copy it does, as it takes that norm for any other.

    Args:
        anatomy: The anatomy: what is known of the network's norms, blocks and classifier.
    """
    norms = tuple(
        replace(norm, role="other") if norm.role == "head" else norm for norm in anatomy.norms
    )
    return replace(anatomy, classifier=None, norms=norms)


def _has_nothing_to_fold(anatomy: Anatomy) -> bool:
    """Whether the scheme `folded` would change no layer of a network and would refuse none.

    Args:
        anatomy: The recorded network.
    """
    builder = schemes.get("folded").plan(anatomy)
    return not (builder.replacements or builder.linears or builder.refusals)


def _body(request: ExportRequest, answers: Mapping[str, Tensor]) -> Body:
    """Return the content of the sidecar, which says what goes into the file and what comes out.

    What the check of the file measures is added later.

    Args:
        request: The request for the file.
        answers: The outputs that the network gives for `request.traced_on`, by name.
    """
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

    # A file with all inputs and outputs of the network lists them. If its input is images, it also
    # says how they are prepared.
    tensors = sidecar.plain_body(signature, request.traced_on, answers, dynamic=dynamic)
    prepared = {name: images[name] for name in ("resize", "normalize") if request.imaged}
    return {**tensors, **prepared, "precision": precision}
