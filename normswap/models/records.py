"""What files may say of images and classes: timm's record, and the configurations of transformers.

The record of a network (`pretrained_cfg`) is read strictly: an unknown key is an error. Other
libraries' files hold more keys than are read here, so theirs are left alone, and those that are
read have a type and bounds.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from normswap import reading
from normswap.errors import SourceError
from normswap.plan import Body

Record = TypeVar("Record", bound=BaseModel)

# An input of more numbers than this is no sample that is evaluated here (1 GB).
_MOST_NUMBERS = 2**28
_MOST_CLASSES = 10**6

Side = Annotated[int, Field(ge=1, le=2**24)]
Channel = Annotated[float, Field(ge=-1e6, le=1e6)]
Deviation = Annotated[float, Field(gt=0, le=1e6)]
Word = Annotated[str, Field(max_length=1000)]
Names = Annotated[list[Word], Field(max_length=_MOST_CLASSES)]
NamesByKey = Annotated[dict[str, Word], Field(max_length=_MOST_CLASSES)]
Shape = Annotated[list[Side], Field(max_length=8)]
Means = Annotated[list[Channel], Field(min_length=1, max_length=4096)]
Deviations = Annotated[list[Deviation], Field(min_length=1, max_length=4096)]
Sides = Side | Annotated[list[Side], Field(min_length=2, max_length=2)] | dict[str, Side | None]
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"]
# The types that `--input NAME=SHAPE:TYPE` takes.
NumberType = Literal["float32", "float64", "float16", "bfloat16", "int64", "int32", "int8", "bool"]
# timm's record says more than what a network wants. None of it is stored, or read from a directory:
# it names files and addresses, or describes the weights that timm has.
_OF_TIMM_ALONE = frozenset(
    [
        "url",
        "file",
        "state_dict",
        "hf_hub_id",
        "hf_hub_filename",
        "source",
        "architecture",
        "tag",
        "tags",
        "custom_load",
        "min_input_size",
        "pool_size",
        "test_pool_size",
        "num_features",
        "origin_url",
        "paper_name",
        "paper_ids",
        "notes",
        "description",
    ]
)


class _OwnRecord(BaseModel):
    """The base of records that normswap writes. A key that is not listed in them is refused.

    A value of another type is refused, too.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class _OfOthers(BaseModel):
    """The base of records that another library writes. Keys that are not listed are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class ImageRecord(_OwnRecord):
    """timm's record (`pretrained_cfg`): how a network's images are prepared, and its classes."""

    input_size: Shape | None = None
    fixed_input_size: bool | None = None
    mean: Means | None = None
    std: Deviations | None = None
    interpolation: Interpolation | None = None
    # timm resizes to the side divided by this share.
    crop_pct: Annotated[float, Field(ge=0.05, le=10)] | None = None
    crop_mode: Literal["center", "squash", "border"] | None = None
    # How timm's validate.py tests the weights, where that differs from how they were trained.
    test_input_size: Shape | None = None
    test_crop_pct: Annotated[float, Field(ge=0.05, le=10)] | None = None
    first_conv: Word | list[Word] | None = None
    classifier: Word | list[Word] | None = None
    num_classes: Annotated[int, Field(ge=0, le=2**24)] | None = None
    label_offset: Annotated[int, Field(ge=0, le=1000)] | None = None
    label_names: Names | NamesByKey | None = None
    label_descriptions: Names | NamesByKey | None = None
    license: Word | None = None
    # Not strict, as JSON has a list where this has a tuple.
    inputs: dict[Word, Annotated[tuple[Shape, NumberType], Field(strict=False)]] | None = None

    @model_validator(mode="after")
    def _is_bounded(self) -> ImageRecord:
        _check_size("input_size", self.input_size or [])
        _check_size("test_input_size", self.test_input_size or [])
        for name, (shape, _) in (self.inputs or {}).items():
            _check_size(f"inputs.{name}", shape)
        return self


class LayoutOfTimm(_OfOthers):
    """A config.json in timm's layout.

    In the newer layout, `pretrained_cfg` holds the record of images and classes. In the older one,
    the entries of the record stand beside `architecture`, and `pretrained_cfg` is missing.
    """

    architecture: Word
    model_args: Body | None = None
    pretrained_cfg: Body | None = None


class ImageProcessor(_OfOthers):
    """The keys of a preprocessor_config.json of transformers that normswap reads."""

    image_processor_type: Word | None = None
    do_center_crop: bool | None = True
    do_resize: bool | None = True
    do_normalize: bool | None = None
    # A pixel of 0..255 is multiplied by `rescale_factor`. Then 1 is subtracted if there is a
    # `rescale_offset`. With `include_top` a normalized image is divided by `image_std` once more.
    do_rescale: bool | None = None
    rescale_factor: Annotated[float, Field(gt=0, le=1e6)] | None = None
    rescale_offset: bool | None = None
    include_top: bool | None = None
    do_flip_channel_order: bool | None = None
    crop_size: Sides | None = None
    size: Sides | None = None
    crop_pct: Annotated[float, Field(ge=0.05, le=10)] | None = None
    resample: int | Word | None = None
    image_mean: Channel | Means | None = None
    image_std: Deviation | Deviations | None = None


class TransformersConfig(_OfOthers):
    """The keys of a transformers config.json that normswap reads by itself."""

    model_type: Word
    architectures: Annotated[list[Word], Field(max_length=100)] | None = None
    num_labels: Annotated[int, Field(ge=0, le=2**24)] | None = None
    num_channels: Annotated[int, Field(ge=1, le=4096)] | None = None
    image_size: Side | list[Side] | dict[str, Side] | None = None
    id2label: NamesByKey | None = None
    label2id: dict[str, int | str] | None = None


class ShardIndex(_OfOthers):
    """A model.safetensors.index.json: for each tensor, the name of the file that holds it."""

    # A name in the directory itself, so that no other directory is opened.
    weight_map: dict[str, Annotated[str, Field(pattern=r"^[\w-][\w.-]*$", max_length=200)]]


def _check_size(name: str, shape: list[int]) -> None:
    """Raise ValueError for the shape of an input with more numbers than a network is given.

    Args:
        name: The key of the shape in the record, for the message.
        shape: The shape.
    """
    count = 1
    for side in shape:
        count *= side
    if count > _MOST_NUMBERS:
        raise ValueError(f"{name} has more than {_MOST_NUMBERS} numbers")


def image_record(stated: Mapping[str, object]) -> Body:
    """Return the entries of a record that are stored: those of `ImageRecord`, with JSON values.

    Args:
        stated: timm's record, or the network's own record. Other keys, and values that are None,
            are left out.
    """
    names = ImageRecord.model_fields.keys()
    known = {name: value for name, value in stated.items() if name in names and value is not None}
    # By way of JSON, tuples become lists.
    plain: Body = json.loads(json.dumps(known))
    return plain


def class_names(record: Mapping[str, Any]) -> list[str] | None:
    """Return the names of a network's classes, in the order of its outputs.

    timm's record has them as a list, or as a dict by the number of the output. The order of a dict
    says nothing: a file may have its keys sorted as words, 10 before 2. The result is None if the
    record has no names, or has them by number for some outputs only.

    Args:
        record: timm's record, or the network's own.
    """
    names = record.get("label_names")
    if names is None:
        return None
    if not isinstance(names, Mapping):
        return list(map(str, names))
    # Names by other words, such as WordNet ids, can only be in the order of the outputs.
    if not all(str(key).isdecimal() for key in names):
        return list(map(str, names.values()))

    by_number = {int(key): str(name) for key, name in names.items()}
    numbers = range(len(names))
    return [by_number[number] for number in numbers] if by_number.keys() == set(numbers) else None


def without_addresses(stated: object) -> object:
    """Return a stored record without the keys that only timm's registry uses, such as addresses.

    Anything but a dict is returned as it is.
    """
    if not isinstance(stated, Mapping):
        return stated
    return {name: value for name, value in stated.items() if name not in _OF_TIMM_ALONE}


def checked(kind: type[Record], stated: object, origin: str) -> Record:
    """Return the data of a file as an object of a pydantic class, which checks types and bounds.

    Args:
        kind: The class.
        stated: The plain data that was read from the file.
        origin: The name of the file in the error.

    Raises:
        SourceError: The data does not fit the class. The message names file and key.
    """
    try:
        return reading.validated(_reader(kind), json.dumps(stated))
    except reading.UnreadableError as error:
        raise SourceError(
            f"{origin} cannot be read", str(error), "The file is damaged: get it again"
        ) from None


@functools.cache
def _reader(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
