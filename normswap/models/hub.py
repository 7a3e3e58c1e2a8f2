"""The Hugging Face hub, one file at a time, and what the config files of models state.

A file comes from the cache when the hub is offline. Config files are a config.json of timm or of
transformers, and a preprocessor_config.json.
"""

import hashlib
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub as client
from huggingface_hub import constants, errors
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import to_2tuple
from torch import nn

from normswap import reading
from normswap.errors import (
    SourceError,
    WeightsNote,
    explained,
    first_line,
    printable,
    quiet,
    spelled,
)
from normswap.models import records
from normswap.plan import Body

# timm's record of the preprocessing, or a config.json.
Cfg = Body

# timm's preprocessing where nothing else is stated.
GENERAL: Cfg = {"mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD}
GENERAL |= {"interpolation": "bicubic", "crop_pct": 0.875, "crop_mode": "center"}
# Keys that a config.json in timm's layout may have outside of the record.
_TOP_LEVEL = ("num_classes", "label_names", "label_descriptions")
_PREPROCESSING = (
    "input_size",
    "fixed_input_size",
    "mean",
    "std",
    "interpolation",
    "crop_pct",
    "crop_mode",
)
_STEM_AND_HEAD = ("first_conv", "classifier")
# What the hub states of a file: a SHA-1 or a SHA-256.
_HASH = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_SHA256_DIGITS = 64
_INTERPOLATIONS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
# Keys of a transformers config that describe the file, not the network.
_OF_A_FILE = (
    "_name_or_path",
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
    "auto_map",
    "normswap",
    "transformers_weights",
)
# How the weights are tested, where that differs from how they were trained.
TESTED = ("test_input_size", "test_crop_pct")
# What timm's record says of an architecture, whatever its weights are.
_OF_ARCHITECTURE = ("architecture", "fixed_input_size", *_STEM_AND_HEAD)
# The least side for which the image processor of ConvNeXt does not keep an image's proportions.
_SQUASHED_BY_CONVNEXT = 384
RECORDED = (*_PREPROCESSING, *TESTED, *_STEM_AND_HEAD, *_TOP_LEVEL, "license")


def endpoint() -> str:
    """Return the address of the hub that is asked, which the user may set by HF_ENDPOINT."""
    return str(constants.ENDPOINT)


@contextmanager
def offline() -> Iterator[None]:
    """Inside a `with` block, let every request to the Hugging Face hub fail at once."""
    with mock.patch.object(constants, "HF_HUB_OFFLINE", True):
        yield


def fetch(repo: str, filenames: Sequence[str]) -> Path:
    """Download one of several files from a repository of the hub, and return its path.

    It is the first of them that the repository has. Without a connection, the cache is asked.

    Args:
        repo: The repository, as org/name[@revision].
        filenames: The names of the files, the preferred one first.

    Raises:
        SourceError: There is no such repository or file, there is no connection and nothing is
            cached, or a transfer broke.
    """
    name, _, revision = repo.partition("@")
    with quiet():
        for filename in filenames:
            file = _fetch_one(name, filename, revision or None)
            if file is not None:
                return file
    raise SourceError(
        f"hub repository {repo} has no {' or '.join(filenames)}", f"asked {endpoint()}"
    )


def local(folder: Path, filenames: Sequence[str]) -> Path:
    """Return the path of the first of several files that a directory has.

    Args:
        folder: The directory.
        filenames: The names of the files, the preferred one first.

    Raises:
        SourceError: The directory has none of these files.
    """
    file = next((folder / name for name in filenames if (folder / name).is_file()), None)
    if file is None:
        remedy = "A model directory has config.json and weights; for weights alone name the file."
        what = (
            f"{folder} has no {' or '.join(filenames)}"
            if folder.is_dir()
            else f"{folder} is no directory"
        )
        raise SourceError(what, remedy=remedy)
    return file


def _fetch_one(repo: str, filename: str, revision: str | None) -> Path | None:
    """Download a file of a repository, and return its path, or None if there is no such file.

    If the hub cannot be reached, the cached file is returned.

    Args:
        repo: The repository, as owner/name.
        filename: The name of the file.
        revision: The branch, tag or commit. None stands for the hub's default.

    Raises:
        SourceError: The file cannot be downloaded, or is damaged. A damaged file is removed from
            the cache.
    """
    # The name may be from a repository's own list; the client shows it while it downloads.
    if printable(filename) != filename:
        raise SourceError(f"hub repository {repo} names a file {filename}, which is no name")
    # The client retries an unreachable hub for minutes. A HEAD request without retries says it at
    # once.
    try:
        url = client.hf_hub_url(repo, filename, revision=revision)
        metadata = client.get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    # The client raises its own errors, its HTTP library's or the system's, by its version.
    except Exception as error:
        if isinstance(error, errors.HFValidationError):
            raise SourceError(f"'{repo}' is not a hub repository", first_line(error)) from None
        # Whatever the error is, a file in the cache will do.
        cached = client.try_to_load_from_cache(repo, filename, revision=revision)
        if isinstance(cached, str):
            # The name of a file in the cache is the hash that the hub stated for it.
            _check_undamaged(Path(cached), Path(cached).resolve().name, repo)
            return Path(cached)
        # The hub says that there is no such file. A local error says only that the cache has none.
        if isinstance(error, errors.EntryNotFoundError) and not isinstance(
            error, errors.LocalEntryNotFoundError
        ):
            return None
        raise _explained(error, repo) from None

    with explained(
        SourceError, f"the transfer of {filename} from {url} broke", "Nothing was kept; try again."
    ):
        file = Path(client.hf_hub_download(repo, filename, revision=revision))
    _check_undamaged(file, metadata.etag or "", repo)
    return file


def _check_undamaged(file: Path, etag: str, repo: str) -> None:
    """Raise SourceError if a file of the cache has another hash than the hub states for it.

    Args:
        file: The file, in most caches a link to the file that holds the bytes.
        etag: The hash that the hub states: the SHA-256 of a large file, or git's SHA-1 of a small
            file. Mirrors may state the plain SHA-1. Any other text is ignored.
        repo: The repository, for the error.

    Raises:
        SourceError: The hashes differ. The file is removed from the cache.
    """
    if not _HASH.fullmatch(etag):
        return
    if len(etag) == _SHA256_DIGITS:
        hashes = {sha256(file)}
    else:
        content = file.read_bytes()
        # git hashes this header together with the content.
        header = f"blob {len(content)}\0".encode()
        hashes = {hashlib.sha1(header + content).hexdigest(), hashlib.sha1(content).hexdigest()}
    if etag in hashes:
        return

    # In most caches the file is a link to a file with the bytes. Both are removed.
    content_file = file.resolve()
    file.unlink()
    content_file.unlink(missing_ok=True)
    raise SourceError(
        f"{file.name} of hub repository {repo} is damaged",
        f"it has another hash than {endpoint()} states",
        "It was removed from the cache; try again.",
    )


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while part := opened.read(2**20):
            digest.update(part)
    return digest.hexdigest()


def _explained(error: Exception, repo: str) -> SourceError:
    """Return the error for the user: why a file of a repository cannot be had, and what to do.

    Args:
        error: The error of the hub's client.
        repo: The name of the repository.
    """
    # If the hub has answered, the answer has a status such as 404.
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        remedy = (
            "Check the name and the revision; a private or gated repository needs a token"
            " (HF_TOKEN)."
        )
        return SourceError(
            f"hub repository {repo} cannot be had", f"{endpoint()} answers {status}", remedy
        )

    why = f"{endpoint()} cannot be reached ({first_line(error)}) and the cache has no copy"
    remedy = (
        f"Ways on: '{spelled('weights', 'random')}'; weights on this disk, as 'local-dir:DIR',"
        f" 'hf:DIR' or a file with '{spelled('arch', metavar='NAME')}'; or a hub that answers"
        " (HF_ENDPOINT, or a cache filled in HF_HOME)."
    )
    return SourceError(f"no weights for {repo}", why, remedy)


def read_json(file: Path, origin: str) -> Cfg:
    """Return the JSON object that a file holds, as a dict.

    Args:
        file: The file.
        origin: The name of the file's repository or directory in errors.

    Raises:
        SourceError: The file cannot be read, or holds something else.
    """
    try:
        content = reading.parse_json(reading.file_text(file))
    except reading.UnreadableError as error:
        raise SourceError(f"{origin}: {file.name} cannot be read", str(error)) from None
    if not isinstance(content, dict):
        raise SourceError(f"{origin}: {file.name} holds no object")
    return content


def read_config(file: Path, origin: str) -> tuple[str, Cfg, Cfg]:
    """Return what a config.json in timm's layout says.

    Args:
        file: The config.json.
        origin: The name of the file's repository or directory in errors, such as
            `hf-hub:owner/name`.

    Returns:
        A triple: the name of the architecture, its arguments, and the record of weights and images
        (`records.ImageRecord`) without the keys that are null.

    Raises:
        SourceError: The file is missing, is not JSON, or is not the config of a timm model.
    """
    config = read_json(file, origin)
    if not isinstance(config.get("architecture"), str):
        remedy = "Is it a timm model?"
        # A network of transformers is named `hf:owner/name`, or `hf:DIR`.
        if "model_type" in config:
            remedy = f"It is a transformers model: name it hf:{origin.partition(':')[2] or origin}"
        raise SourceError(f"{origin}: config.json names no timm 'architecture'", remedy=remedy)

    label = f"{origin}: config.json"
    layout = records.checked(records.LayoutOfTimm, config, label)
    # The old layout has the record's keys beside the architecture. In both layouts, the classes may
    # be stated there.
    record = config if layout.pretrained_cfg is None else layout.pretrained_cfg
    classes = {key: config[key] for key in _TOP_LEVEL if key in config}
    stated = records.image_record({**record, **classes})
    records.checked(records.ImageRecord, stated, label)

    size = stated.get("input_size", [3, 224, 224])
    if len(size) != 3:
        raise SourceError(f"{origin}: 'input_size' must be [channels, height, width], not {size}")
    return layout.architecture, dict(layout.model_args or {}), stated


def own_cfg(model: nn.Module) -> Cfg:
    """Return timm's record of a network's weights and images, which timm has put on the network.

    It is the network's attribute `pretrained_cfg`. The dict is empty if there is none. The names of
    classes are left out if the network has another number of classes, as after a new head.
    """
    cfg: object = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    if not isinstance(cfg, Mapping):
        return {}
    classes = getattr(model, "num_classes", None)
    if isinstance(classes, int) and cfg.get("num_classes", classes) != classes:
        return _without_class_names(cfg)
    return dict(cfg)


def _without_class_names(cfg: Mapping[str, Any]) -> Cfg:
    """Return timm's record without the names and descriptions of classes."""
    return {key: value for key, value in cfg.items() if not key.startswith("label_")}


def of_architecture(model: nn.Module) -> Cfg:
    """Return the entries of timm's record that hold for any weights of the architecture.

    timm gives each network that it builds the record of the weights that it would load by default.
    Their test size, repository, license and papers are left out.
    """
    stated = own_cfg(model)
    return {key: stated[key] for key in _OF_ARCHITECTURE if key in stated}


def unlicensed_record(model: nn.Module) -> Cfg:
    """Return the record of images and classes of a network that somebody built with timm.

    The license is left out, because timm notes it on networks without trained weights, too. The
    record is empty if the network states none, or if its record cannot be read back.
    """
    classes = getattr(model, "num_classes", None)
    # A record that was made in Python may hold what JSON has no word for, such as an array.
    try:
        stated = records.image_record({**own_cfg(model), "license": None})
        if stated and isinstance(classes, int):
            stated["num_classes"] = classes
        records.checked(records.ImageRecord, stated, "the network's pretrained_cfg")
    except (SourceError, TypeError, ValueError):
        return {}
    return stated


def per_channel(values: Sequence[float], channels: int) -> list[float]:
    """Return one value for each channel, such as the mean of the pixels.

    If there is another number of values than channels, every channel gets the mean of all values,
    as in timm.

    Args:
        values: The values, as the network's record states them.
        channels: The number of the network's input channels.
    """
    if len(values) == channels:
        return list(values)
    return [sum(values) / len(values)] * channels


def crop_share(crop: int, resize: int) -> float:
    """Return the crop_pct with which timm resizes images to a given side before it crops them.

    timm resizes to the floor of crop / crop_pct.

    Args:
        crop: The side of the crop, in pixels.
        resize: The side that the image is resized to, in pixels.
    """
    share = crop / resize
    # A rounding error may make crop / share a little smaller than `resize`, so that the floor is
    # one pixel too low. With the next smaller share it is right.
    if math.floor(crop / share) == resize:
        return share
    return math.nextafter(share, 0)


def record(cfg: Cfg, kwargs: Body, model: nn.Module) -> Cfg:
    """Return the record of a network's images and classes, in types that JSON can hold.

    Args:
        cfg: timm's record of the weights, with the size, preprocessing and classes of the source.
        kwargs: The arguments that the network was built with.
        model: The network.
    """
    classes = getattr(model, "num_classes", cfg["num_classes"])
    recorded = {key: cfg[key] for key in RECORDED if cfg.get(key) is not None}
    # Names of classes do not hold for a head with another number of them.
    if classes != recorded.get("num_classes"):
        recorded = {**_without_class_names(recorded), "num_classes": classes}

    # The arguments may change the channels and the size that the record states.
    channels = kwargs.get("in_chans", recorded["input_size"][0])
    size = kwargs.get("img_size", recorded["input_size"][1:])
    recorded["input_size"] = [channels, *to_2tuple(size)]
    # If a size was asked for, the record's test size does not hold.
    if "img_size" in kwargs:
        recorded.pop("test_input_size", None)
    if "test_input_size" in recorded:
        recorded["test_input_size"] = [channels, *recorded["test_input_size"][1:]]
    for key in ("mean", "std"):
        if recorded.get(key) is not None:
            recorded[key] = per_channel(recorded[key], channels)
    # By way of JSON, tuples become lists.
    return json.loads(json.dumps(recorded))


def bare(config: Cfg) -> Cfg:
    """Return a config of transformers without entries about files, or about weights to download.

    Args:
        config: The config, or an object inside a config.
    """
    cleaned = {key: value for key, value in config.items() if key not in _OF_A_FILE}
    # Objects inside the config, such as that of a backbone, are cleaned likewise.
    for key, value in cleaned.items():
        if key == "pretrained_cfg":
            cleaned[key] = records.without_addresses(value)
        elif isinstance(value, dict):
            cleaned[key] = bare(value)
    if "use_pretrained_backbone" in cleaned:
        cleaned["use_pretrained_backbone"] = False
    return cleaned


def of_image_processor(stated: Cfg, model: nn.Module, origin: str = "the network") -> Cfg:
    """Return what a network of transformers says of its images and classes, as timm records it.

    Args:
        stated: The content of the network's preprocessor_config.json. Empty if it has no such file.
        model: The network.
        origin: The name of the network in errors.
    """
    processor = records.checked(
        records.ImageProcessor, stated, f"{origin}: preprocessor_config.json"
    )

    if processor.do_flip_channel_order:
        note = f"{origin} takes BGR images, which no record says: exchange red and blue in yours"
        warnings.warn(note, WeightsNote, stacklevel=2)

    config: Any = model.config
    channels = getattr(config, "num_channels", 3)
    preprocessing = {
        **_resizing(processor, config, channels),
        **_normalizing(processor, channels),
        **_classes(model),
    }
    checked = records.checked(records.ImageRecord, preprocessing, f"{origin}: config.json")
    return records.image_record(checked.model_dump())


def _resizing(processor: records.ImageProcessor, config: object, channels: int) -> Cfg:
    """Return timm's entries for the input size, resizing, cropping and interpolation.

    What the processor does not state is left out.

    Args:
        processor: What a preprocessor_config.json of transformers says.
        config: The network's config.
        channels: The number of the network's input channels.
    """
    # Images are resized to `size`, then cropped to `crop`. The network gets the last of these sizes
    # that is stated, or else the size in its config.
    crop = _sides(processor.crop_size) if processor.do_center_crop else None
    size = _sides(processor.size) if processor.do_resize else None
    input_sides = crop or size or _sides(getattr(config, "image_size", None))

    resizing: Cfg = {}
    if input_sides is not None:
        resizing["input_size"] = [channels, *input_sides]
    if size is not None:
        # Resizing to height and width, without a crop, does not keep the image's proportions.
        squashes = crop is None and isinstance(processor.size, dict) and "height" in processor.size
        # So does the processor of ConvNeXt for large images.
        is_convnext = (processor.image_processor_type or "").startswith("ConvNext")
        squashes |= is_convnext and min(size) >= _SQUASHED_BY_CONVNEXT
        resizing["crop_mode"] = "squash" if squashes else "center"
        resizing["crop_pct"] = 1.0 if squashes else processor.crop_pct or 1.0
        if crop is not None:
            resizing["crop_pct"] = crop_share(min(crop), min(size))
    if isinstance(processor.resample, int) and processor.resample in _INTERPOLATIONS:
        resizing["interpolation"] = _INTERPOLATIONS[processor.resample]
    return resizing


def _normalizing(processor: records.ImageProcessor, channels: int) -> Cfg:
    """Return timm's entries `mean` and `std`, one value per channel, as far as they are stated.

    timm's are those of pixels in 0..1. The processor's hold after it has scaled pixels of 0..255.

    Args:
        processor: What a preprocessor_config.json of transformers says.
        channels: The number of the network's input channels.
    """
    # None means that the file does not say it. Then the mean and deviation that it states hold. But
    # the processors that know another order of channels have no normalization, and neither has a
    # file that says how pixels are scaled, and nothing of a mean.
    is_normalized = processor.do_normalize
    if is_normalized is None:
        has_mean = processor.image_mean is not None or processor.do_rescale is None
        is_normalized = has_mean and processor.do_flip_channel_order is None
    stated = {"mean": processor.image_mean, "std": processor.image_std}
    if not is_normalized:
        stated = {"mean": [0.0] * channels, "std": [1.0] * channels}

    factor = 255.0
    if processor.do_rescale is not False:
        factor *= processor.rescale_factor or 1 / 255
    # 255 / 255 may be 1 but for rounding.
    factor = 1.0 if math.isclose(factor, 1.0) else factor
    normalizing: Cfg = {}
    for word, values in stated.items():
        if not isinstance(values, list) or len(values) != channels:
            continue
        if word == "mean" and processor.rescale_offset:
            values = [value + 1 for value in values]
        if word == "std" and processor.include_top and isinstance(processor.image_std, list):
            again = processor.image_std
            values = [value * other for value, other in zip(values, again, strict=True)]
        normalizing[word] = [float(value) / factor for value in values]
    return normalizing


def _classes(model: nn.Module) -> Cfg:
    """Return timm's entries `num_classes` and `label_names` for a classifier of transformers.

    The names are left out if they are only numbered, as in `LABEL_0`, or if two are the same. A
    network that is no classifier has no entries.
    """
    if not type(model).__name__.endswith("ForImageClassification"):
        return {}

    config: Any = model.config
    classes: Cfg = {"num_classes": config.num_labels}
    names = [str(config.id2label[label]) for label in sorted(config.id2label)]
    are_only_numbered = all(name.startswith("LABEL_") for name in names)
    if len(set(names)) == len(names) and not are_only_numbered:
        classes["label_names"] = names
    return classes


def _sides(size: object) -> tuple[int, int] | None:
    """Return the height and width that a size in a config of transformers stands for, or None.

    Args:
        size: One number (a square), two numbers, or an object such as `{"height": 224, "width":
            224}` or `{"shortest_edge": 256}`.
    """
    if isinstance(size, dict):
        edge = size.get("shortest_edge")
        size = (size.get("height", edge), size.get("width", edge))
    sides = to_2tuple(size)
    if len(sides) == 2 and all(isinstance(side, int) and side > 0 for side in sides):
        return sides[0], sides[1]
    return None
