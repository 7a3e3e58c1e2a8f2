"""The Hugging Face hub: one file at a time, from the cache when offline; and what the config files
of models state.

That is a config.json of timm, a preprocessor_config.json of transformers, and normswap's record of
preprocessing.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub as client
from huggingface_hub import constants, errors
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import to_2tuple
from torch import nn

from normswap.errors import SourceError, explained, first_line, printable, quiet, spelled
from normswap.plan import Body

# timm's record of the preprocessing, or a config.json.
Cfg = Body

# timm's preprocessing where nothing else is stated.
GENERAL: Cfg = {"mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD}
GENERAL |= {"interpolation": "bicubic", "crop_pct": 0.875, "crop_mode": "center"}
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
_OF_A_FILE = (
    "_name_or_path",
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
    "auto_map",
)
RECORDED = (*_PREPROCESSING, *_STEM_AND_HEAD, *_TOP_LEVEL, "license")


def endpoint() -> str:
    """Return the address of the hub in use (HF_ENDPOINT)."""
    return str(constants.ENDPOINT)


def fetch(repo: str, filenames: Sequence[str]) -> Path:
    """Return the path of the first of `filenames` that a repository (org/name[@revision]) has,
    downloaded or cached.

    Raises SourceError: no such repository or file, no connection and nothing cached, or a transfer
    that broke.
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
    """Return the first of `filenames` that a directory has; raises SourceError where it has none."""
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
    """Return the path of a file of a repository, downloaded or cached; None where it has no such.

    Raises SourceError: it cannot be had, or came damaged; then it does not stay in the cache.
    """
    # The name may be from a repository's own list; the client shows it while it downloads.
    if printable(filename) != filename:
        raise SourceError(f"hub repository {repo} names a file {filename}, which is no name")
    # The client retries an unreachable hub for minutes. A HEAD request without retries says it at
    # once.
    try:
        url = client.hf_hub_url(repo, filename, revision=revision)
        metadata = client.get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    # The client raises its own errors, its HTTP library's and the system's, by version.
    except Exception as error:
        if isinstance(error, errors.HFValidationError):
            raise SourceError(f"'{repo}' is not a hub repository", first_line(error)) from None
        cached = client.try_to_load_from_cache(repo, filename, revision=revision)
        if isinstance(cached, str):
            # The cache names a file by what the hub states of it.
            _check_undamaged(Path(cached), Path(cached).resolve().name, repo)
            return Path(cached)
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
    """Check a file of the cache against the hash that the hub states, if it states one.

    Args:
        file: The file, in most caches a link to the file that holds the bytes.
        etag: The SHA-256 of a large file, the SHA-1 of a small one as git computes it. Mirrors may
            state the plain SHA-1, or something else, which says nothing.
        repo: The repository, for the error.

    Raises:
        SourceError: It is another file, which is removed from the cache.
    """
    if not _HASH.fullmatch(etag):
        return
    if len(etag) == _SHA256_DIGITS:
        hashes = {sha256(file)}
    else:
        content = file.read_bytes()
        header = f"blob {len(content)}\0".encode()
        hashes = {hashlib.sha1(header + content).hexdigest(), hashlib.sha1(content).hexdigest()}
    if etag in hashes:
        return

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
    """Read a file that holds an object of JSON; raises SourceError."""
    with explained(SourceError, f"{origin}: {file.name} cannot be read"):
        content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise SourceError(f"{origin}: {file.name} holds no object")
    return content


def read_config(file: Path, origin: str) -> tuple[str, Cfg, Cfg]:
    """Return name, arguments, and what is stated of weights and images, of a config.json in timm's
    layout, old or new.

    Raises SourceError: missing, not JSON, or not that of a timm model.
    """
    config = read_json(file, origin)
    name = config.get("architecture")
    if not isinstance(name, str):
        remedy = "Is it a timm model?"
        if "model_type" in config:
            remedy = f"It is a transformers model: name it hf:{origin.partition(':')[2] or origin}"
        raise SourceError(f"{origin}: config.json names no timm 'architecture'", remedy=remedy)
    stated = config.get("pretrained_cfg", config)
    args = config.get("model_args") or {}
    if not isinstance(stated, dict) or not isinstance(args, dict):
        raise SourceError(
            f"{origin}: 'pretrained_cfg' and 'model_args' in config.json must be objects"
        )
    top = {key: config[key] for key in _TOP_LEVEL if key in config}
    values = {key: value for key, value in {**stated, **top}.items() if value is not None}
    size = values.get("input_size", [3, 224, 224])
    if not (
        isinstance(size, list)
        and len(size) == 3
        and all(isinstance(side, int) and side > 0 for side in size)
    ):
        raise SourceError(f"{origin}: 'input_size' must be [channels, height, width], not {size}")
    return name, args, values


def own_cfg(model: nn.Module) -> Cfg:
    """Return timm's record of the weights as it is on the network; empty where there is none."""
    cfg: object = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    if not isinstance(cfg, Mapping):
        return {}
    return dict(cfg)


def per_channel(values: Sequence[float], channels: int) -> list[float]:
    """Return a statistic for each channel; as in timm, channels that it does not know get the mean
    of the others.
    """
    if len(values) == channels:
        return list(values)
    return [sum(values) / len(values)] * channels


def crop_share(crop: int, resize: int) -> float:
    """Return the crop_pct by which timm resizes to that side: it takes the floor of crop /
    crop_pct.
    """
    share = crop / resize
    if math.floor(crop / share) == resize:
        return share
    return math.nextafter(share, 0)


def record(cfg: Cfg, kwargs: Body, model: nn.Module) -> Cfg:
    """Return the preprocessing (JSON) of a network with these arguments, `cfg` being timm's record
    of its source.
    """
    classes = getattr(model, "num_classes", cfg["num_classes"])
    recorded = {key: cfg[key] for key in RECORDED if cfg.get(key) is not None}
    if classes != recorded.get("num_classes"):
        recorded = {key: value for key, value in recorded.items() if not key.startswith("label_")}
        recorded["num_classes"] = classes
    chans = kwargs.get("in_chans", recorded["input_size"][0])
    size = kwargs.get("img_size", recorded["input_size"][1:])
    recorded["input_size"] = [chans, *to_2tuple(size)]
    recorded |= {
        key: per_channel(recorded[key], chans)
        for key in ("mean", "std")
        if recorded.get(key) is not None
    }
    return json.loads(json.dumps(recorded))


def bare(config: Cfg) -> Cfg:
    """Return a config of transformers without what it says of a file, and of weights that parts of
    it would fetch.
    """
    recorded = {key: value for key, value in config.items() if key not in _OF_A_FILE}
    recorded |= {key: bare(value) for key, value in recorded.items() if isinstance(value, dict)}
    if "use_pretrained_backbone" in recorded:
        recorded["use_pretrained_backbone"] = False
    return recorded


def of_image_processor(stated: Cfg, model: nn.Module) -> Cfg:
    """Return timm's record of a transformers network's preprocessing, as its
    preprocessor_config.json states it.
    """
    config: Any = model.config
    channels = getattr(config, "num_channels", 3)
    crop = _sides(stated.get("do_center_crop", True) and stated.get("crop_size"))
    size = _sides(stated.get("do_resize", True) and stated.get("size"))
    final = crop or size or _sides(getattr(config, "image_size", None))
    preprocessing: Cfg = {}
    if final is not None:
        preprocessing["input_size"] = [channels, *final]
    if size is not None:
        squashes = crop is None and isinstance(stated["size"], dict) and "height" in stated["size"]
        share = crop_share(min(crop), min(size)) if crop else stated.get("crop_pct") or 1.0
        preprocessing |= {"crop_pct": share, "crop_mode": "squash" if squashes else "center"}
    if stated.get("resample") in _INTERPOLATIONS:
        preprocessing["interpolation"] = _INTERPOLATIONS[stated["resample"]]
    if stated.get("do_normalize") is False:
        preprocessing |= {"mean": [0.0] * channels, "std": [1.0] * channels}
    for key, word in (("image_mean", "mean"), ("image_std", "std")):
        values = stated.get(key)
        if word not in preprocessing and isinstance(values, list) and len(values) == channels:
            preprocessing[word] = [float(value) for value in values]
    if type(model).__name__.endswith("ForImageClassification"):
        names = [str(config.id2label[label]) for label in sorted(config.id2label)]
        meaningful = len(set(names)) == len(names) and not all(
            name.startswith("LABEL_") for name in names
        )
        preprocessing["num_classes"] = config.num_labels
        if meaningful:
            preprocessing["label_names"] = names
    return preprocessing


def _sides(size: object) -> tuple[int, int] | None:
    if isinstance(size, dict):
        edge = size.get("shortest_edge")
        size = (size.get("height", edge), size.get("width", edge))
    sides = to_2tuple(size)
    if len(sides) == 2 and all(isinstance(side, int) and side > 0 for side in sides):
        return sides[0], sides[1]
    return None
