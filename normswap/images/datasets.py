"""Images with labels, preprocessed as the network wants them, through timm's datasets and transforms.

timm's own dataset replaces an image it cannot read by the next one, and its labels follow the folders present. Both
would bend a measured accuracy, so here an unreadable image is an error that names it, and labels follow the network.
"""

from __future__ import annotations

import atexit
import gzip
import io
import lzma
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from timm.data import ImageDataset, create_dataset, create_transform
from timm.data.readers.reader_image_in_tar import ReaderImageInTar
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate

from normswap import provenance
from normswap.errors import OptionError, SourceError, first_line
from normswap.models import zoo
from normswap.models.hub_config import Cfg
from normswap.models.weight_files import quiet, some

PREFIXES = ("torch", "hfds", "hfids", "tfds", "wds")  # timm's dataset families
_PACKED: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open, ".tgz": gzip.open, ".txz": lzma.open}
_unpacked: dict[tuple[Path, int], Path] = {}


@dataclass(frozen=True)
class _Unreadable:
    """What a worker hands back for an image it could not read: errors raised there arrive as a traceback."""

    name: str
    why: str


class Loader:
    """Batches of images (N, C, H, W) and labels (N,), in a fixed order.

    Args:
        batches: the DataLoader underneath.
        origin: what the user named, for errors.
        count: how many images one pass has; None when the dataset cannot tell.
        limit: stop after this many (a stream cannot be sampled).
    """

    def __init__(self, batches: DataLoader[Any], origin: str, count: int | None, limit: int | None = None) -> None:
        self.batches, self.origin, self.count, self.limit = batches, origin, count, limit

    def __len__(self) -> int:
        return len(self.batches)

    def only(self, rows: Sequence[int]) -> Loader:
        """The same of these images; no other is read."""
        old = self.batches
        some: DataLoader[object] = DataLoader(
            Subset(old.dataset, rows), old.batch_size, num_workers=old.num_workers, collate_fn=old.collate_fn,
            generator=old.generator,
        )  # fmt: skip
        return Loader(some, self.origin, len(rows))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        left = self.limit
        for batch in self.batches:
            if isinstance(batch, _Unreadable):
                raise SourceError(f"{self.origin}: {batch.name} cannot be read", batch.why, "Remove or replace it.")
            images, labels = batch
            yield images[:left], labels[:left]
            left = None if left is None else left - len(labels)
            if left is not None and left <= 0:
                return


def make_loader(
    model: nn.Module | Mapping[str, object],
    data: str,
    *,
    batch_size: int = 64,
    workers: int = 2,
    split: str = "validation",
    samples: int | None = None,
    seed: int = 0,
) -> Loader:
    """Batches from `data`, resized, cropped and normalized for evaluating `model`.

    Args:
        model: the network, or its preprocessing record (`zoo.data_config`, with `num_classes` and `label_names` if
            labels are to be checked against them).
        data: a folder of class folders, a `.tar`, `.tar.xz` or `.tar.gz` of one, or a dataset of timm's as
            `PREFIX/NAME[:ROOT]`, such as `torch/cifar10:/data` or `hfds/user/name`.
        split: which part of a dataset that has parts; a folder of that name inside the folder is used if present.
        samples: take this many images, drawn without replacement by `seed`; a stream gives its first ones.

    Raises:
        SourceError: nothing there, no images, an unreadable archive, or other classes than the network's.
        OptionError: a batch size or number of samples below one.
    """
    if batch_size < 1 or workers < 0 or (samples is not None and samples < 1):
        raise OptionError(f"batch size {batch_size}, {workers} workers, {samples} samples", "must be positive")
    dataset = open_images(model, data, split, create_transform(**_wanted(model)[0]))
    count: int | None = None
    if isinstance(dataset, IterableDataset):
        if hasattr(dataset, "set_loader_cfg"):
            dataset.set_loader_cfg(num_workers=workers)  # shards are dealt out by it
    else:
        count = len(dataset)
        if samples is not None and samples < count:
            order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:samples]
            dataset, count = Subset(dataset, sorted(order.tolist())), samples
    batches: DataLoader[object] = DataLoader(
        dataset, batch_size, num_workers=workers, collate_fn=collate, generator=torch.Generator().manual_seed(seed)
    )
    return Loader(batches, data, count if count is not None else samples, samples if count is None else None)


def open_images(
    model: nn.Module | Mapping[str, object], data: str, split: str, transform: object, *, labelled: bool = True
) -> Any:
    """A dataset of (transformed image, the network's label); one that streams has no length.

    Args:
        model, data, split: as in `make_loader`.
        transform: what becomes of a PIL image.
        labelled: without, labels mean nothing, and the folders may be any.

    Raises:
        SourceError: as `make_loader`.
    """
    config, classes, names = _wanted(model)
    mode = "RGB" if config["input_size"][0] == 3 else "L"
    dataset = _open(data, split, mode)
    if isinstance(dataset, IterableDataset):
        dataset.transform = transform  # type: ignore[attr-defined]
        return dataset
    return _Labelled(dataset, mode, transform, _label_table(dataset, classes, names, data) if labelled else None)


def _wanted(model: nn.Module | Mapping[str, object]) -> tuple[Cfg, int | None, list[str]]:
    """The transform's arguments, the number of classes if known, and their names if known."""
    if isinstance(model, nn.Module):
        origin = provenance.of(model)
        record = dict(origin.pretrained_cfg) if origin else {}
        classes = getattr(model, "num_classes", record.get("num_classes"))
        config = zoo.data_config(model)
    else:
        record, config, classes = dict(model), dict(model), model.get("num_classes")
    kept = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode")
    config = {key: tuple(v) if isinstance(v := config[key], list) else v for key in kept if key in config}
    if config["input_size"][0] not in (1, 3):
        raise SourceError(f"the network takes {config['input_size'][0]} channels", "images have 1 or 3")
    names = record.get("label_names") or []
    return config, classes, [str(name) for name in (names.values() if isinstance(names, Mapping) else names)]


def _open(data: str, split: str, mode: str) -> object:
    path, prefix = Path(data), data.partition("/")[0].lower()
    if path.exists():
        name, root = "", str(_plain_tar(path))
    elif prefix in PREFIXES:
        name, _, root = data.partition(":")
    else:
        raise SourceError(f"{data} does not exist", remedy=f"Other datasets start with {', '.join(PREFIXES)} and '/'.")
    try:
        with quiet():
            return create_dataset(name, root=root or None, split=split, input_img_mode=mode)
    except ImportError as error:
        raise SourceError(f"{data} needs a package that is not installed", first_line(error)) from None
    except Exception as error:  # timm and the libraries behind it raise whatever they like
        what = f"{data} is not a dataset of images" if path.exists() else f"{data} cannot be opened"
        remedy = "Expected class folders with images, or a tar of them." if path.exists() else ""
        why = "no images in it" if isinstance(error, ValueError) and path.suffix == ".tar" else first_line(error)
        raise SourceError(what, why, remedy) from None


def _plain_tar(path: Path) -> Path:
    """`path`, or for a compressed tar an uncompressed copy that goes at exit: xz and gz allow no random access."""
    if path.is_dir() or path.suffix not in _PACKED:
        return path
    key = (path.resolve(), path.stat().st_mtime_ns)
    if key not in _unpacked:
        folder = Path(tempfile.mkdtemp(prefix="normswap-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        target = folder / "images.tar"
        try:
            with _PACKED[path.suffix](path, "rb") as packed, target.open("wb") as plain:
                shutil.copyfileobj(packed, plain, 1 << 20)
        except (OSError, EOFError, lzma.LZMAError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise SourceError(f"{path} cannot be unpacked", first_line(error)) from None
        _unpacked[key] = target
    return _unpacked[key]


def _label_table(dataset: object, classes: int | None, names: list[str], data: str) -> dict[int, int] | None:
    """From the dataset's label to the network's: by name if it has names for all of them, else they must be as many.

    Raises:
        SourceError: neither is so.
    """
    reader = getattr(dataset, "reader", None)
    found = getattr(reader, "class_to_idx", None) or getattr(reader, "class_name_to_idx", None)
    if not found:
        return None
    if set(found) <= set(names):
        return {label: names.index(name) for name, label in found.items()}
    if classes is not None and len(found) != classes:
        listed = f"{data} has {len(found)} classes ({some(sorted(found)) or 'no class folders'})"
        raise SourceError(listed, f"the network has {classes}", "Every class is a folder of images.")
    return None


class _Labelled(Dataset[object]):
    """Images and the network's labels; an image that cannot be read comes as `_Unreadable`."""

    def __init__(self, images: Any, mode: str, transform: Any, table: dict[int, int] | None) -> None:
        self.images, self.mode, self.transform, self.table = images, mode, transform, table

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int] | _Unreadable:
        try:
            image, label = self._image(index)
        except (OSError, ValueError, SyntaxError) as error:  # what Pillow raises for broken files
            return _Unreadable(self._name(index), first_line(error))
        label = -1 if label is None else int(label)
        return self.transform(image), label if self.table is None else self.table[label]

    def _image(self, index: int) -> tuple[object, int]:
        if not isinstance(self.images, ImageDataset):
            image, label = self.images[index]
            return image.convert(self.mode), label
        reader = self.images.reader
        if isinstance(reader, ReaderImageInTar):
            file, label = _tar_member(reader, index)
        else:
            file, label, *_ = reader[index]
        with file, Image.open(file) as image:
            return image.convert(self.mode), label

    def _name(self, index: int) -> str:
        named = getattr(self.images, "filename", None)
        return str(named(index)) if named else f"image {index}"


def _tar_member(reader: ReaderImageInTar, index: int) -> tuple[io.BytesIO, int]:
    """The image's bytes: timm's own way leaves a tar open, in a state that worker processes would share."""
    member, _, inside = reader.samples[index]  # `inside`: the tar within the tar that has it, or None
    with open(reader.root, "rb") as tar:
        tar.seek(member.offset_data + (inside.offset_data if inside else 0))
        return io.BytesIO(tar.read(member.size)), reader.targets[index]


def collate(batch: list[object]) -> object:
    """A batch for `Loader`, which raises what a worker could not read."""
    broken = next((item for item in batch if isinstance(item, _Unreadable)), None)
    return default_collate(batch) if broken is None else broken
