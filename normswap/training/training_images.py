"""Training images: where they are, in which order they come, and what is done to them at random.

Everything random is a function of (seed, epoch, image) and of nothing else: not of the number of processes, nor of
loader workers, nor of where a run was interrupted. So N processes see together what one process sees, and a resumed
run sees what the uninterrupted one would have seen.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.data import create_transform
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset

from normswap.errors import OptionError, SourceError
from normswap.images.datasets import PREFIXES, Loader, collate, open_images
from normswap.training import stopping
from normswap.training.augmenting import transform
from normswap.training.recipe import Data as DataPart

Record = Mapping[str, Any]
Example = tuple[Tensor, int]

_TRAIN = ("train", "training")
_VALIDATION = ("val", "valid", "validation", "eval", "evaluation", "test")
_PACKED = ("", ".tar", ".tar.xz", ".tar.gz")


@dataclass(frozen=True)
class Share:
    """Which part of every batch is this process's own.

    Args:
        rank: of this process.
        world: how many processes there are.
        accumulate: micro-batches per update.
    """

    rank: int = 0
    world: int = 1
    accumulate: int = 1

    def micro(self, batch: int) -> int:
        """Images per micro-batch.

        Raises:
            OptionError: the batch cannot be divided so.
        """
        parts = self.world * self.accumulate
        if batch % parts:
            asked = f"{self.world} processes x train.accumulate {self.accumulate}"
            raise OptionError(f"data.batch_size {batch} is not divisible by {asked}", remedy="Change one of them")
        return batch // parts


class Order(Sampler[list[tuple[int, int]]]):
    """The (epoch, index) of the images in each micro-batch of one process, from update `first` to before `last`.

    Process r of W takes the slice a W + r of micro-batch a. A slice is the i-th images from the front and, mirrored,
    from the back of the batch: mixup mixes each image with its mirror image, which then is in the same slice.
    """

    def __init__(self, count: int, batch: int, share: Share, seed: int, first: int, last: int) -> None:
        self.count, self.batch, self.share, self.seed, self.first, self.last = count, batch, share, seed, first, last

    def __len__(self) -> int:
        return (self.last - self.first) * self.share.accumulate

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        micro, per_epoch, known = self.share.micro(self.batch), self.count // self.batch, -1
        for update in range(self.first, self.last):
            epoch, at = divmod(update, per_epoch)
            if epoch != known:
                generator = torch.Generator().manual_seed(key(self.seed, "order", epoch))
                order, known = torch.randperm(self.count, generator=generator).tolist(), epoch
            images = order[at * self.batch : (at + 1) * self.batch]
            for part in range(self.share.accumulate):
                chosen = _slice(images, part * self.share.world + self.share.rank, micro)
                yield [(epoch, index) for index in chosen]


def _slice(images: list[int], which: int, size: int) -> list[int]:
    if size % 2:
        return images[which * size : (which + 1) * size]
    half, end = size // 2, len(images) - which * (size // 2)
    return images[which * half : (which + 1) * half] + images[end - half : end]


def key(*parts: object) -> int:
    """A seed of 32 bits for what these parts name."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "little")


@contextmanager
def drawn_by(*parts: object) -> Iterator[None]:
    """Let Python's, numpy's and torch's (CPU) random numbers be a function of `parts`; restored afterwards."""
    before, others, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed = key(*parts)
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(others)
        torch.set_rng_state(torchs)


class Seeded(Dataset[Example]):
    """Images by (epoch, index), augmented by random numbers that are a function of seed, epoch and index."""

    def __init__(self, images: Any, seed: int) -> None:
        self.images, self.seed = images, seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, at: tuple[int, int]) -> Example:
        epoch, index = at
        with drawn_by(self.seed, "image", epoch, index):
            return self.images[index]


class Training:
    """The training images of a recipe.

    Args:
        model: the network's preprocessing record (`zoo.data_config`, with `num_classes` and `label_names`).
        labelled: whether labels are used.

    Raises:
        SourceError: nothing there, no images, other classes than the network's, or a dataset that streams.
    """

    def __init__(self, model: Record, data: DataPart, seed: int, *, labelled: bool) -> None:
        self.place, self.data, self.seed = places(data)[0], data, seed
        images = open_images(model, self.place, "train", transform(model, data.augment), labelled=labelled)
        if isinstance(images, IterableDataset):
            raise SourceError(f"{self.place} streams", "its images have no order that a run could resume in")
        self.digest = _digest(images)
        self.images = Seeded(_some(images, data.samples, seed), seed)
        if len(self.images) < data.batch_size:
            why = f"{self.place} has {len(self.images)} images"
            raise OptionError(f"data.batch_size {data.batch_size} is too large", why)

    @property
    def updates_per_epoch(self) -> int:
        """Whole batches; the rest of the images is left out, other ones in each epoch."""
        return len(self.images) // self.data.batch_size

    def batches(self, share: Share, first: int, last: int, *, pin: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """Micro-batches of this process, from update `first` to before `last`."""
        order = Order(len(self.images), self.data.batch_size, share, self.seed, first, last)
        loader: DataLoader[Example] = DataLoader(
            self.images, batch_sampler=order, num_workers=self.data.workers, collate_fn=collate, pin_memory=pin,
            generator=torch.Generator().manual_seed(0), worker_init_fn=stopping.ignore,
        )  # fmt: skip
        return iter(Loader(loader, self.place, None))


def validation(model: Record, data: DataPart, share: Share, seed: int, *, batch: int) -> Loader | None:
    """This process's share of the validation images, or None where there are none.

    Raises:
        SourceError: they cannot be read, or have other classes than the network.
    """
    place = places(data)[1]
    if place is None:
        return None
    kept = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode")
    config = {name: model[name] for name in kept if name in model}
    images = open_images(model, place, "validation", create_transform(**config))
    if isinstance(images, IterableDataset):
        raise SourceError(f"{place} streams", "validation needs a dataset with a length")
    images = _some(images, data.validation_samples, seed)
    if len(images) < share.world:
        raise SourceError(f"{place} has {len(images)} images", f"{share.world} processes validate")
    mine = Subset(images, range(share.rank, len(images), share.world))
    loader: DataLoader[Example] = DataLoader(
        mine, batch, num_workers=data.workers, collate_fn=collate, generator=torch.Generator().manual_seed(0),
        worker_init_fn=stopping.ignore,
    )  # fmt: skip
    return Loader(loader, place, len(mine))


def places(data: DataPart) -> tuple[str, str | None]:
    """Where the training and the validation images are (as `data.make_loader` takes them).

    Raises:
        SourceError: the recipe names no images.
    """
    if data.root is None:
        raise SourceError("no images to train on", "the recipe has no data.root", "Give --data PATH")
    root = Path(data.root)
    if not root.exists():  # a dataset of timm's, which knows its parts, or an error when it is opened
        parts = data.root.partition("/")[0].lower() in PREFIXES
        return data.root, data.validation or (data.root if parts else None)
    training = _found(root, _TRAIN) or root
    beside = training.parent if training.name.partition(".")[0] in _TRAIN else root
    found = None if data.validation else _found(beside, _VALIDATION)
    return str(training), data.validation or (str(found) if found else None)


def _found(folder: Path, names: tuple[str, ...]) -> Path | None:
    if not folder.is_dir():
        return None
    options = (folder / f"{name}{ending}" for name in names for ending in _PACKED)
    return next((path for path in options if path.exists()), None)


def _some(images: Any, samples: int | None, seed: int) -> Any:
    if samples is None or samples >= len(images):
        return images
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:samples]
    return Subset(images, sorted(order.tolist()))


def _digest(images: Any) -> str:
    """SHA-256 of the names of all images, where the dataset has names, else of their number."""
    digest = hashlib.sha256(str(len(images)).encode())
    reader = getattr(images.images, "reader", None)
    if reader is not None:
        for name in reader.filenames():
            digest.update(str(name).encode())
    return digest.hexdigest()
