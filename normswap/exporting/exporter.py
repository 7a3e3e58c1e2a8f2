"""`normswap.export`: one file that holds the folded network, proven in its own runtime before it gets its name."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normswap import provenance
from normswap.errors import OptionError
from normswap.exporting import (
    checks,
    export_folding,
    formats,
    input_normalization,
    quantizing,
    rounding,
    sidecar,
)
from normswap.exporting.checks import Figures
from normswap.exporting.exported_module import Shipped
from normswap.exporting.order import Order, accepted
from normswap.exporting.quantizing import Quantized, Wish
from normswap.models.calling import Inputs
from normswap.storage import atomic_write
from normswap.surgery.carrying_out import Conversion

DTYPES = {  # of the weights that go to the format's writer
    "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.float32,
}  # fmt: skip
Batches = Iterable[object] | Tensor
_ARITHMETIC = {"fp32": "fp32", "fp16": "fp16", "bf16": "fp32", "int8": "int8"}
_BF16 = "weights are stored in bf16, but for stem, projections and classifier; the arithmetic is fp32"


@dataclass(frozen=True)
class Exported:
    """A written file.

    Args:
        file: where it is; parts: further files that belong to it; sidecar: its preprocess.json.
        format, dtype: as asked for.
        input_size: (C, H, W), of the first input where there are several; dynamic_batch: whether the number of images
            at a time is free.
        figures: how far the file, in its runtime, is from the source.
        nodes: its operators, counted by kind; plain_nodes: those of an export without folding, if asked for.
        bytes: its size, with its parts.
        notes: what the user should know.
        seconds: what it all took.
        quantized: how, if it is int8.
    """

    file: Path
    parts: tuple[Path, ...]
    sidecar: Path
    format: str
    dtype: str
    input_size: tuple[int, ...]
    dynamic_batch: bool
    figures: Figures
    nodes: dict[str, int]
    plain_nodes: dict[str, int] | None
    bytes: int
    notes: tuple[str, ...]
    seconds: float
    quantized: Quantized | None = None


def export(
    model: nn.Module | Conversion,
    path: str | Path,
    *,
    inputs: Inputs = None,
    format: str | None = None,
    dtype: str = "fp32",
    dynamic_batch: bool = False,
    input_size: Sequence[int] | None = None,
    normalize: bool = False,
    softmax: bool = False,
    images: Batches | None = None,
    calibrate: Batches | None = None,
    per_channel: bool = True,
    weight_bits: int = formats.SAFE_BITS,
    sensitive: int = 0,
    max_drop: float | None = None,
    force: bool = False,
    count_plain: bool = False,
    say: Callable[[str], None] = lambda what: None,
) -> Exported:
    """Fold `model`, which is not changed, and write it as a file for another runtime, or as one with another beside it.

    The file is run in that runtime against `model` before it gets its name; FILE.preprocess.json, beside it, says what
    is to be done with an image first. Images come in and answers go out in float32, whatever `dtype` is.

    Args:
        inputs: what the network takes, as in `convert`. Then every tensor of it goes into the file by itself, and every
            tensor that the network gives comes out, under the names that dicts, records and the arguments of forward
            give them, and all of them are checked, on these inputs. Without, images go in, and one answer comes out, or
            all that a network gives that has none, such as boxes and their scores.
        format: onnx, openvino, pt2, torchscript or safetensors; by default what the ending of `path` says.
        dtype: fp32; fp16, for weights and arithmetic; bf16, for the weights but those of stem, projections and
            classifier, with arithmetic in fp32: in bf16 more than 1 answer in 1000 would change; int8, by the runtime's
            own quantizer, in the gauge that suits it (`equalization`).
        dynamic_batch: any number of images at a time, else one.
        input_size: (C, H, W); by default the size the network was made for.
        normalize: the file takes pixels in 0..1, and subtracts the mean and divides by std itself.
        softmax: the file answers with probabilities.
        images: batches to check on, (N, C, H, W) or (images, labels), preprocessed for `model`, at `input_size`; by
            default smooth noise. What int8 costs is measured on them, so there they have to be given. With `inputs`:
            batches of such inputs, by default those.
        calibrate: for int8: other batches, which set ranges, gauge and biases.
        per_channel: int8 weights have a step for each output channel, else one for all.
        weight_bits: of int8 weights: 7, the same on every CPU, or 8, for those that add products of bytes in 32 bits
            (x64 with VNNI, ARM with dot products).
        sensitive: so many layers, those that int8 costs most, stay in fp32.
        max_drop: points of top-1 (without labels: of agreement) that int8 may lose on `images`; None: any.
        force: replace a file that exists.
        count_plain: export `model` as it is, too, and count that file's nodes.
        say: called with what is going on.

    Raises:
        OptionError: an unknown format, a missing package, a size that the network rejects, ...
        OutputError: the file exists, or cannot be written.
        TraceError, RefusedError: the network cannot be folded, or the format cannot express it.
        VerificationError: the file computes something else than `model`, or loses more than it may. Nothing was
            written.
    """
    start = time.perf_counter()
    order = accepted(model, Path(path), format, dtype, dynamic_batch, input_size, normalize, softmax, inputs)
    claim(order.file, format, dtype, force=force)
    wish = _wish(order, calibrate, images, per_channel, weight_bits, sensitive, max_drop)
    beside = sidecar.place(order.file)
    order, made = order.answered()
    say("folding")
    network, notes = _prepare(order)
    body = _body(order, made)
    body["precision"] = {"weights": dtype, "arithmetic": _ARITHMETIC[dtype]}
    metadata = sidecar.metadata(order.source, body, dtype)
    found: dict[str, Any] = {}

    def write(aside: Path) -> None:
        say(f"exporting to {order.form.NAME}")
        form, x = order.form, order.traced_on
        if wish is None:
            form.write(network, x, aside, dynamic=order.dynamic_batch, metadata=metadata)
        else:
            assert isinstance(network, Shipped)
            found["quantized"] = quantizing.write(
                network, x[0], aside, form, wish, dynamic=order.dynamic_batch, metadata=metadata, say=say
            )
        say("checking")
        figures = found["figures"] = _check(order, form.open(aside), images)
        if wish is not None:
            lost = quantizing.demand(figures, wish.max_drop)
            measured = {**asdict(figures), "lost": lost}
            body["quantization"] = {**asdict(found["quantized"]), "measured": measured, "notes": notes}
        found["nodes"] = form.nodes(aside)
        sidecar.write(beside, body)

    atomic_write.whole(order.file, write, order.form.PARTS)
    plain = _plain_nodes(order, say) if count_plain else None
    parts = _parts(order.file, order.form)
    size = sum(each.stat().st_size for each in (order.file, *parts))
    return Exported(
        order.file, parts, beside, order.form.NAME, dtype, order.size, order.dynamic_batch, found["figures"],
        found["nodes"], plain, size, tuple(notes), time.perf_counter() - start, found.get("quantized"),
    )  # fmt: skip


def claim(file: Path, format: str | None, dtype: str = "fp32", *, force: bool) -> None:
    """See, before any work, that the file can be written.

    Raises:
        OptionError: the format or dtype is not known or do not go together, or a package is not installed.
        OutputError: the file, or its sidecar, exists, or its folder does not.
    """
    form = formats.choose(file, format)
    if dtype not in DTYPES:
        raise OptionError(f"unknown dtype '{dtype}'", f"there are {', '.join(DTYPES)}")
    if dtype == "int8":
        formats.quantizer(form.NAME)
    for each in (file, *_parts(file, form), sidecar.place(file)):
        atomic_write.claim(each, force=force)


def _parts(file: Path, form: formats.Format) -> tuple[Path, ...]:
    """Further files that belong to one of this format."""
    return tuple(file.with_suffix(ending) for ending in form.PARTS)


def _wish(
    order: Order,
    calibrate: Batches | None,
    images: Batches | None,
    per_channel: bool,
    weight_bits: int,
    sensitive: int,
    max_drop: float | None,
) -> Wish | None:
    """What is wanted of int8; None where something else is."""
    if order.dtype != "int8":
        if calibrate is not None or sensitive or max_drop is not None or weight_bits != formats.SAFE_BITS:
            raise OptionError(f"{order.dtype} is not calibrated", remedy="Choose int8, or leave its options out")
        return None
    if calibrate is None or images is None:
        what = "images to calibrate on" if calibrate is None else "other images to measure on"
        raise OptionError(f"int8 needs {what}", remedy="Give --calibrate DATA")
    if weight_bits not in formats.LEVELS:
        raise OptionError(f"weights of {weight_bits} bits", f"there are {' and '.join(map(str, formats.LEVELS))}")
    form = order.signature.form
    if form.kwargs or form.listed:
        raise OptionError("int8 is for networks that take images as one tensor, by position", "this one does not")
    batches = [order.raw(x) for x, _ in _pairs(calibrate)]
    if not batches:
        raise OptionError("no images to calibrate on")
    other = next((x for x in batches if tuple(x.shape[1:]) != order.size), None)
    if other is not None:
        each, given = (",".join(map(str, size)) for size in (order.size, other.shape[1:]))
        what, remedy = f"images to calibrate on are {given}", "Resize them, or give input_size"
        raise OptionError(what, f"the file takes {each}", remedy)
    return Wish(torch.cat(batches), per_channel, weight_bits, sensitive, max_drop)


def preprocessing(model: nn.Module) -> sidecar.Body:
    """The record by which images are made for `model`."""
    record = provenance.of(model)
    config = {**(record.pretrained_cfg if record else {}), **sidecar.config(model)}
    return config | {"num_classes": getattr(model, "num_classes", None)}


def _body(order: Order, made: Mapping[str, Tensor]) -> sidecar.Body:
    output = order.signature.outputs[0]
    images = sidecar.body(order.source, order.size, output, normalize=order.normalize, dynamic=order.dynamic_batch)
    if not order.inputs:
        return images
    plain = sidecar.plain_body(order.signature, order.traced_on, made, dynamic=order.dynamic_batch)
    return plain | ({name: images[name] for name in ("resize", "normalize")} if order.imaged else {})


def _plain_nodes(order: Order, say: Callable[[str], None]) -> dict[str, int] | None:
    if not order.form.GRAPH:
        return None
    say("exporting without folding")
    with tempfile.TemporaryDirectory(prefix="normswap-") as folder:
        file = Path(folder) / f"plain{order.file.suffix}"
        plain = Shipped(order.source, order.signature).eval()
        order.form.write(plain, order.traced_on, file, dynamic=order.dynamic_batch, metadata={})
        return dict(order.form.nodes(file))


def _prepare(order: Order) -> tuple[nn.Module, list[str]]:
    """What goes into the file, and what the user should know of it."""
    stored, dtype = DTYPES[order.dtype], DTYPES[_ARITHMETIC[order.dtype]]
    notes = [_BF16 if stored != dtype else "", order.form.NOTES.get(order.dtype, "")]
    if not order.form.GRAPH:
        network = export_folding.undressed(order.source, order.size, features=True)
        if stored != dtype:
            rounding.to_bfloat16_(network)
        return network.to(dtype), [note for note in notes if note]
    network = export_folding.undressed(order.source, order.size, inputs=list(order.inputs) or None)
    few = order.inputs[0] if order.inputs else order.signature.form.of(order.pictures(count=4))
    network = export_folding.streamlined(network, order.source, few, dtype)
    before = input_normalization.Before(None, None, "")
    if order.normalize:
        before = input_normalization.bake(network, *order.normalization)
    if stored != dtype:
        rounding.to_bfloat16_(network)
    shipped = Shipped(
        network, order.signature, dtype=dtype, stored=stored, scale=before.scale, shift=before.shift,
        softmax=order.softmax,
    )  # fmt: skip
    return shipped.eval().requires_grad_(False), [note for note in (before.note, *notes) if note]


def _check(order: Order, runs: formats.Runs, images: Batches | None) -> Figures:
    if order.inputs:
        described = "smooth noise, seed 0" if order.imaged and images is None else "given inputs"
        batches = _calls(order, images)
    else:
        described = "smooth noise, seed 0" if images is None else "given images"
        batches = _pairs(order.pictures() if images is None else images)
        batches = checks.split(batches, None if order.dynamic_batch else 1)
    return checks.check(
        order.source, runs, batches, order.signature, dtype=order.dtype, softmax=order.softmax, raw=order.raw,
        described=described,
    )  # fmt: skip


def _calls(order: Order, images: Batches | None) -> Iterator[checks.Batch]:
    """What goes into the file, call by call; a sample at a time where their number is not free."""
    for batch in order.inputs if images is None else images:
        example = order.signature.form.read(batch)[0].like(order.source)
        for one in [example] if order.dynamic_batch else example.each():
            yield tuple(one.tensors()), None


def _pairs(images: Batches) -> Iterator[tuple[Tensor, Tensor | None]]:
    for batch in [images] if isinstance(images, Tensor) else images:
        x, labels = batch if isinstance(batch, (tuple, list)) else (batch, None)
        yield x.float(), labels
