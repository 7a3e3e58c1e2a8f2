"""Training images: where they are, in which order they come, and what is done to them at random.

Everything random is a function of (seed, epoch, image, copy) and of nothing else: not of the number
of processes, nor of loader workers, nor of where a run was interrupted. So N processes together see
what one would see, and a resumed run what an uninterrupted one would see.
"""

import hashlib
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data.distributed_sampler import RepeatAugSampler
from timm.data.transforms_factory import transforms_imagenet_train
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from normswap.errors import OptionError, SourceError
from normswap.images import datasets, places as image_places
from normswap.plan import Body
from normswap.training.recipe import Augment, Data as DataPart

Example = tuple[Tensor, int]
# The epoch of an image, its index, and which of its copies in the epoch it is.
Position = tuple[int, int, int]
# Networks are compared by their loss on at most so many inputs.
_MOST_HELD_OUT = 256
_GIVE = "Give data.validation=PATH, or --data PATH (data.root) that holds train and val"


@dataclass(frozen=True)
class Share:
    """This process's share of every batch.

    Args:
        rank: The number of this process, from 0.
        world: The number of processes.
        accumulate: The number of micro-batches that a process makes of its share.
    """

    rank: int = 0
    world: int = 1
    accumulate: int = 1

    def micro(self, batch: int) -> int:
        """Return the number of images in a micro-batch.

        Args:
            batch: The number of images in a batch of all processes.

        Raises:
            OptionError: The batch cannot be divided equally over the micro-batches.
        """
        parts = self.world * self.accumulate
        if batch % parts:
            asked = f"{self.world} processes x train.accumulate {self.accumulate}"
            raise OptionError(
                f"data.batch_size {batch} is not divisible by {asked}", remedy="Change one of them"
            )
        return batch // parts


class Order(Sampler[list[Position]]):
    """The images of each micro-batch of one process.

    A batch is cut into slices. Micro-batch a of process r is slice a W + r, with W processes. One
    half of a slice is counted from the front of the batch and the other half from the back. Mixup
    mixes the i-th image from the front with the i-th image from the back, so both are in the same
    slice.

    Args:
        count: The number of images.
        batch: The number of images in a batch of all processes.
        share: The share of this process.
        seed: The seed. The order differs from epoch to epoch.
        first: The first update.
        last: The update before which the order ends.
        repeats: How many copies of an image follow one another. The copies count: an epoch has
            `count` of them, and so shows fewer different images if there are several of each.
    """

    def __init__(
        self,
        count: int,
        batch: int,
        share: Share,
        seed: int,
        first: int,
        last: int,
        repeats: int = 1,
    ) -> None:
        # The number of images, and the number of images in a batch of all processes.
        self.count = count
        self.batch = batch
        # Which part of each batch this process takes.
        self.share = share
        # The order of the images depends on this seed and on the epoch.
        self.seed = seed
        # The batches of the updates first, first + 1, ..., last - 1 are given.
        self.first = first
        self.last = last
        # Each image of an epoch comes so many times, with another augmentation each time.
        self.repeats = repeats

    def __len__(self) -> int:
        return (self.last - self.first) * self.share.accumulate

    def __iter__(self) -> Iterator[list[Position]]:
        micro_batch_size = self.share.micro(self.batch)
        per_epoch = self.count // self.batch
        # The epoch that `order` belongs to. There is none yet.
        ordered_epoch = -1

        for update in range(self.first, self.last):
            epoch, update_in_epoch = divmod(update, per_epoch)
            if epoch != ordered_epoch:
                order = self._of_epoch(epoch)
                ordered_epoch = epoch
            # The images of one update: those of all processes and micro-batches.
            images = order[update_in_epoch * self.batch : (update_in_epoch + 1) * self.batch]
            for micro_batch in range(self.share.accumulate):
                # The processes take the slices of the batch in turn.
                number = micro_batch * self.share.world + self.share.rank
                yield _slice(images, number, micro_batch_size)

    def _of_epoch(self, epoch: int) -> list[Position]:
        """Return the images of an epoch in random order, each as (epoch, index of the image, copy).

        Copies of an image stand side by side.
        """
        # With a single process that asks for all images, timm's sampler adds and drops none.
        sampler = RepeatAugSampler(
            range(self.count),
            num_replicas=1,
            rank=0,
            num_repeats=self.repeats,
            selected_round=0,
        )
        # timm's sampler takes the number of the epoch as its seed, so it is given a seed as number.
        sampler.set_epoch(key(self.seed, "order", epoch))
        # Copies of an image stand side by side, so its place tells which copy an entry is.
        return [(epoch, index, place % self.repeats) for place, index in enumerate(sampler)]


def _slice(images: list[Position], number: int, size: int) -> list[Position]:
    """Return one slice of a batch: `size` images, half of them from the back if `size` is even.

    Mixup blends an image with its mirror image in the batch, counted from the back. So a slice
    holds both of a pair.

    Args:
        images: The images of the batch.
        number: The number of the slice, from 0.
        size: The number of images in a slice.
    """
    # An odd slice has no pairs. Mixup is refused then, so consecutive images serve.
    if size % 2:
        return images[number * size : (number + 1) * size]

    half = size // 2
    end = len(images) - number * half
    return images[number * half : (number + 1) * half] + images[end - half : end]


def key(*parts: object) -> int:
    """Return a seed of 32 bits that depends on `parts` alone.

    Args:
        parts: Numbers and words, such as a seed, the word `order` and an epoch.
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "little")


@contextmanager
def drawn_by(*parts: object) -> Iterator[None]:
    """In a `with` block, make random numbers of Python, numpy and torch (CPU) depend on `parts`.

    The states of the generators are restored afterwards.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.get_rng_state()

    seed = key(*parts)
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


class Seeded(Dataset[Example]):
    """Training images that are augmented at random, in a way that can be repeated.

    An image is asked for by its position: the epoch, the index of the image, and which of its
    copies it is. The random numbers depend on the seed and the position alone.

    Args:
        images: All images with their labels, by row.
        rows: The rows of the images that are trained on. The index i means the i-th of these rows.
        seed: The seed of the augmentation.
    """

    def __init__(self, images: Any, rows: Sequence[int], seed: int) -> None:
        self.images = images
        self.rows = rows
        self.seed = seed

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: Position) -> Example:
        epoch, index, copy = position
        # The first copy of an image draws the numbers that it drew before images could be repeated.
        copies = [copy] if copy else []
        with drawn_by(self.seed, "image", epoch, index, *copies):
            return self.images[self.rows[index]]


class TrainingImages:
    """The training images of a recipe.

    Args:
        model: The record of how the network takes images (`datasets.image_record`).
        data: The recipe's part on images.
        seed: The seed of their order and augmentation.
        labelled: Whether the labels are read.

    Raises:
        SourceError: There are no images, their classes are not the network's, or the dataset is a
            stream.
        OptionError: A batch has more images than there are.
    """

    def __init__(self, model: Body, data: DataPart, seed: int, *, labelled: bool) -> None:
        self.place, _ = places(data)
        self.data = data
        self.seed = seed
        self.labelled = labelled

        # The images are opened with timm's transforms, which crop and augment them.
        images = datasets.open_images(
            model, self.place, "train", transform(model, data.augment), labelled=labelled
        )
        if not isinstance(images, datasets.LabelledImages):
            raise SourceError(
                f"{self.place} streams", "its images have no order that a run could resume in"
            )

        # The numbers of the images to train on: all, or as many as the recipe asks for.
        rows = datasets.drawn_rows(len(images), data.samples, seed)
        # A run is continued only on images with the same digest.
        self.digest = _digest(images)
        self.notes = images.notes
        self.images = Seeded(images, rows, seed)
        if len(self.images) < data.batch_size:
            why = f"{self.place} has {len(self.images)} images"
            raise OptionError(f"data.batch_size {data.batch_size} is too large", why)

    def batches(
        self, share: Share, first: int, last: int, *, pin: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the micro-batches of this process: images (N, C, H, W) and labels (N,).

        Args:
            share: The share of this process.
            first: The first update.
            last: The update before which the batches end.
            pin: Whether the batches lie in memory from which a GPU copies without waiting.
        """
        # Reading processes hand images over by a socket in the folder for temporary files.
        datasets.check_temporary_folder(self.data.workers)
        order = Order(
            len(self.images),
            self.data.batch_size,
            share,
            self.seed,
            first,
            last,
            repeats=self.data.augment.repeats,
        )
        # The loader draws a seed when it starts. With a generator of its own, it leaves torch's
        # generator as it is.
        loader: DataLoader[object] = DataLoader(
            self.images,
            batch_sampler=order,
            num_workers=self.data.workers,
            collate_fn=datasets.collate,
            pin_memory=pin,
            generator=torch.Generator().manual_seed(0),
            worker_init_fn=ignore_sigterm,
        )
        return iter(datasets.Loader(loader, self.place, None))


def validation(
    model: Body, data: DataPart, share: Share, seed: int, *, batch: int
) -> datasets.Loader | None:
    """Return this process's share of the validation images, or None where there are none.

    Args:
        model: The record of how the network takes images (`datasets.image_record`).
        data: The recipe's part on images.
        share: The share of this process.
        seed: The seed by which images are drawn if the recipe takes only some of them.
        batch: The number of images in a batch.

    Raises:
        SourceError: The images cannot be read, are a stream, or are fewer than the processes.
    """
    _, place = places(data)
    if place is None:
        return None

    loader = datasets.make_loader(
        model,
        place,
        batch_size=batch,
        workers=data.workers,
        samples=data.validation_samples,
        seed=seed,
    )
    if isinstance(loader.batches.dataset, IterableDataset):
        raise SourceError(f"{place} streams", "validation needs a dataset with a length")
    count = loader.count or 0
    if count < share.world:
        raise SourceError(f"{place} has {count} images", f"{share.world} processes validate")

    # The processes take the images in turn.
    loader = loader.only(range(share.rank, count, share.world))
    loader.batches.worker_init_fn = ignore_sigterm
    return loader


def held_out(model: Body, data: DataPart, images: TrainingImages) -> datasets.Loader:
    """Return inputs on which networks are compared by their loss, if no accuracy is measured.

    The inputs are validation images if there are any. Otherwise a tenth of the training images, at
    most `_MOST_HELD_OUT`, is taken out of training. If too few would be left for a batch, none is
    taken out, and networks are compared on training images.

    Args:
        model: The record of how the network takes images (`datasets.image_record`).
        data: The recipe's part on images.
        images: The training images, whose rows are changed in place.
    """
    # The numbers of the images that are trained on.
    rows = images.images.rows
    _, place = places(data)
    if place is not None:
        loader = datasets.make_loader(
            model,
            place,
            workers=data.workers,
            samples=_MOST_HELD_OUT,
            seed=images.seed,
            labelled=images.labelled,
        )
    else:
        count = min(len(rows) // 10, _MOST_HELD_OUT)
        if len(rows) - count < data.batch_size:
            count = 0
        chosen = {rows[index] for index in datasets.drawn_rows(len(rows), count, images.seed)}
        images.images.rows = [row for row in rows if row not in chosen]
        everything = datasets.make_loader(
            model, images.place, split="train", workers=data.workers, labelled=images.labelled
        )
        # If no image is taken out, training images are measured.
        loader = everything.only(sorted(chosen) or rows[:_MOST_HELD_OUT])

    loader.batches.worker_init_fn = ignore_sigterm
    return loader


def ignore_sigterm(worker: int) -> None:
    """Make the present process, which loads images, ignore the signal SIGTERM.

    A job scheduler sends SIGTERM to all processes of a run. The run needs images until it has
    saved its state.

    Args:
        worker: The number of the process, which torch passes. It is not read.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def places(data: DataPart) -> tuple[str, str | None]:
    """Return where the training and the validation images are, for `datasets.make_loader`.

    Returns:
        The place of the training images, and the place of the validation images or None. A place is
        a path, or the name of a dataset such as `hfds/user/name`.

    Raises:
        SourceError: The recipe names no images at all.
    """
    if data.root is None:
        remedy = "Give --data PATH, or data.root in the recipe: the folder of the images"
        raise SourceError("no images to train on", remedy=remedy)

    root = Path(data.root)
    if not root.exists():
        # The name of another package's dataset, such as hfds/user/name, stands for its validation
        # part, too.
        prefix, _, _ = data.root.partition("/")
        has_parts = prefix.lower() in image_places.PREFIXES
        return data.root, data.validation or (data.root if has_parts else None)

    # The training part is a folder or a tar in `root`, such as root/train.tar, or `root` itself.
    # The validation images stand beside a training part of such a name, or else in `root`.
    training = datasets.part_named(root, datasets.TRAIN) or root
    beside = training.parent if training.name.partition(".")[0] in datasets.TRAIN else root
    validated = data.validation or datasets.part_named(beside, datasets.VALIDATION)
    return str(training), str(validated) if validated else None


def require_validation(data: DataPart) -> None:
    """Raise SourceError if a recipe has no validation images.

    Args:
        data: The recipe's part on images.
    """
    _, validated = places(data)
    if validated is None:
        raise SourceError("there are no validation images", "runs are compared by top-1", _GIVE)


def image_notes(
    data: DataPart, training: TrainingImages, checked: datasets.Loader | None
) -> list[str]:
    """List sentences for the user: which images were taken, and how labels are read.

    Args:
        data: The recipe's part on images.
        training: The training images.
        checked: The validation images, if there are any.
    """
    place, validated = places(data)
    notes: list[str] = []
    # The user named a folder. The note says which of its parts was taken for training.
    if place != data.root:
        notes.append(f"training images of {place}, validation images of {validated}")
    notes += training.notes

    if checked is None:
        notes.append(
            "there are no validation images: top-1 is not measured, and best/ is the network with"
            " the lowest loss on inputs that are held out of training (a tenth, 256 at most). The"
            f" network before training is one of them. {_GIVE}"
        )
        return notes
    # Training and validation images may have the same note, which is said once.
    return list(dict.fromkeys([*notes, *checked.notes]))


def _digest(images: datasets.LabelledImages) -> str:
    """Return the SHA-256 of the number of images, and of their names where they are files.

    The names in a Hugging Face dataset are left out, because reading them reads all images.
    """
    digest = hashlib.sha256(str(len(images)).encode())
    # The reader of a Hugging Face dataset has an attribute `dataset`.
    reader = getattr(images.images, "reader", None)
    if reader is not None and not hasattr(reader, "dataset"):
        for name in reader.filenames():
            digest.update(str(name).encode())
    return digest.hexdigest()


def transform(model: Body, augment: Augment) -> transforms.Compose:
    """Return timm's training transform for the network.

    Without `augment.scale` the whole image is resized, then padded and cropped if the recipe says
    so.

    Args:
        model: The record of how the network takes images (`datasets.image_record`).
        augment: The recipe's part on augmentation.
    """
    size = tuple(model["input_size"][1:])
    interpolation = model.get("interpolation", "bilinear")
    # timm's types do not know that a size may be a pair, and that the parts come separately.
    make_transforms: Any = transforms_imagenet_train
    primary, secondary, last = make_transforms(
        img_size=size,
        scale=augment.scale,
        hflip=augment.hflip,
        # With None, timm adds no jitter of colours at all.
        color_jitter=augment.color_jitter or None,
        auto_augment=augment.auto_augment,
        re_prob=augment.erase,
        re_mode="pixel",
        separate=True,
        mean=model["mean"],
        std=model["std"],
        interpolation=interpolation,
    )

    # The first of timm's transforms is the random resized crop, which takes any part of an image.
    if augment.scale is None:
        whole: list[Callable[[Image.Image], Image.Image]] = [
            transforms.Resize(size, InterpolationMode(interpolation))
        ]
        if augment.padding:
            whole.append(transforms.RandomCrop(size, augment.padding, padding_mode="reflect"))
        primary.transforms[:1] = whole
    return transforms.Compose([primary, secondary, last])
