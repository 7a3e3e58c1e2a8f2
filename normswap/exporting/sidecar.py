"""The sidecar of an exported file, FILE.preprocess.json: how to prepare its inputs.

The file's metadata has a copy. The sidecar's name contains the whole name of the file, because two
exports in one folder may need different preprocessing.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import timm
import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator
from torch import Tensor, nn

from normswap import provenance, reading
from normswap.errors import SourceError
from normswap.exporting.formats import sidecar_of
from normswap.exporting.signature import INPUT, Signature
from normswap.models import hub, preprocessing, zoo
from normswap.models.records import (
    Deviations,
    ImageRecord,
    Interpolation,
    Means,
    Names,
    Side,
    Word,
    class_names,
)
from normswap.plan import Body
from normswap.version import __version__

_REMEDY = "Remove it, and what the file itself says holds; or export the network again"


class _SidecarPart(BaseModel):
    """The base class of the records in a sidecar, the JSON file beside an exported file.

    pydantic refuses a record with unknown keys, or with values of other types.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class ImageInput(_SidecarPart):
    """The images that an exported file takes, as its sidecar describes them.

    Args:
        name: The name of the input in the file.
        dtype: The type of the numbers.
        layout: The order of the dimensions: NCHW.
        batch: The number of images at a time. None if any number is taken.
        size: The size of an image, (C, H, W).
        channels: The meaning of the channels: RGB, or L for one of brightness. None if it is not
            known.
        range: The least and the largest number of a pixel, before it is normalized.
    """

    name: Word
    dtype: Word
    layout: Word
    batch: Side | None
    size: Annotated[list[Side], Field(min_length=3, max_length=3)]
    channels: Word | None
    range: tuple[float, float]


class Resizing(_SidecarPart):
    """How an image is resized and cropped before it goes into an exported file.

    Args:
        to: Height and width to which the image is resized, before it is cropped. With the crop_mode
            squash it gets this shape. With the others it keeps its proportions: it covers this
            rectangle (center) or fits into it (border).
        crop_pct: The share of this height and width that the crop keeps.
        crop_mode: The way of cropping, by timm's name: center, squash or border.
        interpolation: The way of resizing, by timm's name, such as bicubic.
    """

    to: Annotated[list[Side], Field(min_length=2, max_length=2)]
    crop_pct: Annotated[float, Field(ge=0.05, le=10)] | None = None
    crop_mode: Word | None = None
    interpolation: Interpolation | None = None


class Normalization(_SidecarPart):
    """The numbers by which pixels in 0..1 are normalized.

    Args:
        mean: The mean of each channel, which is subtracted.
        std: The deviation of each channel, by which pixels are then divided.
    """

    mean: Means
    std: Deviations

    @model_validator(mode="after")
    def _has_one_of_each(self) -> Normalization:
        if len(self.mean) != len(self.std):
            raise ValueError("mean and std have different lengths")
        return self


class Answer(_SidecarPart):
    """The answer that an exported file gives, and what its numbers mean.

    Args:
        name: The name of the output in the file.
        dtype: The type of the numbers.
        labels: The names of the classes, in order. None if they are not known.
    """

    name: Word
    dtype: Word
    labels: Names | None


class NamedTensor(_SidecarPart):
    """One of several inputs or outputs of an exported file.

    Args:
        name: Its name in the file.
        dtype: The type of its numbers, such as float32.
        shape: Its shape. The first number is None if the file takes any number of samples.
    """

    name: Word
    dtype: Word
    shape: Annotated[list[Side | None], Field(max_length=8)]


class CheckedFigures(BaseModel):
    """How far the answers of an exported file were from its network's when it was checked.

    Args:
        relative_l2: The relative L2 distance of the file's answers from the network's.
        tolerance: The distance that was allowed.
        inputs: What the file was checked on, in words.
        count: The number of inputs.
        answers: The number of answers that `agreement` is a fraction of.
        unit: The name of the things that have an answer each: images, pixels, voxels ...
        agreement: The share of equal answers. None if the answers are no classes.
        top1: The file's top-1 accuracy, in percent. None without labels.
        source_top1: The network's top-1 accuracy, in percent. None without labels.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)
    relative_l2: float
    tolerance: float
    inputs: Word
    count: int
    answers: int
    unit: Word
    agreement: float | None
    top1: float | None
    source_top1: float | None

    @model_validator(mode="after")
    def _has_both_accuracies(self) -> CheckedFigures:
        if (self.top1 is None) != (self.source_top1 is None):
            raise ValueError("top1 stands without source_top1")
        return self


class SidecarOfImages(_SidecarPart):
    """The sidecar of a file that takes images and gives one answer.

    Args:
        input: The images that the file takes.
        resize: How an image gets its size.
        normalize: How pixels are normalized. None if the file does this itself.
        assumed: The names of values above that the network does not state, such as `mean`. Usual
            values take their place.
        output: The answer that the file gives.
        precision: The types in which the file stores weights and computes.
        checked: How far the file was from its network. A text instead says why it was not checked.
        quantization: How the file was quantized. None for a file that was not.
    """

    input: ImageInput
    resize: Resizing
    normalize: Normalization | None
    assumed: Annotated[list[Word], Field(max_length=100)]
    output: Answer
    precision: dict[str, Word] = {}
    checked: CheckedFigures | Word | None = None
    quantization: Body | None = None


class SidecarOfTensors(_SidecarPart):
    """The sidecar of a file that has several inputs or outputs, or inputs that are no images.

    Args:
        inputs: The inputs, in the file's order.
        outputs: The outputs, in the file's order.
        resize: How an image gets its size. None if the inputs are no images.
        normalize: How pixels are normalized. None if the file does this itself, or the inputs are
            no images.
        precision: The types in which the file stores weights and computes.
        checked: How far the file was from its network. A text instead says why it was not checked.
        quantization: How the file was quantized. None for a file that was not.
    """

    inputs: Annotated[list[NamedTensor], Field(min_length=1, max_length=1000)]
    outputs: Annotated[list[NamedTensor], Field(max_length=1000)]
    resize: Resizing | None = None
    normalize: Normalization | None = None
    precision: dict[str, Word] = {}
    checked: CheckedFigures | Word | None = None
    quantization: Body | None = None


def config(model: nn.Module) -> Body:
    """Return timm's preprocessing record of a network.

    The record has input_size, mean, std, interpolation, crop_pct and crop_mode.
    """
    data_config = zoo.data_config(model)
    # timm does not record how many channels a network was made for. If the network has no record of
    # its own, its first convolution tells it.
    if not provenance.of(model).pretrained_cfg:
        stem = next((m for m in nn.Module.modules(model) if isinstance(m, nn.Conv2d)), None)
        if stem is not None:
            data_config["input_size"] = (stem.in_channels, *tuple(data_config["input_size"])[1:])
    return data_config


def body(
    model: nn.Module, size: tuple[int, ...], output: str, *, normalize: bool, dynamic: bool
) -> Body:
    """Return the sidecar of an exported file that takes images and gives one answer.

    It says how to prepare an image for the file, and what the numbers of the answer mean.

    Args:
        model: The network inside the file.
        size: The size (C, H, W) of the images that the file takes.
        output: The name of the answer in the file, such as `logits`.
        normalize: Whether the file normalizes images itself.
        dynamic: Whether the file takes any number of images at a time.
    """
    # What the network's record states, and the usual values for what it does not state.
    stated = config(model)
    # A network that the user built with timm has timm's record alone.
    record = provenance.of(model).pretrained_cfg or hub.unlicensed_record(model)

    # The crop keeps the share `crop_pct` of each side. So an image is first resized to the file's
    # size divided by `crop_pct`.
    crop = {key: stated[key] for key in ("crop_pct", "crop_mode", "interpolation") if key in stated}
    return {
        "input": {
            "name": INPUT,
            "dtype": "float32",
            "layout": "NCHW",
            "batch": None if dynamic else 1,
            "size": list(size),
            "channels": {1: "L", 3: "RGB"}.get(size[0]),
            "range": [0.0, 1.0],
        },
        "resize": {"to": [math.floor(side / stated["crop_pct"]) for side in size[1:]], **crop},
        "normalize": (
            None if normalize else {"mean": list(stated["mean"]), "std": list(stated["std"])}
        ),
        # The names of values, such as "mean", that the network's record does not state. Above stand
        # usual values in their place.
        "assumed": list(preprocessing.assumed(model)),
        "output": {"name": output, "dtype": "float32", "labels": class_names(record)},
    }


def plain_body(
    signature: Signature, tensors: Sequence[Tensor], answers: Mapping[str, Tensor], *, dynamic: bool
) -> Body:
    """Return the sidecar of a file that takes and gives all tensors of a network.

    It lists the name, type and shape of each input and output.

    Args:
        signature: The names of the inputs.
        tensors: The inputs that the network was traced on.
        answers: The outputs for them, by name.
        dynamic: Whether the file takes any number of samples.
    """

    def described(name: str, tensor: Tensor) -> Body:
        # The first side is the number of samples. None says that any number is taken.
        shape = [None if dynamic and not i else side for i, side in enumerate(tensor.shape)]
        return {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": shape}

    return {
        "inputs": [
            described(name, tensor) for name, tensor in zip(signature.inputs, tensors, strict=True)
        ],
        "outputs": [described(name, tensor) for name, tensor in answers.items()],
    }


def metadata(model: nn.Module, body: Body, dtype: str) -> dict[str, str]:
    """Return the texts that are written into an exported file as its metadata, by their keys.

    They say which network the file was made from, and with which versions. Lists and records are
    written as JSON.

    Args:
        model: The network inside the file.
        body: The sidecar.
        dtype: The precision of the weights.
    """
    record = provenance.of(model)
    return {
        "source": record.source,
        "sha256": record.sha256 or "",
        "architecture": getattr(record.arch, "name", type(model).__name__),
        "dtype": dtype,
        "labels": json.dumps(body.get("output", {}).get("labels")),
        "preprocess": json.dumps(body),
        "versions": json.dumps(
            {"normswap": __version__, "torch": torch.__version__, "timm": timm.__version__}
        ),
    }


def write(file: Path, body: Body) -> None:
    """Write the sidecar of an exported file, a JSON file beside it.

    Args:
        file: The path of the exported file.
        body: The content of the sidecar.
    """
    sidecar_of(file).write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def body_of(file: Path, noted: Mapping[str, str]) -> Body:
    """Return the content of an exported file's sidecar, the JSON file beside it.

    It says how the file's inputs are prepared. It is empty if `export` did not write the file.

    Args:
        file: The exported file. Its sidecar lies beside it.
        noted: The file's metadata, in which `export` leaves a copy of the sidecar.

    Raises:
        SourceError: The sidecar cannot be read, or was changed since it was written.
    """
    # Without a sidecar beside the file, the copy inside is used.
    inside = _copy_inside(noted)
    path = sidecar_of(file)
    if not path.exists():
        if inside:
            _check(inside, f"{file}: the sidecar in it")
        return inside

    try:
        beside: Body = reading.parse_object(reading.file_text(path))
    except reading.UnreadableError as error:
        raise SourceError(f"{path} cannot be read", str(error), _REMEDY) from None
    _check(beside, str(path))

    # Only the keys of the copy inside the file are compared. The sidecar beside the file has more
    # keys: what was measured.
    for key, value in inside.items():
        if beside.get(key) != value:
            why = f"{key} is not what {file.name} says by itself"
            raise SourceError(f"{path} was changed", why, _REMEDY)
    return beside


def _copy_inside(noted: Mapping[str, str]) -> Body:
    """Return the copy of the sidecar that `export` leaves in the metadata of a file.

    It is empty if another program wrote the metadata.

    Args:
        noted: The metadata: texts by their keys.
    """
    text = noted.get("preprocess")
    if not isinstance(text, str):
        return {}
    try:
        body: Body = reading.parse_object(text)
    except reading.UnreadableError:
        return {}
    # Every sidecar has one of these keys. Other JSON is another program's.
    return body if body.keys() & {"input", "inputs"} else {}


def _check(body: Body, origin: str) -> None:
    """Raise SourceError if the content of a sidecar is not valid. The error names the key.

    Args:
        body: The content.
        origin: The file that it was read from, for the message.
    """
    # The sidecar of a file of images has "input", any other has "inputs".
    is_of_images = "input" in body
    try:
        reading.validated(_reader(is_of_images), json.dumps(body))
        if is_of_images:
            # An image of this size must be possible, too.
            reading.validated(
                TypeAdapter(ImageRecord), json.dumps({"input_size": body["input"]["size"]})
            )
    except reading.UnreadableError as error:
        raise SourceError(f"{origin} cannot be read", str(error), _REMEDY) from None


@functools.cache
def _reader(is_of_images: bool) -> TypeAdapter[Any]:
    """Return pydantic's validator of a sidecar. It is costly to build, so it is kept.

    Args:
        is_of_images: Whether the sidecar is of a file that takes images and gives one answer.
    """
    return TypeAdapter(SidecarOfImages if is_of_images else SidecarOfTensors)
